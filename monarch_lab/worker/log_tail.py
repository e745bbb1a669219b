"""What file descriptor 1 or 2 wrote into its log file since the last look.

A file and no pipe: writing to it never waits for us, a process that outlives its cell harms nobody, a fork changes
nothing, and what a crash writes last is in the file.
"""

from __future__ import annotations

import codecs
import ctypes
import os

_READ_BYTES = 1 << 20
# Further behind than this, what lies between is left to the log file.
_MOST_BEHIND = 64 << 20


class LogTail:
    """Begins at the file's end: what came before belongs to no cell. A file that cannot be read gives nothing."""

    def __init__(self, stream: str, path: str) -> None:
        self.stream = stream
        self._path = path
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            self._at = os.fstat(self._fd).st_size
        except OSError:
            self._fd = self._at = -1

    def read(self) -> str:
        """At most a megabyte; "" where there is nothing new."""
        if self._fd < 0:
            return ""
        size = os.fstat(self._fd).st_size
        if size == self._at:
            return ""
        note = ""
        if size < self._at:  # someone cut the file
            self._at = 0
        if size - self._at > _MOST_BEHIND:
            skipped = size - self._at - _READ_BYTES
            note = f"\n… {skipped:,} bytes are not shown; all are in {self._path}\n"
            self._at += skipped
            self._decoder.reset()
        data = os.pread(self._fd, _READ_BYTES, self._at)
        self._at += len(data)
        return note + self._decoder.decode(data)


def flush_c() -> None:
    """What C code printed with ``printf``: stdio keeps it back, as its stdout is a file."""
    if _stdout is not None:
        _libc.fflush(_stdout)


try:
    _libc = ctypes.CDLL(None)
    # stdout alone: fflush(NULL) waits for the lock of stdin, which a thread that reads it holds.
    _stdout = ctypes.c_void_p.in_dll(_libc, "stdout")
except (OSError, ValueError):  # where the C library names it otherwise
    _libc = _stdout = None  # type: ignore[assignment]
