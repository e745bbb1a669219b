"""Local values onto the mesh: literals, replicate, shard."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from msgspec.structs import replace
from torch.utils._pytree import tree_map

from monarch_lab.controller.dispatch import make_handle, sign
from monarch_lab.controller.locations import here
from monarch_lab.controller.refs import Ref
from monarch_lab.controller.state import recorder
from monarch_lab.errors import UsageTypeError, UsageValueError
from monarch_lab.tensors import payload
from monarch_lab.tensors.meta import describe, intern
from monarch_lab.wire import engine as wire


def place(mesh: Any, values: dict[int, list[torch.Tensor]], refs: list[int]) -> None:
    """Keep each rank's tensors there under ``refs``. Ranks with the same tensors are sent them once."""
    client = mesh.client
    mesh.check_alive()
    groups: dict[tuple[int, ...], tuple[list[torch.Tensor], list[int]]] = {}
    for rank, tensors in values.items():
        groups.setdefault(tuple(map(id, tensors)), (tensors, []))[1].append(rank)
    # A recording sends its literals again: they travel as messages, which it keeps.
    is_shared = recorder.get() is None and client.segments.can_read(os.getpid())
    packed = []
    for tensors, ranks in groups.values():
        frames, _ = payload.dumps(tensors, copy=not is_shared)
        packed.append((ranks, client.lender.put(frames, ranks) if is_shared else (frames, [], [])))
    with client.lock:
        number = client.number_order(here(3))
        for ranks, (frames, segments, loans) in packed:
            order = wire.Place(refs, mesh.torch_device, segments, os.getpid(), loans, number)
            client.order(order, ranks, frames, mesh.stream_number)
    client.lender.trim(client.after_all)


def _plain_copy(tensor: torch.Tensor) -> torch.Tensor:
    """What is sent: data of a leaf with the same requires_grad, whatever graph the local tensor has."""
    plain = tensor.detach()
    return plain.requires_grad_(True) if tensor.requires_grad else plain


def replicate(mesh: Any, tensor: torch.Tensor) -> Any:
    """A mesh tensor that holds the values of a local one on each process."""
    if getattr(tensor, "is_mesh_tensor", False):
        raise UsageTypeError("replicate was given a mesh tensor: it is on a mesh already")
    plain = _plain_copy(tensor)
    ref = Ref(next(mesh.client.refs), mesh, mesh.all_equal)
    place(mesh, {rank: [plain] for rank in mesh.ranks_key}, [ref.id])
    return _handle(tensor, plain, ref)


def shard(mesh: Any, tensor: torch.Tensor, dim_name: str, dim: int) -> Any:
    """A mesh tensor whose processes along ``dim_name`` hold consecutive parts of ``dim`` of a local one."""
    if getattr(tensor, "is_mesh_tensor", False):
        raise UsageTypeError("shard was given a mesh tensor: it is on a mesh already")
    n = mesh.size(dim_name)
    if not -tensor.dim() <= dim < tensor.dim():
        raise UsageValueError(f"shard: the tensor of shape {tuple(tensor.shape)} has no dim {dim}")
    if tensor.shape[dim] % n:
        raise UsageValueError(
            f"shard: size {tensor.shape[dim]} of dim {dim} does not divide by {n}, the size of mesh dim "
            f'"{dim_name}": drop or pad {tensor.shape[dim] % n} of them'
        )
    axis = mesh.names.index(dim_name)
    bit = 1 << axis
    parts = [p.contiguous() for p in _plain_copy(tensor).detach().chunk(n, dim)]
    if tensor.requires_grad:
        parts = [p.requires_grad_(True) for p in parts]
    values = {rank: [parts[mesh.slice_.coordinates(rank)[axis] if mesh.sizes else 0]] for rank in mesh.ranks_key}
    equal = mesh.all_equal & ~(bit | bit << 16) if n > 1 else mesh.all_equal
    ref = Ref(next(mesh.client.refs), mesh, equal)
    place(mesh, values, [ref.id])
    return _handle(tensor, parts[0], ref)


def _handle(local: torch.Tensor, sent: torch.Tensor, ref: Ref) -> Any:
    # The workers rebuild it in a storage of its own.
    told = describe(sent)
    device = ref.mesh.torch_device or told.device
    told = replace(told, is_view=told.is_conj or told.is_neg, is_inference=False, device=device)
    handle = make_handle(intern(told), ref)
    if handle._meta.wants_sig:
        sign(handle, 0, 0, [])
    if isinstance(local, torch.nn.Parameter):
        handle._is_param = True
    return handle


def placed(value: Any, put: Callable[[torch.Tensor], Any]) -> Any:
    """The pytree, or a copy of the module, with what ``put`` makes of each of its tensors and arrays, once each."""
    from monarch_lab.controller.activation import no_mesh  # it needs mode.py, which needs this

    if isinstance(value, torch.nn.Module):
        with no_mesh.activate():
            return _module_placed(value, put)
    seen: dict[int, Any] = {}

    def one(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            if type(x).__module__ == "numpy" and hasattr(x, "__array__") and int(getattr(x, "ndim", 0)) > 0:
                x = torch.as_tensor(x)
            else:
                return x
        if id(x) not in seen:
            seen[id(x)] = (x, put(x))
        return seen[id(x)][1]

    with no_mesh.activate():
        return tree_map(one, value)


def _module_placed(module: torch.nn.Module, put: Any) -> torch.nn.Module:
    """A copy of a local module whose parameters and buffers are on the mesh."""
    import copy

    memo: dict[int, Any] = {}
    for t in [*module.parameters(), *module.buffers()]:
        if id(t) not in memo:
            memo[id(t)] = put(t)
    return copy.deepcopy(module, memo)
