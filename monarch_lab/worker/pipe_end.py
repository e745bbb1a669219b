"""One end of a pipe between a worker and its side process: objects both ways, at most ``max_messages`` of them waiting
each way (credits: a receipt gives one back, so that the bound is exact whatever the kernel's buffers hold).

Runs on: the user's thread; a reader thread fills the inbox.
"""

from __future__ import annotations

import queue
import threading
from multiprocessing.connection import Connection
from typing import Any

from monarch_lab.tensors import payload

_DATA, _RECEIPT, _FAILED, _ENDED = b"d", b"r", b"f", b"e"
_POLL_S = 0.2  # so that a Ctrl-C is heard while waiting


class PipeEnd:
    """``recv`` and ``send`` wait; both raise EOFError once the other side has ended, RuntimeError where it failed.

    ``ranks`` and ``sizes``: this process's coordinate and the size of each dim of the mesh.
    """

    def __init__(self, link: Connection, max_messages: int, ranks: dict[str, int], sizes: dict[str, int]) -> None:
        self.ranks, self.sizes, self.max_messages = ranks, sizes, max_messages
        self._link = link
        self._inbox: queue.Queue[tuple[bytes, bytes]] = queue.Queue()
        self._credits = threading.Semaphore(max_messages)
        self._sending = threading.Lock()  # guards writes to the link
        self._end: tuple[bytes, bytes] | None = None
        threading.Thread(
            target=_read, args=(link, self._inbox, self._credits), name="monarch-pipe", daemon=True
        ).start()

    def send(self, value: Any) -> None:
        """Waits while ``max_messages`` that were sent have not been received."""
        data, _ = payload.pack(value)
        while not self._credits.acquire(timeout=_POLL_S):
            self._raise_if_over()
        self._raise_if_over()
        self._write(_DATA, data)

    def recv(self) -> Any:
        """The next object; waits for it."""
        while True:
            if self._end is not None:
                self._raise_end()
            try:
                kind, data = self._inbox.get(timeout=_POLL_S)
            except queue.Empty:
                continue
            if kind == _DATA:
                self._write(_RECEIPT)
                return payload.unpack(data)
            self._end = kind, data

    def end(self, failure: str = "") -> None:
        """Nothing more is sent; what was is still received."""
        self._write(_FAILED if failure else _ENDED, failure.encode())

    def close(self) -> None:
        self._link.close()

    def _write(self, kind: bytes, data: bytes = b"") -> None:
        try:
            with self._sending:
                self._link.send_bytes(kind + data)
        except (OSError, ValueError) as e:
            if kind == _DATA:
                raise EOFError("the other side of the pipe is gone") from e

    def _raise_if_over(self) -> None:
        """A sender looks at what has come only where it is an end: values stay for ``recv``."""
        with self._inbox.mutex:
            last = self._inbox.queue[-1] if self._inbox.queue else None
        if self._end is None and last is not None and last[0] != _DATA:
            self._end = last
        if self._end is not None:
            self._raise_end()

    def _raise_end(self) -> None:
        assert self._end is not None
        kind, data = self._end
        if kind == _FAILED:
            raise RuntimeError(f"the pipe's function failed:\n{data.decode()}")
        raise EOFError("the pipe's function has ended: nothing more comes, and nothing is taken")


def _read(link: Connection, inbox: queue.Queue[tuple[bytes, bytes]], credits: threading.Semaphore) -> None:
    # Holds no reference to the end itself: that is let go, and the link closed, with the last OpaqueRef.
    while True:
        try:
            message = link.recv_bytes()
        except (OSError, EOFError, ValueError, TypeError):
            inbox.put((_ENDED, b""))
            return
        if message[:1] == _RECEIPT:
            credits.release()
        else:
            inbox.put((message[:1], message[1:]))
