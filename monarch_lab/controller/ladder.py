"""After a Ctrl-C: each interrupt of the workers is harder than the one before, and the last gives other processes to
the ranks that hear none.

The first press ends Python code, and after a second what waits in a collective or runs torch's ops; the prompt is back
in any case. The second one, during that time or in a later cell that waits for the same rank, ends the processes that
are stuck after one more second: no process is killed unasked. Runs on: the thread that waits.
"""

from __future__ import annotations

import contextlib
import queue
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

from monarch_lab.controller.failures import named
from monarch_lab.controller.front import get_default_front
from monarch_lab.controller.looking import RankStacks, stacks
from monarch_lab.controller.waiting import Pending
from monarch_lab.errors import MeshError
from monarch_lab.transport.frames import HeldInterrupt

_TELL_S = 0.3  # the prompt is due
_RESTART_S = 5.0


class Ladder:
    """Of one client. ``respawn``: gives ranks other processes and says in words what is lost with the old ones."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self._told: dict[int, int] = {}  # rank -> the mark it had not come to when the user was told that it is stuck
        self.respawn: Callable[[Sequence[int]], str] | None = None

    def climb(self, pending: Pending, mark: int, again: bool) -> None:
        """Until the ranks have come to ``mark``, which fills ``pending``; at most ``Timeouts.prompt_back``, but for a
        restart. ``again``: one that the user has been told of before is not waited for any longer."""
        client = self._client
        times = client.settings.timeouts
        last = time.monotonic() + times.prompt_back
        known = [r for r, told in self._told.items() if again and not client.progress.is_done(r, told)]
        try:
            if _ends(pending, min(last, time.monotonic() + times.interrupt_heard)):
                return
            client.interrupt(hard=True)
            if _ends(pending, time.monotonic() + times.interrupt_heard if known else last):
                return
            doomed = [rank for rank in known if rank in pending.waiting]
        except KeyboardInterrupt:
            client.interrupt(hard=True)
            moment = time.monotonic() + times.interrupt_heard  # however often they press: many ranks need no more
            while not pending.done and time.monotonic() < moment:
                with contextlib.suppress(KeyboardInterrupt):
                    _ends(pending, moment)
            doomed = sorted(pending.waiting)
        stuck = sorted(pending.waiting)
        if doomed and self._replace(doomed):
            stuck = [rank for rank in stuck if rank not in doomed]
        self._told = dict.fromkeys(stuck, mark)
        if stuck:
            self._tell(
                self._places(stuck),
                "what runs there goes on, and later cells wait for it; Ctrl-C in one that does, or "
                "%mesh restart --ranks RANKS, ends it and gives another process, %mesh stacks shows more",
            )

    def _replace(self, stuck: list[int]) -> bool:
        if self.respawn is None:
            return False
        with _Patience():
            places = self._places(stuck)  # while the processes are there to be asked
            try:
                lost = self.respawn(stuck)
            except MeshError as error:
                self._say(stuck[0], f"{named(stuck)} could not be given another process: {error}\n")
                return False
            self._tell(places, f"ended, and given another process; {lost}")
        return True

    def _tell(self, places: dict[str, list[int]], what: str) -> None:
        """In the cell that ends: who did not hear its interrupt, where each was, and what becomes of it."""
        for place, ranks in places.items():
            listed = ",".join(map(str, ranks))
            self._say(ranks[0], f"{named(ranks)} did not stop{place}: {what.replace('RANKS', listed)}\n")

    def _say(self, rank: int, text: str) -> None:
        client = self._client
        front = client.front or get_default_front()
        front.output(client.cell, rank, client.label(rank), "stderr", text)

    def _places(self, stuck: list[int]) -> dict[str, list[int]]:
        by_place: dict[str, list[int]] = {}
        for rank, told in stacks(self._client, stuck, _TELL_S).items():
            by_place.setdefault(_place(told), []).append(rank)
        return by_place


class _Patience(HeldInterrupt):
    """A further press does not cut a restart in half, which takes a moment, unless it takes long."""

    __slots__ = ("_until",)

    def __init__(self) -> None:
        self._until = time.monotonic() + _RESTART_S

    def _hold(self, number: int, frame: FrameType | None) -> None:
        if self._before is not None and time.monotonic() > self._until:
            self._before(number, frame)
        super()._hold(number, frame)


def _place(told: RankStacks) -> str:
    frames = told.threads[0].frames if told.threads else ()
    users = [frame for frame in frames if "/site-packages/" not in frame.filename] or list(frames)
    return f", in line {users[-1].line} ({users[-1].source})" if users else ""


def _ends(pending: Pending, deadline: float) -> bool:
    while not pending.done and time.monotonic() < deadline:
        with contextlib.suppress(queue.Empty):
            pending.bell.get(timeout=0.1)
    return pending.done
