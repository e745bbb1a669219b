"""What processes without a log file write to stderr: passed on to where the agent's user sees it, and its end kept.

Runs on: the agent's thread reads; a thread of our own writes, since a terminal or pipe that nobody reads may block.
"""

from __future__ import annotations

import os
import queue
import threading
from collections import deque

_READ_BYTES = 1 << 16
_TAIL_BYTES = 8192
_TAIL_LINES = 20
# So much waits for a slow reader; then processes wait, as they would without us.
_MOST_CHUNKS = 64
_LAST_WRITE_S = 1.0


class StderrTails:
    def __init__(self, to_fd: int) -> None:
        self._to_fd = to_fd
        self._process_of: dict[int, int] = {}  # by reading end
        self._tails: dict[int, deque[bytes]] = {}  # by process, while it runs
        self._outgoing: queue.Queue[bytes | None] = queue.Queue()
        self._writer: threading.Thread | None = None

    def open(self, process: int) -> int:
        """What the process gets as stderr; close it here once the process has it. OSError without descriptors."""
        read_end, write_end = os.pipe()
        os.set_blocking(read_end, False)
        self._process_of[read_end] = process
        self._tails[process] = deque()
        if self._writer is None:
            self._writer = threading.Thread(target=self._write, name="stderr", daemon=True)
            self._writer.start()
        return write_end

    def sources(self) -> list[int]:
        """Descriptors to be read now."""
        return [] if self._outgoing.qsize() >= _MOST_CHUNKS else list(self._process_of)

    def read(self, fd: int) -> bool:
        """Take in what is there; False when there is no more for now."""
        process = self._process_of.get(fd)
        if process is None:
            return False
        try:
            data = os.read(fd, _READ_BYTES)
        except BlockingIOError:
            return False
        if not data:
            self._close(fd)
            return False
        self._outgoing.put(data)
        tail = self._tails.get(process)
        if tail is not None:
            tail.append(data)
            while len(tail) > 1 and sum(map(len, tail)) - len(tail[0]) >= _TAIL_BYTES:
                tail.popleft()
        return True

    def last_lines(self, process: int) -> str:
        """Of a process that has ended; once. What it has left behind may write on."""
        for fd in [fd for fd, found in self._process_of.items() if found == process]:
            while self.read(fd):
                pass
        text = b"".join(self._tails.pop(process, ()))[-_TAIL_BYTES:].decode(errors="replace")
        return "\n".join(text.splitlines()[-_TAIL_LINES:])

    def close(self) -> None:
        for fd in list(self._process_of):
            self._close(fd)
        if self._writer is not None:
            self._outgoing.put(None)
            self._writer.join(_LAST_WRITE_S)

    def _close(self, fd: int) -> None:
        del self._process_of[fd]
        os.close(fd)

    def _write(self) -> None:
        while (data := self._outgoing.get()) is not None:
            view = memoryview(data)
            try:
                while view:
                    view = view[os.write(self._to_fd, view) :]
            except OSError:
                pass  # nobody is there to see it; the tail is kept all the same
