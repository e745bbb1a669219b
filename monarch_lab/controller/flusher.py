"""Sends what was issued about a millisecond ago, so that workers begin while the cell still computes."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from monarch_lab.controller.client import Client

_IDLE_S = 0.5


class Flusher(threading.Thread):
    """Runs until ``stop``. ``dirty`` is set by whoever puts the first op into an empty buffer."""

    def __init__(self, client: Client, after_s: float) -> None:
        super().__init__(name="monarch-flush", daemon=True)
        self.dirty = threading.Event()
        self._client = client
        self._after_s = after_s
        self._stop_event = threading.Event()

    def run(self) -> None:
        client = self._client
        while not self._stop_event.is_set():
            # The time-out lets deletes go out that no op follows.
            self.dirty.wait(_IDLE_S)
            self.dirty.clear()
            if self._stop_event.wait(self._after_s):
                return
            try:
                if client.code or client.dead:
                    client.flush()
            except Exception:  # a dead or closed mesh: the user's own next call says so
                if client.state != "live" or not client.alive:
                    return

    def stop(self) -> None:
        self._stop_event.set()
        self.dirty.set()
        if self.is_alive() and threading.current_thread() is not self:
            self.join()
