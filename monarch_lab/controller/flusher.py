"""Sends what was issued about a millisecond ago, so that workers begin while the cell still computes."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from monarch_lab.controller.client import Client

_IDLE_S = 0.5


class Flusher(threading.Thread):
    """Runs until ``stop``. ``wake`` is called with the first op of an empty buffer, by whoever puts it there.

    While ops keep coming it looks every few milliseconds and is not rung: a ring for each batch would make it fight
    the issuing thread for the interpreter.
    """

    def __init__(self, client: Client, after_s: float) -> None:
        super().__init__(name="monarch-flush", daemon=True)
        self._rung = threading.Event()
        self._idle = False
        self._client = client
        self._after_s = after_s
        self._stop_event = threading.Event()

    def wake(self) -> None:
        if self._idle:
            self._rung.set()

    def run(self) -> None:
        client, batches = self._client, -1
        while not self._stop_event.is_set():
            time.sleep(self._after_s)
            try:
                if (client.code or client.dead) and not client.holds:
                    if client.batch == batches:  # nothing was sent since the last look: these have waited
                        client.flush()
                        continue
                    batches = client.batch
                    continue
            except Exception:  # a dead or closed mesh: the user's own next call says so
                if client.state != "live" or not client.alive:
                    return
            self._idle = True
            if not client.code:  # else an op came between the look and the flag
                self._rung.wait(_IDLE_S)  # the time-out lets deletes go out that no op follows
            self._idle = False
            self._rung.clear()
            batches = client.batch

    def stop(self) -> None:
        self._stop_event.set()
        self._rung.set()
        if self.is_alive() and threading.current_thread() is not self:
            self.join()
