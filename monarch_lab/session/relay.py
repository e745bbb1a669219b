"""What the supervisor tells before there is a client to hear it: the processes come up while torch is imported here."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from monarch_lab.supervisor import Listener, ProcessInfo


class Relay:
    """A listener that keeps what it hears until ``attach`` names the one it is for.

    Runs on: the supervisor's I/O thread, and once the owner's; the lock guards the queue and the target.
    """

    def __init__(self, on_process: Callable[[ProcessInfo], None]) -> None:
        """``on_process`` hears of each process at once, before and after there is a target."""
        self._on_process = on_process
        self._lock = threading.Lock()
        self._target: Listener | None = None
        self._kept: list[Callable[[Listener], Any]] = []

    def attach(self, target: Listener) -> None:
        with self._lock:
            for deliver in self._kept:
                deliver(target)
            self._kept.clear()
            self._target = target

    def on_report(self, rank: int, frames: list[bytes | memoryview]) -> None:
        target = self._target
        if target is not None:
            target.on_report(rank, frames)  # the path of every report: no lock once there is a target
        else:
            self._pass(lambda listener: listener.on_report(rank, frames))

    def on_process(self, process: ProcessInfo) -> None:
        self._on_process(process)
        self._pass(lambda listener: listener.on_process(process))

    def on_beat(self) -> None:
        if self._target is not None:
            self._target.on_beat()

    def on_silence(self, text: str) -> None:
        if self._target is not None:
            self._target.on_silence(text)

    def on_lost(self, reason: str) -> None:
        self._pass(lambda listener: listener.on_lost(reason))

    def _pass(self, deliver: Callable[[Listener], Any]) -> None:
        with self._lock:
            if self._target is None:
                self._kept.append(deliver)
                return
        deliver(self._target)
