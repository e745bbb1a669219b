"""Memory shared between workers and the kernel of one host, for what is large.

One copies once into a segment, the other maps it privately: what is written to there stays there. Segments have no
name in any file system (the reader opens the writer's descriptor), so none can be left behind. A worker's segment is
written to again only when the kernel has told that no mapping of it is left; one that was mapped when the kernel
forked may live on in a child, and is let go instead.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import weakref
from collections.abc import Iterable, Sequence

LARGE_BYTES = 1 << 20  # below, a message is as quick
MAX_FREE_BYTES = 1 << 30
_MAX_FREE = 4  # segments that wait to be written to again
_MAX_OPEN = 128  # segments of a pool, mappings of a reader: each takes descriptors; what is beyond is copied
Frame = bytes | memoryview
_forks = itertools.count(1)
_generation = 0  # how often this process has forked


def _forked() -> None:
    global _generation
    _generation = next(_forks)


os.register_at_fork(after_in_parent=_forked)


def new_segment(size: int) -> tuple[int, mmap.mmap]:
    """(descriptor, shared mapping) of fresh memory. OSError where there is too little of it."""
    fd = os.memfd_create("monarch_lab", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, size)
        os.posix_fallocate(fd, 0, size)  # too little memory is an error here, not a signal when it is written
        return fd, mmap.mmap(fd, size)
    except OSError:
        os.close(fd)
        raise


class SegmentPool:
    """The segments of who writes, by descriptor. Runs on: one thread."""

    def __init__(self) -> None:
        self._maps: dict[int, mmap.mmap] = {}
        self._free: list[int] = []

    def put(self, frames: Sequence[Frame]) -> tuple[list[Frame], list[tuple[int, int, int]]]:
        """(the frames to send, an empty one in place of each large one; (frame, descriptor, bytes) of those).

        Every frame has been copied: the memory that was given may be written to again.
        """
        left: list[Frame] = list(frames)
        segments = []
        for k, frame in enumerate(frames):
            size = memoryview(frame).nbytes
            try:
                fd = self._take(size) if size >= LARGE_BYTES else -1
            except OSError:  # no memory or descriptors for it: it travels as a message
                fd = -1
            if fd < 0:
                left[k] = bytes(frame)
                continue
            self._maps[fd][:size] = memoryview(frame).cast("B")
            segments.append((k, fd, size))
            left[k] = b""
        return left, segments

    def free(self, fds: Iterable[int], drop: Iterable[int] = ()) -> None:
        """No mapping of these is left in the kernel; ``drop``: of these there may be one in a child of it."""
        for fd in drop:
            if fd in self._maps:
                self._close(fd)
        self._free += [fd for fd in fds if fd in self._maps]
        while len(self._free) > _MAX_FREE or sum(len(self._maps[f]) for f in self._free) > MAX_FREE_BYTES:
            self._close(self._free.pop(0))

    def close(self) -> None:
        """Mappings of its segments stay."""
        for fd in list(self._maps):
            self._close(fd)

    def _take(self, size: int) -> int:
        fitting = [fd for fd in self._free if size <= len(self._maps[fd]) <= 2 * size]
        if fitting:
            fd = min(fitting, key=lambda f: len(self._maps[f]))
            self._free.remove(fd)
            return fd
        if len(self._maps) >= _MAX_OPEN:
            raise OSError("too many segments are read")
        fd, self._maps[fd] = new_segment(size)
        return fd

    def _close(self, fd: int) -> None:
        self._maps.pop(fd).close()
        os.close(fd)


class SegmentReader:
    """Mappings of another process's segments. Any thread."""

    def __init__(self) -> None:
        self._mapped: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()
        self._unmapped: dict[int, list[tuple[int, int]]] = {}  # pid -> (name, forks when it was mapped)

    def can_read(self, pid: int) -> bool:
        return hasattr(os, "memfd_create") and os.access(f"/proc/{pid}/fd", os.R_OK | os.X_OK)

    def unmapped(self, pid: int) -> tuple[list[int], list[int]]:
        """What SegmentPool.free takes: segments of a process that are mapped here no more. Each is told once."""
        gone = self._unmapped.setdefault(pid, [])
        free: list[int] = []
        drop: list[int] = []
        with contextlib.suppress(IndexError):  # several threads may take
            while gone:
                name, generation = gone.pop()
                (free if generation == _generation else drop).append(name)
        return free, drop

    def open(
        self, pid: int, frames: Sequence[Frame], segments: Sequence[tuple[int, int, int]], loans: Sequence[int] = ()
    ) -> list[Frame | mmap.mmap]:
        """The frames with a private, writable mapping in place of each empty one. Raises OSError.

        ``unmapped`` calls a segment by its number in ``loans``, where there are any, and else by its descriptor.
        """
        found: list[Frame | mmap.mmap] = list(frames)
        unmapped = self._unmapped.setdefault(pid, [])
        names = list(loans) or [fd for _, fd, _ in segments]
        try:
            self._map(pid, found, segments, names, unmapped)
        except BaseException:
            unmapped += [(name, _generation) for name in names]  # those that were not mapped
            raise
        return found

    def _map(
        self,
        pid: int,
        found: list[Frame | mmap.mmap],
        segments: Sequence[tuple[int, int, int]],
        names: list[int],
        unmapped: list[tuple[int, int]],
    ) -> None:
        """Takes from ``names`` as it goes."""
        for k, fd, size in segments:
            own = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
            try:
                if len(self._mapped) >= _MAX_OPEN:
                    found[k] = _read(own, size)
                    unmapped.append((names.pop(0), _generation))
                    continue
                mapped = mmap.mmap(own, size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
            finally:
                os.close(own)
            weakref.finalize(mapped, unmapped.append, (names.pop(0), _generation)).atexit = False
            self._mapped.add(mapped)
            found[k] = mapped


def _read(fd: int, size: int) -> mmap.mmap:
    """A copy in memory that needs no descriptor."""
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    done = 0
    while done < size:  # one call reads 2 GB at the most
        done += os.preadv(fd, [memoryview(memory)[done:]], done)
    return memory
