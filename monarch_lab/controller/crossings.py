"""Values from one mesh to another: to_mesh, slice_mesh, reduce to another mesh.

A move is an op of both meshes' processes, in its place in the stream; what it gives is known here, so nobody waits.
Where gradients are to come back, the result carries a Crossing, and so does every value made of it: return_path.py
takes a backward pass from mesh to mesh along them. See worker/moves.py for the other side.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from msgspec.structs import replace
from torch.utils._pytree import tree_map

from monarch_lab.controller import constants, dispatch, locations
from monarch_lab.controller.forgetting import make_room
from monarch_lab.controller.refs import GRAPH, Ref
from monarch_lab.controller.state import ambient_number, recorder
from monarch_lab.controller.streams import hand_over
from monarch_lab.errors import UsageTypeError, UsageValueError
from monarch_lab.tensors.meta import Meta, intern
from monarch_lab.transport.frames import HeldInterrupt
from monarch_lab.wire import engine as wire
from monarch_lab.wire.engine import Op


class Span:
    """The processes of both sides of a move, where they are no mesh: what a batch of the stream is for."""

    def __init__(self, client: Any, ranks: Sequence[int], number: int, stream: int) -> None:
        self.client = client
        self.stream_number = stream
        self.ranks_key = tuple(ranks)
        self.scope = number
        client.scope_ranks[number] = self.ranks_key

    def check_alive(self) -> None:
        self.client.check_alive(self.ranks_key)


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Move:
    """A kind of move: from ``home`` to ``far``, of values of one kind."""

    number: int
    kind: str  # see wire.MoveDef
    home: Any
    far: Any
    span: Any
    meta: Meta


class Crossing:
    """A place where a graph goes on on another mesh: from a value on ``move.far`` to where it came from.

    ``stand_in`` keeps the graph at home, and whatever hangs on the value keeps the Crossing.
    """

    __slots__ = ("number", "move", "stand_in")

    def __init__(self, move: Move, stand_in: Any) -> None:
        self.number = stand_in._ref.id
        self.move = move
        self.stand_in = stand_in
        dispatch.crossings.add(self.number)

    def __del__(self) -> None:
        dispatch.crossings.discard(self.number)

    def equal_at_home(self, mask: int) -> int:
        """Along which dims of home the gradient is equal that comes back, for one that is ``mask`` equal on far."""
        home, far, out = self.move.home, self.move.far, 0
        for k, name in enumerate(home.names):
            if name not in far.names:  # reduced to one process: a sum's gradient goes to each, of others to some
                kept = self.move.kind == "sum"
            else:
                kept = far.sizes[name] == home.sizes[name] and mask >> far.names.index(name) & 1
            out |= kept << k
        return out | out << GRAPH


def _is_mesh(x: Any) -> bool:
    return getattr(x, "is_mesh_tensor", False)


def to_mesh(tree: Any, mesh: Any, stream: Any = None) -> Any:
    """Copies of the mesh tensors of a pytree on ``mesh``; the rest of it as it is.

    Each process of ``mesh`` gets the value of the process of the tensor's own mesh that has the same coordinates:
    every dim of that must be in ``mesh``, with the same size; along dims that only ``mesh`` has, it is broadcast.
    Shape and dtype stay, strides too where the tensor has no gaps. A process that sends to itself copies nothing before
    one of the two is written. Issued like an op, in order, and waits for nothing; where the value failed, the copy has.

    Differentiable: the gradient goes back to where the value came from, summed over what it was broadcast to. A value
    3 on one process, broadcast to two that multiply it by 1 and by 10, gets the gradient 11. ``backward()`` runs on
    every mesh that the graph crosses; only ``create_graph=True`` does not go across.

    It runs on the tensor's stream, and the copies are there too, or on ``stream``.

    Raises ValueError where the dims do not fit, TypeError for what is no mesh, a mesh of other processes
    (WRONG_MESH), a tensor that is not strided, or one that requires grad with another ``stream`` (REQUIRES_GRAD).
    """
    if not hasattr(mesh, "ranks_key"):
        raise UsageTypeError(f"to_mesh takes a mesh, as from mesh.slice(host=0), not {type(mesh).__name__}")
    if stream is not None and not hasattr(stream, "borrow"):
        raise UsageTypeError(f"to_mesh: stream is an ml.Stream, not {type(stream).__name__}")

    def one(t: Any) -> Any:
        moved = _to_mesh(t, mesh)
        return moved if stream is None or moved._ref.mesh.stream is stream.key else hand_over(moved, stream)

    return tree_map(lambda t: one(t) if _is_mesh(t) else t, tree)


def slice_mesh(tree: Any, **dims: int | slice) -> Any:
    """The mesh tensors of a pytree on a part of their mesh, as ``mesh.slice(**dims)``; nothing is sent.

    ``t.slice_mesh(host=0).to_mesh(other)`` moves that part alone. Writing to one leaves the other as it was.
    Differentiable: of two processes that hold 3 and 5, slice_mesh(gpu=1) gives 5, and the gradient 1 of it goes back
    as 0 and 1. Raises as ``mesh.slice``: TypeError for an unknown dim, IndexError out of range.
    """

    def one(t: Any) -> Any:
        if not _is_mesh(t):
            return t
        home = t._ref.mesh
        part = home.slice(**dims)
        return _moved(t, part, "spread", [[rank, rank] for rank in part.ranks_key], "slice_mesh")

    return tree_map(one, tree)


def _to_mesh(tensor: Any, far: Any) -> Any:
    home = tensor._ref.mesh
    if missing := [n for n in home.names if n not in far.names]:
        raise UsageValueError(
            f"to_mesh: the destination mesh does not have dimensions {', '.join(missing)} of {home}: choose one place "
            f"of them with t.slice_mesh({missing[0]}=0), or reduce them"
        )
    for name in home.names:
        if home.sizes[name] != far.sizes[name]:
            raise UsageValueError(
                f'to_mesh: dimension "{name}" has a different length on the two meshes, {home.sizes[name]} and '
                f"{far.sizes[name]}"
            )
    axes = [far.names.index(n) for n in home.names]
    groups: dict[int, list[int]] = {rank: [rank] for rank in home.ranks_key}
    for at in itertools.product(*map(range, far.slice_.sizes)):
        groups[home.slice_.rank(tuple(at[a] for a in axes))].append(far.slice_.rank(at))
    return _moved(tensor, far, "spread", list(groups.values()), "to_mesh")


def gather_to(tensor: Any, dims: Sequence[str], far: Any, kind: str) -> Any:
    """``stack``: (n, *S) of the processes along ``dims``, row-major; ``sum``: S. ``far`` has home's other dims."""
    home = tensor._ref.mesh
    groups = []
    for at in itertools.product(*map(range, far.slice_.sizes)):
        place = dict(zip(far.names, at, strict=True))
        group = [far.slice_.rank(at)]
        for along in itertools.product(*(range(home.sizes[d]) for d in dims)):
            place.update(zip(dims, along, strict=True))
            group.append(home.slice_.rank(tuple(place[n] for n in home.names)))
        groups.append(group)
    return _moved(tensor, far, kind, groups, "reduce")


def _moved(tensor: Any, far: Any, kind: str, groups: list[list[int]], shown: str) -> Any:
    home = tensor._ref.mesh
    home.check_alive()
    far = far.on(home.stream)  # a move runs on the stream of what is moved
    far.check_alive()
    if far.client is not home.client:
        raise UsageTypeError(
            f"WRONG_MESH: {shown} was given {far}, whose processes belong to another mesh than those of {home}: "
            "fetch the value with ml.inspect(t), and put it there with mesh.replicate(x)"
        )
    if hasattr(tensor, "_value"):
        if kind == "spread":
            noting = recorder.get()
            return constants.make((tensor._value if noting is None else noting.value(tensor)).clone(), far)
        constants.materialise(tensor)
    meta = tensor._meta
    if meta.layout is not torch.strided or meta.wire.layout == "nested" or meta.wire.dtype.startswith("q"):
        raise UsageTypeError(f"{shown} moves dense tensors, not {meta.wire.layout} ones: move t.to_dense()")
    crosses = meta.requires_grad and torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
    move = _move(home, far, kind, groups, meta, crosses)
    client = home.client
    ambient = ambient_number()
    with client.lock, HeldInterrupt():
        client.use_scope(move.span)
        if client.urgent:
            client.drain_dead()
        if ambient != client.ambient:
            dispatch.start_ambient(client, ambient)
        out, crossing = next(client.refs), next(client.refs) if crosses else 0
        client.where.append(locations.here(3))
        client.code.extend((Op.MOVE, move.number, tensor._ref.id, out, crossing))
        client.ties.move(move.span.ranks_key)
        mask = (tensor._store or tensor._ref).equal
        result = dispatch.make_handle(move.meta, Ref(out, far, _equal_there(mask, home, far), move.meta.is_large))
        if crosses:
            _cross(tensor, move, result, crossing, mask)
    client.flush_if_full()
    return result


def _cross(tensor: Any, move: Move, result: Any, number: int, mask: int) -> None:
    stand_in = dispatch.make_handle(_STAND_IN, Ref(number, move.home, mask))
    stand_in._sig = hash(("left", tensor._sig))
    stand_in._crossings = tensor._crossings
    result._sig = hash(("moved", move.number, stand_in._sig))
    result._crossings = (Crossing(move, stand_in),)


def _equal_there(mask: int, home: Any, far: Any) -> int:
    out = 0
    for k, name in enumerate(far.names):
        at = home.names.index(name) if name in home.names else None
        for shift in (0, GRAPH):
            if at is None or mask >> at + shift & 1:
                out |= 1 << k + shift
    return out


def _move(home: Any, far: Any, kind: str, groups: list[list[int]], meta: Meta, crosses: bool) -> Move:
    """The move of this kind: defined on the workers when it is new."""
    client = home.client
    inference = torch.is_inference_mode_enabled()
    key = (home, far, kind, meta, crosses, inference, tuple(map(tuple, groups)))
    found = client.cache.moves.get(key)
    if found is None:
        make_room(client)
        ranks = {rank for group in groups for rank in group} | (set(home.ranks_key) if crosses else set())
        given = replace(meta.wire, is_conj=False, is_neg=False)
        told = _result(given, kind, len(groups[0]) - 1 if groups else 0, far, crosses, inference)
        number = client.cache.next_template()
        with client.lock:
            span = _span(client, home, far, ranks)
            client.define(wire.MoveDef(number, kind, groups, list(home.ranks_key), given, told))
        found = client.cache.moves[key] = Move(number, kind, home, far, span, intern(told))
    return found


def _span(client: Any, home: Any, far: Any, ranks: set[int]) -> Any:
    for mesh in (home, far):
        if ranks == set(mesh.ranks_key):
            return mesh
    key = ("span", home.stream_number, *sorted(ranks))
    if key not in client.cache.moves:
        client.cache.moves[key] = Span(client, sorted(ranks), home.next_number(), home.stream_number)
    return client.cache.moves[key]


def _result(given: wire.TensorMeta, kind: str, n: int, far: Any, crosses: bool, inference: bool) -> wire.TensorMeta:
    shape = (n, *given.shape) if kind == "stack" else given.shape
    with torch._C.DisableTorchFunction():
        like = torch.empty_strided(given.shape, given.stride, device="meta")
        stride = torch.empty(shape, device="meta").stride() if kind != "spread" else torch.empty_like(like).stride()
    return wire.TensorMeta(
        shape=shape,
        stride=stride,
        dtype=given.dtype,
        layout=given.layout,
        device=far.torch_device or "cpu",
        requires_grad=crosses,
        is_leaf=not crosses,
        is_inference=inference,
    )


_STAND_IN = intern(wire.TensorMeta((), (), "float32", "strided", "cpu", requires_grad=True, is_leaf=False))
