"""An interrupt of some ranks alone: what they run ends, the others go on. Any thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

from monarch_lab.controller.looking import stacks

_LOOK_S = 0.1


def interrupt_ranks(client: Any, ranks: Sequence[int]) -> tuple[int, ...]:
    """As Ctrl-C on each: Python code at once, and a wait in a collective where that does not end it in
    ``Timeouts.interrupt_heard``. Returns within ``Timeouts.prompt_back``; the ranks that still run what they ran."""
    times = client.settings.timeouts
    last = time.monotonic() + times.prompt_back
    client.interrupt(ranks=ranks)
    busy = _still_busy(client, ranks, time.monotonic() + times.interrupt_heard)
    if busy:
        client.interrupt(hard=True, ranks=busy)
        busy = _still_busy(client, busy, last)
    return busy


def _still_busy(client: Any, ranks: Sequence[int], deadline: float) -> tuple[int, ...]:
    pause = threading.Event()
    while True:
        left = deadline - time.monotonic()
        found = stacks(client, ranks, max(_LOOK_S, left))
        busy = tuple(rank for rank, told in found.items() if told.is_silent or told.is_busy)
        if not busy or left <= _LOOK_S:
            return busy
        pause.wait(_LOOK_S)
