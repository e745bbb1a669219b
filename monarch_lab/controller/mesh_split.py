"""Cutting dims of a mesh into several: ``mesh.split(host=("dp", "pp"), pp=4)``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from monarch_lab.errors import UsageValueError
from monarch_lab.wire.shape import Slice


def split(slice_: Slice, names: Sequence[str], dims: Mapping[str, Any]) -> tuple[Slice, list[str]]:
    """The cut mesh's ranks and dims. Raises UsageValueError where a size does not fit."""
    parts = {k: v for k, v in dims.items() if k in names}
    sizes = {k: v for k, v in dims.items() if k not in names}
    found: list[str] = []
    new_sizes: list[int] = []
    strides: list[int] = []
    for axis, name in enumerate(names):
        into = parts.get(name, (name,))
        if isinstance(into, str) or not isinstance(into, Sequence):
            raise UsageValueError(f"split: {name} is cut into a sequence of names, not {into!r}")
        whole, stride = slice_.sizes[axis], slice_.strides[axis]
        chosen = _sizes(whole, name, into, sizes if name in parts else {name: whole})
        for k, part in enumerate(into):
            found.append(part)
            new_sizes.append(chosen[k])
            rest = 1
            for later in chosen[k + 1 :]:
                rest *= later
            strides.append(stride * rest)
    if unused := set(sizes) - set(found):
        raise UsageValueError(f"split: unused size constraints {', '.join(sorted(unused))}")
    if len(set(found)) != len(found):
        raise UsageValueError(f"Duplicate dimension name in {found}")
    return Slice(slice_.offset, tuple(new_sizes), tuple(strides)), found


def _sizes(whole: int, name: str, into: Sequence[str], sizes: Mapping[str, Any]) -> list[int]:
    chosen: list[int | None] = []
    for part in into:
        size = sizes.get(part, whole if len(into) == 1 else None)
        if size is not None and (not isinstance(size, int) or isinstance(size, bool) or size < 1):
            raise UsageValueError(f"split: the size of {part} is a positive whole number, not {size!r}")
        chosen.append(size)
    unknown = [k for k, s in enumerate(chosen) if s is None]
    if len(unknown) > 1:
        raise UsageValueError(
            f"Cannot infer size of {', '.join(into[k] for k in unknown)}: {name} has {whole}, give all but one"
        )
    product = 1
    for s in chosen:
        product *= s or 1
    if unknown:
        if whole % product:
            raise UsageValueError(f"{name} of size {whole} is not evenly divided by {product}")
        chosen[unknown[0]] = whole // product
    elif product != whole:
        raise UsageValueError(f"{name} of size {whole} is not evenly divided into {', '.join(map(str, chosen))}")
    return [s or 1 for s in chosen]
