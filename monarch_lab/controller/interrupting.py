"""An interrupt of some ranks alone: what they run ends, the others go on. Any thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

from monarch_lab.controller.failures import named
from monarch_lab.controller.front import get_default_front
from monarch_lab.controller.looking import RankStacks, stacks

_LOOK_S = 0.1
_TELL_S = 0.3  # the prompt is due


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


def tell_stuck(client: Any, ranks: Sequence[int]) -> None:
    """In the cell that ends: who did not hear its interrupt, where each is, and what can be done."""
    by_place: dict[str, list[int]] = {}
    for rank, told in stacks(client, ranks, _TELL_S).items():
        by_place.setdefault(_place(told), []).append(rank)
    front = client.front or get_default_front()
    for place, stuck in by_place.items():
        text = (
            f"{named(stuck)} did not stop{place}: what runs there goes on, and later cells wait for it; %mesh restart "
            f"--ranks {','.join(map(str, stuck))} ends it and gives another process, %mesh stacks shows more\n"
        )
        front.output(client.cell, stuck[0], client.label(stuck[0]), "stderr", text)


def _place(told: RankStacks) -> str:
    frames = told.threads[0].frames if told.threads else ()
    users = [frame for frame in frames if "/site-packages/" not in frame.filename] or list(frames)
    return f", in line {users[-1].line} ({users[-1].source})" if users else ""


def _still_busy(client: Any, ranks: Sequence[int], deadline: float) -> tuple[int, ...]:
    pause = threading.Event()
    while True:
        left = deadline - time.monotonic()
        found = stacks(client, ranks, max(_LOOK_S, left))
        busy = tuple(rank for rank, told in found.items() if told.is_silent or told.is_busy)
        if not busy or left <= _LOOK_S:
            return busy
        pause.wait(_LOOK_S)
