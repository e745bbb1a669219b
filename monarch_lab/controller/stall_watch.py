"""Asks the ranks of a running ``%%spmd`` cell now and then whether they wait for one another in vain (stalls.py).

Runs on: the thread that waits for the cell. It never waits itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from monarch_lab.controller.looking import answers
from monarch_lab.controller.stalls import Rank, stalled
from monarch_lab.controller.waiting import Pending
from monarch_lab.wire.looking import Look, Looked

GRACE_S = 0.8  # two looks so far apart show the same
_FIRST_S = 1.5
_AGAIN_S, _MOST_S = 1.0, 30.0  # between two looks; they become rarer while nothing is wrong


class StallWatch:
    def __init__(self, client: Any, now: float) -> None:
        self._client = client
        self._pause = _FIRST_S
        self._next = now + _FIRST_S
        self._asked: Pending | None = None
        self._seen: dict[int, tuple[object, float]] = {}  # rank -> what it did, since when
        self._ended = 0

    def look(self, running: set[int], begun: Mapping[int, Mapping[str, int]], now: float) -> tuple[str, set[int]]:
        """What is wrong and the ranks to be freed; ("", none) while they may go on. To be called often."""
        if len(begun) != self._ended:
            self._ended = len(begun)
            self._pause, self._next = _AGAIN_S, min(self._next, now + _AGAIN_S)
        if self._asked is not None and self._asked.done:
            told, self._asked = answers(self._asked), None
            ranks = {r: Rank(told[r], self._same_for(r, told[r], now)) for r in running if r in told}
            if len(ranks) == len(running):
                return stalled(ranks, begun, GRACE_S)
        if self._asked is None and now >= self._next and running:
            self._asked = self._client.ask_aside(lambda ident: Look(ident), sorted(running))
            self._next = now + self._pause
            self._pause = min(_MOST_S, 1.5 * self._pause)
        return "", set()

    def _same_for(self, rank: int, told: Looked, now: float) -> float:
        what = (told.threads[:1], told.collectives, told.begun)
        before, since = self._seen.get(rank, (None, now))
        if before != what:
            since = now
        self._seen[rank] = what, since
        return now - since
