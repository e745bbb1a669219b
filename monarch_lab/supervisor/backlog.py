"""How much was sent to each process that it has not read: senders wait here when it is too much.

Runs on: user threads reserve, the loop releases.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection

from monarch_lab.errors import DeviceException

# What a letter costs beside its bytes, so that a million empty ones are not free.
LETTER_COST_BYTES = 256


class Backlog:
    def __init__(self, window_bytes: int) -> None:
        self._window = window_bytes
        self._changed = threading.Condition()  # guards the two below
        self._unread: dict[int, int] = {}  # by process; those that ended are gone
        self._waiting = 0

    def open(self, process: int) -> None:
        with self._changed:
            self._unread[process] = 0

    def reserve(self, processes: Collection[int], size: int, within_s: float) -> list[int]:
        """Those of ``processes`` that live, once all have room. DeviceException when one does not read in time.

        A letter larger than the window passes when nothing else is on its way.
        """
        cost = size + LETTER_COST_BYTES
        deadline = time.monotonic() + within_s
        with self._changed:
            while True:
                live = [p for p in processes if p in self._unread]
                full = [p for p in live if self._unread[p] and self._unread[p] + cost > self._window]
                if not full:
                    break
                left = deadline - time.monotonic()
                if left <= 0:
                    raise DeviceException(
                        f"{len(full)} of {len(live)} processes do not read: the first has left"
                        f" {self._unread[full[0]]:,} bytes waiting for {within_s:g} s; nothing was sent"
                    )
                self._waiting += 1
                try:
                    self._changed.wait(left)
                finally:
                    self._waiting -= 1
            for process in live:
                self._unread[process] += cost
        return live

    def release(self, process: int, size: int) -> None:
        with self._changed:
            if process in self._unread:
                self._unread[process] = max(0, self._unread[process] - size)
            if self._waiting:
                self._changed.notify_all()

    def close(self, process: int) -> None:
        """It has ended: nothing more is sent to it, and nobody waits for it."""
        with self._changed:
            self._unread.pop(process, None)
            if self._waiting:
                self._changed.notify_all()

    def unread_bytes(self, process: int) -> int:
        with self._changed:
            return self._unread.get(process, 0)
