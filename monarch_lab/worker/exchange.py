"""One group's part of a move: one rank and many others (``group[0]`` and ``group[1:]``; a rank may be in both).

Every function is called on every rank of the group, with this rank's value, a Failure in its place, or None where it
has none, and returns what this rank gets: a tensor, a Failure, or None. A word goes before the data: 0, or the length
of the failure that follows instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import msgspec
import torch
import torch.distributed as dist

from monarch_lab.tensors.meta import dtype_named
from monarch_lab.wire.engine import Failure, TensorMeta
from monarch_lab.worker.failures import severed_when_it_fails
from monarch_lab.worker.groups import Group, current

Value: TypeAlias = torch.Tensor | Failure | None
_lazy_clone = torch._lazy_clone
_HEAD_BYTES = 8
_ONE_MESSAGE_BYTES = 1 << 16  # up to here the data ride with the word before them
_pack = msgspec.msgpack.Encoder().encode
_unpack = msgspec.msgpack.Decoder(Failure).decode


def spread(group: Sequence[int], rank: int, value: Value, given: TensorMeta, meta: TensorMeta) -> Value:
    """The first rank's value, to the others: their copies have the layout of ``meta``."""
    one, gets = group[0], rank in group[1:]
    among = current().among(group)
    if among.backend is None:
        return _copy(value, meta) if gets else None
    out = _dense(value, meta) if isinstance(value, torch.Tensor) else _empty(meta)
    failure = _send_down(among, among.ranks.index(one), _bytes(out), value if isinstance(value, Failure) else None)
    if not gets:
        return None
    if failure is not None:
        return failure
    return _copy(value, meta) if rank == one else out.to(meta.device)


def unstack(group: Sequence[int], rank: int, value: Value, given: TensorMeta, meta: TensorMeta) -> Value:
    """Row k of the first rank's value, to the k-th of the others."""
    one, many = group[0], list(group[1:])
    among = current().among(group)
    if among.backend is None:
        return value.reshape(meta.shape).clone() if isinstance(value, torch.Tensor) else value
    failure = value if isinstance(value, Failure) else None
    failure = _send_down(among, among.ranks.index(one), torch.empty(0, dtype=torch.uint8), failure)
    if failure is not None:
        return failure if rank in many else None
    mine = _scatter(among, one, many, value, meta)
    return mine.to(meta.device) if rank in many else None


def stack(group: Sequence[int], rank: int, value: Value, given: TensorMeta, meta: TensorMeta) -> Value:
    """The others' values, one after the other, to the first."""
    one, many = group[0], list(group[1:])
    among = current().among(group)
    failure = _agree(among, value)
    if failure is not None:
        return failure if rank == one else None
    mine = _dense(value, _contiguous(given)) if isinstance(value, torch.Tensor) else _empty(_contiguous(given))
    if among.backend is None:
        return mine[None].clone().to(meta.device)
    parts = [torch.empty_like(mine) for _ in among.ranks] if rank == one else []
    options = dist.GatherOptions()
    options.rootRank = among.ranks.index(one)
    if mine.numel():
        with severed_when_it_fails():
            among.backend.gather([[_bytes(p) for p in parts]] if parts else [], [_bytes(mine)], options).wait()
    if rank != one:
        return None
    return torch.stack([parts[among.ranks.index(r)] for r in many]).to(meta.device)


def add_up(group: Sequence[int], rank: int, value: Value, given: TensorMeta, meta: TensorMeta) -> Value:
    """The sum of the others' values, to the first."""
    one, many = group[0], list(group[1:])
    among = current().among(group)
    failure = _agree(among, value)
    if failure is not None:
        return failure if rank == one else None
    if isinstance(value, torch.Tensor):
        mine = _dense(value, _contiguous(given)).clone()  # gloo adds up in place
    else:
        mine = _empty(_contiguous(given)).zero_()
    if among.backend is not None and mine.numel():
        options = dist.ReduceOptions()
        options.reduceOp = dist.ReduceOp.SUM
        options.rootRank = among.ranks.index(one)
        with severed_when_it_fails():
            among.backend.reduce([torch.view_as_real(mine) if mine.is_complex() else mine], options).wait()
    return mine.to(meta.device) if rank == one and many else None


KINDS: dict[str, Callable[[Sequence[int], int, Any, TensorMeta, TensorMeta], Value]] = {
    "spread": spread,
    "unstack": unstack,
    "stack": stack,
    "sum": add_up,
}


def _contiguous(meta: TensorMeta) -> TensorMeta:
    stride: list[int] = []
    step = 1
    for n in reversed(meta.shape):
        stride.insert(0, step)
        step *= max(n, 1)
    return msgspec.structs.replace(meta, stride=tuple(stride))


def _empty(meta: TensorMeta) -> torch.Tensor:
    return torch.empty_strided(meta.shape, meta.stride, dtype=dtype_named(meta.dtype))


def _dense(value: torch.Tensor, meta: TensorMeta) -> torch.Tensor:
    """On the CPU, without gaps: itself where it is so already."""
    value = value.detach()
    if value.device.type == "cpu" and value.stride() == meta.stride and not (value.is_conj() or value.is_neg()):
        return value
    return _empty(meta).copy_(value)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a tensor without gaps."""
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset()).view(torch.uint8)


def _copy(value: Value, meta: TensorMeta) -> Value:
    """What a rank gets from itself: made when either is written, where torch can put it off."""
    if value is None or isinstance(value, Failure):
        return value
    plain: Any = value.detach()
    if plain.stride() == meta.stride and not (plain.is_conj() or plain.is_neg()):
        try:
            return _lazy_clone(plain)
        except RuntimeError:  # memory that is not torch's own
            return plain.clone()
    out = torch.empty_strided(meta.shape, meta.stride, dtype=plain.dtype, device=plain.device)
    return out.copy_(plain)


def _send_down(among: Group, root: int, data: torch.Tensor, failure: Failure | None) -> Failure | None:
    """``root``'s bytes into every rank's ``data``, or the failure it has instead."""
    is_root = among.position == root
    told = torch.frombuffer(bytearray(_pack(failure)), dtype=torch.uint8) if failure is not None else None
    head = torch.tensor([0 if told is None else told.numel()])
    if data.numel() <= _ONE_MESSAGE_BYTES:
        whole = torch.cat([head.view(torch.uint8), data])
        _broadcast(among, whole, root)
        if not is_root:
            head = whole[:_HEAD_BYTES].clone().view(torch.int64)
            data.copy_(whole[_HEAD_BYTES:])
    else:
        _broadcast(among, head, root)
        if not int(head):
            _broadcast(among, data, root)
    return _failure_of(among, root, int(head), told)


def _agree(among: Group, value: Value) -> Failure | None:
    """The first failure among the group's values: every rank hears of it."""
    if among.backend is None:
        return value if isinstance(value, Failure) else None
    told = torch.frombuffer(bytearray(_pack(value)), dtype=torch.uint8) if isinstance(value, Failure) else None
    head = torch.tensor([0 if told is None else told.numel()])
    heads = [torch.empty_like(head) for _ in among.ranks]
    with severed_when_it_fails():
        among.backend.allgather([heads], [head]).wait()
    first = next((k for k, h in enumerate(heads) if int(h)), -1)
    return _failure_of(among, first, int(heads[first]), told) if first >= 0 else None


def _failure_of(among: Group, root: int, size: int, told: torch.Tensor | None) -> Failure | None:
    if not size:
        return None
    if among.position != root or told is None:
        told = torch.empty(size, dtype=torch.uint8)
    _broadcast(among, told, root)
    return _unpack(bytes(told.tolist()))


def _broadcast(among: Group, data: torch.Tensor, root: int) -> None:
    options = dist.BroadcastOptions()
    options.rootRank = root
    options.rootTensor = 0
    with severed_when_it_fails():
        among.backend.broadcast([data], options).wait()


def _scatter(among: Group, one: int, many: list[int], value: Value, meta: TensorMeta) -> torch.Tensor:
    mine = _empty(_contiguous(meta))
    parts: list[list[torch.Tensor]] = []
    if isinstance(value, torch.Tensor):
        rows = value.detach().cpu().reshape(len(many), *meta.shape).contiguous()
        spare = torch.empty_like(mine)
        parts = [[_bytes(rows[many.index(r)] if r in many else spare) for r in among.ranks]]
    options = dist.ScatterOptions()
    options.rootRank = among.ranks.index(one)
    if mine.numel():
        with severed_when_it_fails():
            among.backend.scatter([_bytes(mine)], parts, options).wait()
    return mine
