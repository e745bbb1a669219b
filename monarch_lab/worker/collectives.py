"""reduce over mesh dims, and its adjoints.

The loss is each rank's own: backward runs on each rank and, but for the scatter forms, communicates nothing. With
two ranks holding 3 and 5 and an upstream gradient of 1 on each:

    sum    -> 8 on both; gradient 1 on each (not 2: the upstream gradient is not summed again)
    avg    -> 4 on both; gradient 0.5 on each
    max    -> 5 on both; gradient 0 and 1; a tie of both gives 0.5 and 0.5
    stack  -> (3, 5) on both; the gradient of rank r is entry r of its own upstream
"""

from __future__ import annotations

import math
from typing import Any

import torch

from monarch_lab.worker.failures import severed_when_it_fails
from monarch_lab.worker.groups import Group, current

_OPERATIONS = {
    "sum": "SUM",
    "avg": "SUM",
    "product": "PRODUCT",
    "max": "MAX",
    "min": "MIN",
    "band": "BAND",
    "bor": "BOR",
    "bxor": "BXOR",
}
_WIDER = {torch.bool: torch.uint8, torch.int16: torch.int32}  # dtypes that gloo does not know


def _wire_form(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous copy that gloo can add up: complex as pairs, others as what is wider."""
    copy = tensor.detach().clone(memory_format=torch.contiguous_format)
    if copy.is_complex():
        return torch.view_as_real(copy)
    return copy.to(_WIDER[copy.dtype]) if copy.dtype in _WIDER else copy


def _back(buffer: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    if like.is_complex():
        return torch.view_as_complex(buffer)
    return buffer.to(like.dtype) if like.dtype in _WIDER else buffer


def _all_reduce(tensor: torch.Tensor, group: Group, reduction: str) -> torch.Tensor:
    if tensor.is_complex() and reduction not in ("sum", "avg"):
        raise TypeError(f"{reduction} is not defined for complex numbers")
    if reduction == "avg" and not (tensor.is_floating_point() or tensor.is_complex()):
        raise TypeError(f"the average of {tensor.dtype} is not of that dtype: reduce t.float() instead")
    if tensor.dtype is torch.bool:
        reduction = {"sum": "max", "bor": "max", "band": "min", "product": "min", "bxor": "bxor"}.get(
            reduction, reduction
        )
    buffer = _wire_form(tensor)
    add_up(buffer, group, reduction)
    return _back(buffer, tensor)


def add_up(buffer: torch.Tensor, group: Group, reduction: str) -> None:
    if group.backend is not None:
        import torch.distributed as dist

        options = dist.AllreduceOptions()
        options.reduceOp = getattr(dist.ReduceOp, _OPERATIONS[reduction])
        with severed_when_it_fails():
            group.backend.allreduce([buffer], options).wait()
    if reduction == "avg":
        buffer /= group.size


def _all_gather(tensor: torch.Tensor, group: Group) -> torch.Tensor:
    buffer = _wire_form(tensor)
    parts = [torch.empty_like(buffer) for _ in group.ranks]
    if group.backend is None:
        parts = [buffer]
    else:
        with severed_when_it_fails():
            group.backend.allgather([parts], [buffer]).wait()
    return _back(torch.stack(parts), tensor)


def _all_to_all(tensor: torch.Tensor, group: Group) -> torch.Tensor:
    """Row i of the result is row ``position`` of rank i."""
    buffer = _wire_form(tensor)
    out = torch.empty_like(buffer)
    if group.backend is None:
        out = buffer
    else:
        import torch.distributed as dist

        with severed_when_it_fails():
            group.backend.alltoall_base(out, buffer, [], [], dist.AllToAllOptions()).wait()
    return _back(out, tensor)


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: Group, reduction: str, scatter: bool) -> torch.Tensor:
        ctx.group, ctx.reduction, ctx.scatter = group, reduction, scatter
        if reduction == "stack":
            return _all_to_all(tensor, group) if scatter else _all_gather(tensor, group)
        whole = _all_reduce(tensor, group, reduction)
        if reduction in ("max", "min") and tensor.requires_grad:
            mine = (tensor == whole).to(whole.dtype)
            ctx.save_for_backward(mine / _all_reduce(mine, group, "sum"))
        elif reduction == "product" and tensor.requires_grad:
            factors = _all_gather(tensor, group)
            others = [k for k in range(group.size) if k != group.position]
            ctx.save_for_backward(factors[others].prod(0).conj().resolve_conj())
        return whole[group.position].clone() if scatter else whole

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (gradient,) = gradients
        group, reduction = ctx.group, ctx.reduction
        if reduction == "stack":
            back = _all_to_all(gradient, group) if ctx.scatter else gradient[group.position]
            return back, None, None, None
        if ctx.scatter:  # every rank's piece came from all ranks: gather what each got
            gradient = _all_gather(gradient, group)
        if reduction == "avg":
            gradient = gradient / group.size
        elif reduction in ("max", "min", "product"):
            (share,) = ctx.saved_tensors
            gradient = gradient * share
        return gradient, None, None, None


def reduce(
    tensor: torch.Tensor, mesh: int, dims: tuple[str, ...], sizes: tuple[int, ...], reduction: str, scatter: bool
) -> torch.Tensor:
    """Every rank's ``tensor`` over the group of ``dims`` (sizes ``sizes``, their product n), of local shape S:

    no scatter: shape S (stack: (*sizes, *S)); scatter: leading dims must be ``sizes``, S without them is left
    (stack: S, an all-to-all).
    """
    group = current().along(mesh, dims)
    n = math.prod(sizes)
    if scatter:
        if tuple(tensor.shape[: len(sizes)]) != tuple(sizes):
            raise TypeError(
                f"when scattering over {', '.join(dims)} the leading sizes must be {tuple(sizes)}, "
                f"not {tuple(tensor.shape[: len(sizes)])} of shape {tuple(tensor.shape)}"
            )
        rest = tuple(tensor.shape[len(sizes) :])
        flat = _Reduce.apply(tensor.reshape(n, *rest), group, reduction, True)
        return flat.reshape(tensor.shape) if reduction == "stack" else flat
    out = _Reduce.apply(tensor, group, reduction, False)
    return out.reshape(*sizes, *tensor.shape) if reduction == "stack" and len(sizes) != 1 else out


def reduce_(
    tensor: torch.Tensor, mesh: int, dims: tuple[str, ...], sizes: tuple[int, ...], reduction: str, scatter: bool
) -> torch.Tensor:
    """As reduce, written into ``tensor``."""
    plain = tensor.is_contiguous() and not (tensor.requires_grad or tensor.is_complex() or tensor.dtype in _WIDER)
    if plain and not (reduction == "avg" and not tensor.is_floating_point()):
        with torch.no_grad():  # the pages of a copy would cost as much again
            add_up(tensor, current().along(mesh, dims), reduction)
        torch.autograd.graph.increment_version(tensor)
        return tensor
    return tensor.copy_(reduce(tensor, mesh, dims, sizes, reduction, scatter))


def reduce_out(
    tensor: torch.Tensor,
    out: torch.Tensor,
    mesh: int,
    dims: tuple[str, ...],
    sizes: tuple[int, ...],
    reduction: str,
    scatter: bool,
) -> torch.Tensor:
    """As reduce, written into ``out``, which has the result's shape."""
    result = reduce(tensor, mesh, dims, sizes, reduction, scatter)
    if out.shape != result.shape:
        raise ValueError(f"reduce expects out to be of shape {tuple(result.shape)}, not {tuple(out.shape)}")
    return out.copy_(result)
