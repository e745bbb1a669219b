"""Segments of shared memory that one process writes and several others map: the kernel's, for values put on a mesh.

A segment is filled by one copy and lent under a number. Each reader maps it privately, so what it writes to its mapping
is its own, but what it has not written yet is read from the segment: it is filled again only when every reader has
said that no mapping of it is left. What a reader that ended, or one that has forked, may have left to a child is never
filled again.

Bounds: _MAX_FREE segments of MAX_FREE_BYTES together wait to be filled again. Of those that are lent, the descriptors
of the oldest are closed when more than _MAX_KEPT are open (the readers keep the memory); with _MAX_OPEN open, as where
memory or descriptors are short, a frame travels as a message.
"""

from __future__ import annotations

import itertools
import mmap
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from monarch_lab.transport.segments import LARGE_BYTES, MAX_FREE_BYTES, Frame, new_segment

_MAX_FREE = 4
_MAX_KEPT = 16
_MAX_OPEN = 64


@dataclass(slots=True, eq=False)
class _Segment:
    fd: int
    memory: mmap.mmap
    readers: set[int] = field(default_factory=set)
    is_clean: bool = True  # nobody but the readers can have a mapping

    def close(self) -> None:
        try:
            self.memory.close()
        except BufferError:  # a copy into it was interrupted and its traceback is still there: closed with that
            pass
        os.close(self.fd)


class SegmentLender:
    """Any thread. ``fill(memory, frame)`` copies a frame to the beginning of a segment."""

    def __init__(self, fill: Callable[[mmap.mmap, Frame], None]) -> None:
        self._fill = fill
        self._lock = threading.Lock()  # guards all below
        self._numbers = itertools.count(1)
        self._free: list[_Segment] = []  # oldest first
        self._lent: dict[int, _Segment] = {}  # by number, oldest first
        self._leaving: list[_Segment] = []  # closed when every reader has mapped them
        self._is_closed = False

    def put(
        self, frames: Sequence[Frame], readers: Iterable[int]
    ) -> tuple[list[Frame], list[tuple[int, int, int]], list[int]]:
        """(frames to send, an empty one in place of each large one; (frame, descriptor, bytes) and number of those).

        Every frame has been copied: the memory that was given may be written to again.
        """
        left: list[Frame] = list(frames)
        segments: list[tuple[int, int, int]] = []
        loans: list[int] = []
        for k, frame in enumerate(frames):
            size = memoryview(frame).nbytes
            lent = self._lend(size, set(readers)) if size >= LARGE_BYTES else None
            if lent is None:
                left[k] = bytes(frame)
                continue
            number, segment = lent
            self._fill(segment.memory, frame)
            segments.append((k, segment.fd, size))
            loans.append(number)
            left[k] = b""
        return left, segments, loans

    def returned(self, reader: int, numbers: Iterable[int], dropped: Iterable[int] = ()) -> None:
        """A reader has no mapping of these any more; ``dropped``: but a child of it may have one."""
        with self._lock:
            for number in dropped:
                self._give_back(number, reader, is_clean=False)
            for number in numbers:
                self._give_back(number, reader, is_clean=True)

    def trim(self, after_all: Callable[[Callable[[], None]], None]) -> None:
        """To be called when what was put has been sent. ``after_all(fn)`` calls ``fn`` once the readers have it."""
        with self._lock:
            too_many = len(self._lent) > _MAX_KEPT
            leaving = [self._lent.pop(n) for n in list(self._lent)[: _MAX_KEPT // 2]] if too_many else []
            self._leaving += leaving
        if leaving:
            after_all(lambda: self._let_go(leaving))

    def _let_go(self, leaving: list[_Segment]) -> None:
        with self._lock:
            for segment in leaving:
                if segment in self._leaving:  # else all were closed meanwhile
                    self._leaving.remove(segment)
                    segment.close()

    def ended(self, reader: int) -> None:
        """A reader's process is gone."""
        with self._lock:
            for number in list(self._lent):
                self._give_back(number, reader, is_clean=False)

    def close(self) -> None:
        """Mappings stay. What is put from now on travels as messages."""
        with self._lock:
            self._is_closed = True
            for segment in [*self._free, *self._lent.values(), *self._leaving]:
                segment.close()
            self._free, self._lent, self._leaving = [], {}, []

    def _lend(self, size: int, readers: set[int]) -> tuple[int, _Segment] | None:
        with self._lock:
            segment = None if self._is_closed else self._take(size)
            if segment is None:
                return None
            segment.readers = readers
            number = next(self._numbers)
            self._lent[number] = segment
            return number, segment

    def _take(self, size: int) -> _Segment | None:
        fitting = [s for s in self._free if size <= len(s.memory) <= 2 * size]
        if fitting:
            segment = min(fitting, key=lambda s: len(s.memory))
            self._free.remove(segment)
            return segment
        if len(self._lent) + len(self._leaving) >= _MAX_OPEN:
            return None
        while True:
            try:
                return _Segment(*new_segment(size))
            except OSError:  # no memory or descriptors for it
                if not self._free:
                    return None
                self._free.pop(0).close()

    def _give_back(self, number: int, reader: int, is_clean: bool) -> None:
        segment = self._lent.get(number)
        if segment is None or reader not in segment.readers:
            return
        segment.readers.discard(reader)
        segment.is_clean &= is_clean
        if segment.readers:
            return
        del self._lent[number]
        if not segment.is_clean:
            return segment.close()
        self._free.append(segment)
        while len(self._free) > _MAX_FREE or sum(len(s.memory) for s in self._free) > MAX_FREE_BYTES:
            self._free.pop(0).close()
