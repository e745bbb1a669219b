"""Processes that the user's code starts: they hear an interrupt as those below a terminal do, and those that it does
not end are killed with the code that started them.

Meant are the processes of this worker's group that were started by the functions and cells that run now. Who has left
the group, or ignores Ctrl-C, is meant to go on, and ends with the worker or the mesh. Runs on: the reader thread
(``interrupt``), and each thread that runs users' code.
"""

from __future__ import annotations

import _thread
import contextlib
import os
import signal
import time
from collections.abc import Iterator

from monarch_lab.transport import platform

_GRACE_S = 0.5
_LOOK_S = 0.02

_running: list[int] = []  # since when each does, in the system's ticks
_interrupts = 0  # how many there were
_spared: set[int] = set()


def spare(pid: int) -> None:
    """One of our own, which has ends of its own."""
    _spared.add(pid)


@contextlib.contextmanager
def of_users_code() -> Iterator[None]:
    """Around a function or cell. After an interrupt nothing that it has started and left in the foreground goes on."""
    since, before = platform.ticks_now(), _interrupts
    _running.append(since)
    try:
        yield
    finally:
        _running.remove(since)
        if _interrupts != before:
            _end(since)


def interrupt(hard: bool) -> None:
    """Ctrl-C to all of them; ``hard``: they have not ended after that."""
    global _interrupts
    running = _running.copy()  # which another thread may leave
    if not running:
        return
    _interrupts += 1
    there = _started_since(min(running))
    if there:
        _thread.interrupt_main()  # while it waits in os.system, signals to it are dropped
    for pid in there:
        _send(pid, signal.SIGKILL if hard else signal.SIGINT)


def _end(since: int) -> None:
    deadline = time.monotonic() + _GRACE_S
    while there := _started_since(since):
        if time.monotonic() > deadline:
            for pid in there:
                _send(pid, signal.SIGKILL)
            return
        time.sleep(_LOOK_S)


def _started_since(ticks: int) -> list[int]:
    found = []
    group = str(os.getpgid(0))
    for pid in platform.descendants(os.getpid()):
        stat = platform.read_stat(pid)
        if stat is None or stat[0] in "ZX" or stat[2] != group or int(stat[19]) < ticks or pid in _spared:
            continue
        if not platform.ignores(pid, signal.SIGINT):
            found.append(pid)
    return found


def _send(pid: int, sig: int) -> None:
    mine = os.getpid()
    platform.signal_checked(pid, sig, lambda: pid in platform.descendants(mine))
