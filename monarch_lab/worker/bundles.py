"""``reduce_`` of many small tensors in a row, as of a model's gradients, done as one collective.

A collective costs the same for ten elements as for ten thousand. What is done together is decided from the op stream
alone (neighbouring ops, equal dims, reduction and dtype, small tensors), so every rank decides the same; a rank where
a value failed takes part with zeros, as with a single op. One more element of the buffer says whether two of the
tensors share memory on some rank: then they are reduced one after another, for the second reads what the first wrote.

Runs on: the worker's main thread.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from monarch_lab.tensors.meta import dtype_named
from monarch_lab.tensors.template import Input
from monarch_lab.wire.engine import EntryDef, TensorMeta
from monarch_lab.worker import collectives
from monarch_lab.worker.groups import current

if TYPE_CHECKING:
    from monarch_lab.worker.calls import Template

PIECE_BYTES = 1 << 18  # beyond, a copy into the buffer and back costs more than it saves
BUNDLE_BYTES = 16 << 20
_FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)

Key = tuple[Any, ...]


def key_of(definition: EntryDef, template: Template) -> Key | None:
    """What the ops of one bundle have in common; None for an op that is done alone."""
    args = template.tree.args
    if template.function is not collectives.reduce_ or len(args) != 6 or template.tree.kwargs:
        return None
    target, mesh, dims, sizes, reduction, scatter = args
    meta = definition.inputs[0]
    is_plain = meta.layout == "strided" and not (meta.requires_grad or meta.is_conj or meta.is_neg)
    if scatter or type(target) is not Input or math.prod(sizes) < 2 or not is_plain or definition.after:
        return None
    dtype = dtype_named(meta.dtype)
    if reduction not in ("sum", "avg") or dtype not in _FLOATS or _bytes(meta, dtype) > PIECE_BYTES:
        return None
    return mesh, dims, reduction, dtype, meta.device


def _bytes(meta: TensorMeta, dtype: torch.dtype) -> int:
    return math.prod(meta.shape) * dtype.itemsize


def split(names: Sequence[int], metas: Sequence[TensorMeta], key: Key) -> list[int]:
    """How many go into each bundle: no more than it holds, and none twice, by the name that the stream has for it."""
    counts, held = [0], 0
    within: set[int] = set()
    for name, meta in zip(names, metas, strict=True):
        size = _bytes(meta, key[3])
        if counts[-1] and (held + size > BUNDLE_BYTES or name in within):
            counts.append(0)
            held = 0
            within.clear()
        counts[-1] += 1
        held += size
        within.add(name)
    return counts


def reduce(key: Key, values: Sequence[Any], metas: Sequence[TensorMeta]) -> None:
    """Reduce each tensor in place. A value that is no tensor has failed: zeros take its part, and it stays."""
    mesh, dims, reduction, dtype, device = key
    group = current().along(mesh, dims)
    sizes = [math.prod(meta.shape) for meta in metas]
    with torch.no_grad():
        buffer = torch.zeros(sum(sizes) + 1, dtype=dtype, device=device)
        pieces = buffer.split([*sizes, 1])
        whole = [(v, p, m) for v, p, m in zip(values, pieces[:-1], metas, strict=True) if isinstance(v, torch.Tensor)]
        for value, piece, meta in whole:
            piece.view(meta.shape).copy_(value)
        memory = [value.untyped_storage().data_ptr() for value, piece, _ in whole if piece.numel()]
        if len(set(memory)) < len(memory):
            pieces[-1].fill_(1)
        collectives.add_up(buffer, group, reduction)
        if pieces[-1].item():
            for value, meta in zip(values, metas, strict=True):
                failed = not isinstance(value, torch.Tensor)
                collectives.reduce_(
                    torch.zeros(meta.shape, dtype=dtype, device=device) if failed else value,
                    mesh,
                    dims,
                    (group.size,),
                    reduction,
                    False,
                )
            return
        for value, piece, meta in whole:
            value.copy_(piece.view(meta.shape))
