"""Anomaly mode of autograd: what stands in a worker's warning for the notebook's line that made a node.

torch keeps the stack of each op in its node. A worker knows the op by its place in the stream alone, so it keeps a mark
that says it, and the kernel puts the line in the place of the mark when the warning comes by.
"""

from __future__ import annotations

import re
from collections.abc import Callable

_SIGN = "\x1e"
_MARK = re.compile(f"{_SIGN}(-?\\d+) (-?\\d+) (-?\\d+){_SIGN}")
CALL = -1  # in the place of a batch's number: the next number is that of a call that is answered


def mark(batch: int, position: int, inside: int = -1) -> str:
    """Of op ``position`` of a batch, or of op ``inside`` of the recording that it replays."""
    return f"{_SIGN}{batch} {position} {inside}{_SIGN}"


def has_marks(text: str) -> bool:
    return _SIGN in text


def resolve(text: str, line: Callable[[int, int, int], str]) -> str:
    """The text with ``line(batch, position, inside)`` in place of each mark."""
    return _MARK.sub(lambda m: line(*map(int, m.groups())), text)
