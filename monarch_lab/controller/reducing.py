"""reduce to another mesh: every process's value goes to the one that gets the result, which combines them.

Made of a move and ops of the mesh that gets it, so the gradients are those of both: each process gets the gradient of
the result that its value went into.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from monarch_lab.controller import crossings
from monarch_lab.errors import UsageTypeError, UsageValueError

# What gloo adds up without a detour; the others are gathered first.
_ADDED = {
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.int8,
    torch.complex64,
    torch.complex128,
}


def _bits(operation: Callable[[Any, Any], Any]) -> Callable[[Any], Any]:
    return lambda x: functools.reduce(operation, x.unbind(0))


_COMBINED: dict[str, Callable[[Any], Any]] = {
    "sum": lambda x: x.any(0) if x.dtype is torch.bool else x.sum(0, dtype=x.dtype),
    "product": lambda x: x.all(0) if x.dtype is torch.bool else x.prod(0, dtype=x.dtype),
    "max": lambda x: x.amax(0),
    "min": lambda x: x.amin(0),
    "band": _bits(torch.bitwise_and),
    "bor": _bits(torch.bitwise_or),
    "bxor": _bits(torch.bitwise_xor),
}


def reduce_to(tensor: Any, dims: Sequence[str], reduction: str, mesh: Any, out: Any = None) -> Any:
    """``tensor`` reduced over ``dims`` of its mesh, on ``mesh``, which must have the other dims; see ``ml.reduce``."""
    home = tensor._ref.mesh
    if not hasattr(mesh, "ranks_key"):
        raise UsageTypeError(f"reduce: mesh= is a mesh, as from mesh.slice(gpu=0), not {type(mesh).__name__}")
    if out is not None and getattr(getattr(out, "_ref", None), "mesh", None) is not mesh:
        if getattr(out, "is_mesh_tensor", False):
            raise UsageTypeError(f"WRONG_MESH: reduce: out is on {out._ref.mesh}, and the result is to be on {mesh}")
        raise UsageTypeError("LOCAL_TENSOR: reduce: out is a mesh tensor on the mesh of the result")
    kept = [n for n in home.names if n not in dims]
    for name in kept:
        if mesh.sizes.get(name) != home.sizes[name]:
            raise UsageValueError(
                f'reduce: {mesh} must have dimension "{name}" of size {home.sizes[name]}, which is not reduced: choose '
                f"one place of it first, with t.slice_mesh({name}=0)"
            )
    one = mesh.slice(**{n: 0 for n in mesh.names if n not in kept})
    result = _reduced(tensor, dims, reduction, one)
    if one is not mesh:
        result = crossings.to_mesh(result, mesh)
    return result if out is None else _written(result, out)


def _written(result: Any, out: Any) -> Any:
    if out.shape != result.shape:
        raise UsageValueError(f"reduce expects out to be of shape {tuple(result.shape)}, not {tuple(out.shape)}")
    return out.copy_(result)


def _reduced(tensor: Any, dims: Sequence[str], reduction: str, mesh: Any) -> Any:
    dtype, sizes = tensor.dtype, [tensor._ref.mesh.sizes[d] for d in dims]
    if reduction == "avg":
        if not (dtype.is_floating_point or dtype.is_complex):
            raise UsageTypeError(f"the average of {dtype} is not of that dtype: reduce t.float() instead")
        n = functools.reduce(lambda a, b: a * b, sizes, 1)
        return crossings.gather_to(tensor, dims, mesh, "sum") / n
    if reduction == "sum" and dtype in _ADDED:
        return crossings.gather_to(tensor, dims, mesh, "sum")
    if reduction in ("max", "min") and dtype.is_complex:
        raise UsageTypeError(f"{reduction} is not defined for complex numbers")
    stacked = crossings.gather_to(tensor, dims, mesh, "stack")
    if reduction == "stack":
        return stacked if len(sizes) == 1 else stacked.reshape(*sizes, *tensor.shape)
    return _COMBINED[reduction](stacked)
