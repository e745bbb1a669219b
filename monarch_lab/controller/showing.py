"""``ml.show``: one process's values as a picture or a table."""

from __future__ import annotations

import base64
import html
import struct
import zlib
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from monarch_lab.controller.activation import no_mesh
from monarch_lab.controller.moves import inspect

_MAX_ROWS = 20
_CHANNELS = {1: 0, 3: 2, 4: 6}  # number -> PNG's colour type


class Shown:
    """What ``ml.show`` gives: a notebook draws it; ``values`` are the local tensors."""

    def __init__(self, values: list[Any]) -> None:
        self.values = values

    def __repr__(self) -> str:
        return "\n".join(repr(v) for v in self.values)

    def _repr_html_(self) -> str:
        return "".join(_html(v) for v in self.values)


def show(obj: Any, shard: dict[str, int] | None = None, **dims: int) -> Shown:
    """One process's values of a pytree (see ``ml.fetch_shard`` for which), to be the last expression of a cell.

    Images are drawn: (H, W), (C, H, W) or (H, W, C) with 1, 3 or 4 channels and at least 8 rows and columns, uint8, or
    floating-point, where 0 to 1 is black to white (values beyond are scaled to what there is). Others become tables
    of at most 20 rows and columns. Raises as ``ml.fetch_shard``.
    """
    return Shown(tree_leaves(inspect(obj, shard, **dims)))


def _html(value: Any) -> str:
    with no_mesh.activate():
        if not isinstance(value, torch.Tensor):
            return f"<pre>{html.escape(repr(value))}</pre>"
        pixels = as_pixels(value)
        if pixels is None:
            return _table(value)
        data = base64.b64encode(png(pixels)).decode()
        title = html.escape(f"{tuple(value.shape)} {value.dtype}")
        style = "min-width: 8em; image-rendering: pixelated"
        return f'<img title="{title}" style="{style}" src="data:image/png;base64,{data}">'


def as_pixels(value: torch.Tensor) -> torch.Tensor | None:
    """A uint8 tensor of shape (H, W, C) with 1, 3 or 4 channels, or None for what is no image."""
    if value.dim() == 2:
        value = value[:, :, None]
    elif value.dim() != 3:
        return None
    elif value.shape[0] in _CHANNELS and value.shape[2] not in _CHANNELS:
        value = value.permute(1, 2, 0)
    if value.shape[2] not in _CHANNELS or min(value.shape[:2]) < 8 or value.is_complex():
        return None
    if value.dtype is torch.uint8:
        return value.contiguous()
    if not value.is_floating_point():
        return None
    value = value.float().nan_to_num()
    low, high = min(0.0, float(value.min())), max(1.0, float(value.max()))
    return ((value - low) * (255 / (high - low))).round().to(torch.uint8).contiguous()


def png(pixels: torch.Tensor) -> bytes:
    """(H, W, C) uint8 as a PNG file. Format: W3C, Portable Network Graphics (second edition), sections 5 and 11."""
    height, width, channels = pixels.shape

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = torch.zeros(height, 1 + width * channels, dtype=torch.uint8)  # each row begins with its filter: none
    rows[:, 1:] = pixels.reshape(height, -1)
    header = struct.pack(">IIBBBBB", width, height, 8, _CHANNELS[channels], 0, 0, 0)
    body = zlib.compress(rows.numpy().tobytes())
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", body) + chunk(b"IEND", b"")


def _table(value: torch.Tensor) -> str:
    caption = f"{tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    if value.dim() not in (1, 2):
        return f"<pre>{html.escape(caption)}\n{html.escape(repr(value))}</pre>"
    rows = value[None] if value.dim() == 1 else value
    lines = []
    for row in rows[:_MAX_ROWS].tolist():
        cells = "".join(f"<td>{_number(x)}</td>" for x in row[:_MAX_ROWS])
        lines.append(f"<tr>{cells}{'<td>…</td>' if len(row) > _MAX_ROWS else ''}</tr>")
    if len(rows) > _MAX_ROWS:
        lines.append("<tr><td>…</td></tr>")
    return f"<table><caption>{html.escape(caption)}</caption>{''.join(lines)}</table>"


def _number(x: Any) -> str:
    return f"{x:.5g}" if isinstance(x, float) else str(x)
