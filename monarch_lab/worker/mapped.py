"""Values that the kernel put on this process by way of shared memory (transport/lending.py).

Mapped here, not copied; a tensor that is written to gets pages of its own as it is written. The kernel is told which
segments have no mapping left before the next answer that ends something.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence

from monarch_lab.transport.segments import SegmentReader
from monarch_lab.wire import engine as wire

_reader = SegmentReader()
_kernels: set[int] = set()


def open_placed(order: wire.Place, frames: Sequence[bytes | memoryview]) -> list[bytes | memoryview | mmap.mmap]:
    """The frames of an order, mapped where they are in shared memory. Raises OSError. Any thread."""
    if order.segments:
        _kernels.add(order.pid)
    return _reader.open(order.pid, frames, order.segments, order.loans)


def take_returned() -> wire.Returned | None:
    """What is mapped no more since the last call, if anything. Any thread."""
    for pid in _kernels:
        loans, dropped = _reader.unmapped(pid)
        if loans or dropped:
            return wire.Returned(loans, dropped)
    return None
