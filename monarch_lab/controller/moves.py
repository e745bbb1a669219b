"""Values between processes, and between the mesh and the kernel: reduce, fetch, inspect, replicate, shard."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from monarch_lab.controller.calling import Named, opened
from monarch_lab.controller.dispatch import dispatch
from monarch_lab.controller.futures import Future
from monarch_lab.controller.lending import check_stream
from monarch_lab.controller.recorder import refuse_fetch
from monarch_lab.controller.reducing import reduce_to
from monarch_lab.controller.refs import GRAPH
from monarch_lab.controller.waiting import Pending
from monarch_lab.errors import UsageIndexError, UsageKeyError, UsageTypeError, UsageValueError
from monarch_lab.transport.segments import LARGE_BYTES
from monarch_lab.wire import engine as wire

_REDUCE = Named("monarch_lab.worker.collectives.reduce", collective=True)
_REDUCE_ = Named("monarch_lab.worker.collectives.reduce_", collective=True, shown="reduce_")
_REDUCE_OUT = Named("monarch_lab.worker.collectives.reduce_out", collective=True, shown="reduce")
REDUCTIONS = ("sum", "avg", "product", "max", "min", "band", "bor", "bxor", "stack")


def _dims(mesh: Any, dims: Any) -> tuple[str, ...]:
    chosen = (dims,) if isinstance(dims, str) else tuple(dims)
    if not chosen:
        return mesh.names
    for d in chosen:
        if d not in mesh.names:
            raise UsageKeyError(f"reduce: {mesh} does not have dimension {d!r}; it has {', '.join(mesh.names)}")
    if len(set(chosen)) != len(chosen):
        raise UsageValueError(f"reduce: dimension named twice in {chosen}")
    return chosen


def _arguments(tensor: Any, dims: Any, reduction: str, scatter: bool) -> tuple[Any, ...]:
    if reduction not in REDUCTIONS:
        raise UsageValueError(f"reduce: {reduction!r} is no reduction; there are {', '.join(REDUCTIONS)}")
    home = tensor._ref.mesh
    chosen = _dims(home, dims)
    home.client.ties.meet(home.ranks_key)
    number = home.defined()
    return number, chosen, tuple(home.sizes[d] for d in chosen), reduction, bool(scatter)


def _now_equal(result: Any, dims: Sequence[str], scatter: bool) -> Any:
    mesh = result._ref.mesh
    bits = sum(1 << mesh.names.index(d) for d in dims)
    if scatter:
        (result._store or result._ref).equal &= ~(bits | bits << GRAPH)
    elif result._store is None:  # of a view's storage, only the part it covers has become equal
        result._ref.equal |= bits
    return result


def reduce_tensor(
    tensor: Any, dims: Any, reduction: str, *, scatter: bool = False, mesh: Any = None, out: Any = None
) -> Any:
    check_stream(_REDUCE, tensor._ref.mesh)
    arguments = _arguments(tensor, dims, reduction, scatter)
    if mesh is not None and mesh is not tensor.mesh:
        if scatter:
            raise UsageValueError("reduce: scatter gives every process a piece, so mesh= makes no sense with it")
        return reduce_to(tensor, arguments[1], reduction, mesh, out)
    if out is None:
        return _now_equal(dispatch(_REDUCE, (tensor, *arguments)), arguments[1], scatter)
    return _now_equal(dispatch(_REDUCE_OUT, (tensor, out, *arguments)), arguments[1], scatter)


def reduce_tensor_(tensor: Any, dims: Any, reduction: str, *, scatter: bool = False, mesh: Any = None) -> Any:
    if scatter:
        raise UsageValueError("reduce_: scatter is not valid for in-place, the result has another shape")
    if reduction == "stack":
        raise UsageValueError("reduce_: stack is not valid for in-place, the result has another shape")
    if mesh is not None and mesh is not tensor.mesh:
        raise UsageValueError("reduce_: the result is on the tensor's own mesh: use t.reduce(..., mesh=mesh)")
    check_stream(_REDUCE_, tensor._ref.mesh)
    arguments = _arguments(tensor, dims, reduction, scatter)
    return _now_equal(dispatch(_REDUCE_, (tensor, *arguments)), arguments[1], scatter)


def _is_mesh(x: Any) -> bool:
    return getattr(x, "is_mesh_tensor", False)


def reduce(
    tree: Any, dims: Any = (), reduction: str = "sum", scatter: bool = False, mesh: Any = None, out: Any = None
) -> Any:
    """Combine the processes' values along mesh dims; every mesh tensor of a pytree.

    ``dims``: a name or several; () is all. ``reduction``: sum, avg, product, max, min, band, bor, bxor, or stack,
    with local shape S and the dims' sizes n:

        no scatter  each process gets the result, shape S; stack: (*n, *S)
        scatter     each process gets its piece: the leading dims are n, S without them is left; stack: S, an all-to-all

    ``mesh``: where the result shall be, in place of all processes: a mesh with the dims that are not reduced, such as
    mesh.slice(gpu=0); along dims that only it has, the result is broadcast. ``out``: a mesh tensor of the result's
    shape, which is written and returned; for one tensor, not a pytree.

    Differentiable: the loss is each rank's own. For two ranks with 3 and 5 and an upstream gradient of 1 on each,
    sum gives 8 and a gradient of 1 on each; avg 4 and 0.5; max 5 and (0, 1), a tie 0.5 each; stack (3, 5) and each
    rank's own entry; product 15 and (5, 3). With ``mesh`` one loss hangs on all of them: with an upstream gradient of
    1 on the one process, the same numbers, of stack the entry of each. Raises KeyError for an unknown dim, ValueError
    for an unknown reduction or a dim named twice, or a ``mesh`` that does not fit, TypeError where the leading dims do
    not fit a scatter.
    """
    if out is not None:
        if not _is_mesh(tree):
            raise UsageTypeError("reduce: out= is for one mesh tensor, not a pytree")
        return reduce_tensor(tree, dims, reduction, scatter=scatter, mesh=mesh, out=out)
    return tree_map(lambda x: reduce_tensor(x, dims, reduction, scatter=scatter, mesh=mesh) if _is_mesh(x) else x, tree)


def reduce_(tree: Any, dims: Any = (), reduction: str = "sum", mesh: Any = None) -> Any:
    """As ``reduce``, written into each mesh tensor of the pytree."""
    return tree_map(lambda x: reduce_tensor_(x, dims, reduction, mesh=mesh) if _is_mesh(x) else x, tree)


def _coordinates(mesh: Any, shard: dict[str, int] | None, dims: dict[str, int]) -> int:
    """The rank meant: the first process where nothing is said."""
    chosen = {**(shard or {}), **dims}
    if not chosen:
        return mesh.ranks_key[0]
    at = []
    for name in chosen:
        if name not in mesh.names:
            raise UsageKeyError(f"{mesh} does not have dimension {name!r}; it has {', '.join(mesh.names)}")
    for name in mesh.names:
        size = mesh.sizes[name]
        if name not in chosen:
            if size != 1:
                raise UsageValueError(
                    f"Missing key {name!r}: say which process, as in gpu=0; {mesh} has {size} of them"
                )
            at.append(0)
            continue
        index = chosen[name]
        if not -size <= index < size:
            raise UsageIndexError(f"{name}={index} is out of range: {mesh} has {size}, so {-size} to {size - 1}")
        at.append(index % size)
    return mesh.slice_.rank(tuple(at))


def _request(mesh: Any, tensors: list[Any], ranks: Sequence[int]) -> Pending:
    refuse_fetch("fetching a value")
    client = mesh.client
    mesh.check_alive(ranks)
    for t in tensors:
        if hasattr(t, "_value"):
            from monarch_lab.controller.constants import materialise

            materialise(t)
    refs = [t._ref.id for t in tensors]
    is_large = any(t._meta.numel * t._meta.dtype.itemsize >= LARGE_BYTES for t in tensors)
    pids = {r: client.supervisor.processes[r].pid for r in ranks if is_large and not mesh.stream_number}
    if not pids or not all(map(client.segments.can_read, pids.values())):  # a worker's segments are its main thread's
        return client.request(lambda ident: wire.Fetch(ident, refs), ranks, stream=mesh.stream_number)
    unmapped = {rank: client.segments.unmapped(pid) for rank, pid in pids.items()}
    free, drop = ({rank: fds for rank, both in unmapped.items() if (fds := both[k])} for k in (0, 1))
    return client.request(lambda ident: wire.Fetch(ident, refs, True, free, drop), ranks)


def _shared_mesh(tensors: list[Any]) -> Any:
    mesh = tensors[0]._ref.mesh
    if any(t._ref.mesh is not mesh for t in tensors):
        raise UsageTypeError("WRONG_MESH: fetch tensors of one mesh at a time")
    return mesh


def fetch_shard(obj: Any, shard: dict[str, int] | None = None, **dims: int) -> Future[Any]:
    """A Future of one process's values of a pytree, on the CPU and without graph.

    The process is the mesh's first, or the one at ``shard={"gpu": 1}`` or ``gpu=1`` (negative counts from the end;
    dims of size 1 may be left out). Raises ValueError for a missing dim, KeyError for an unknown one, IndexError
    out of range. The future raises RemoteException where the value, or what it hangs on, failed.
    """
    leaves, spec = tree_flatten(obj)
    tensors = [x for x in leaves if _is_mesh(x)]
    if not tensors:
        raise UsageTypeError("fetch_shard was given no mesh tensor")
    mesh = _shared_mesh(tensors)
    client = mesh.client
    rank = _coordinates(mesh, shard, dims)
    settle_collectives(client, (rank,))
    pending = _request(mesh, tensors, (rank,))

    def finish(p: Pending) -> Any:
        values = iter(opened(client, p, rank))
        return tree_unflatten([next(values) if _is_mesh(x) else x for x in leaves], spec)

    return Future(client, pending, finish)


def settle_collectives(client: Any, ranks: Sequence[int]) -> None:
    """After a collective a value of these ranks may hang on a failure of another one: they hear of it first."""
    if needed := client.ties.unsettled(ranks):
        client.settle(needed)


def inspect(obj: Any, shard: dict[str, int] | None = None, **dims: int) -> Any:
    """``fetch_shard(obj, ...).result()``: one process's values."""
    return fetch_shard(obj, shard, **dims).result()


def fetch_all(obj: Any) -> Any:
    """Every process's values of a pytree, on the CPU: each mesh tensor of local shape S becomes one of shape
    (*mesh sizes, *S). Where the processes' shapes differ, a nested list by mesh dims instead."""
    leaves, spec = tree_flatten(obj)
    tensors = [x for x in leaves if _is_mesh(x)]
    if not tensors:
        return obj
    mesh = _shared_mesh(tensors)
    client = mesh.client
    settle_collectives(client, mesh.ranks_key)
    pending = _request(mesh, tensors, mesh.ranks_key)
    client.wait(pending)
    by_rank = [opened(client, pending, rank) for rank in mesh.ranks_key]
    sizes = tuple(mesh.sizes[n] for n in mesh.names)
    stacked = iter([_stack(list(values), sizes) for values in zip(*by_rank, strict=True)])
    return tree_unflatten([next(stacked) if _is_mesh(x) else x for x in leaves], spec)


def _stack(values: list[torch.Tensor], sizes: tuple[int, ...]) -> Any:
    if all(v.shape == values[0].shape for v in values) and values[0].layout is torch.strided:
        return torch.stack(values).reshape(*sizes, *values[0].shape)
    nested: Any = values
    for size in reversed(sizes[1:]):
        nested = [nested[k : k + size] for k in range(0, len(nested), size)]
    return nested if sizes else values[0]


def fetch_one(tensor: Any) -> torch.Tensor:
    """The value of the first process."""
    mesh = tensor._ref.mesh
    client = mesh.client
    rank = mesh.ranks_key[0]
    settle_collectives(client, (rank,))
    pending = _request(mesh, [tensor], (rank,))
    client.wait(pending)
    return opened(client, pending, rank)[0]
