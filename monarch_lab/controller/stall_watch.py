"""Asks the ranks of a running ``%%spmd`` cell now and then whether they wait for one another in vain (stalls.py), or
longer than the time-out that the user gave their group.

It is not asked to look while someone stands in a debugger, and its clock stops then.

Runs on: the thread that waits for the cell. It never waits itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from monarch_lab.controller.failures import named
from monarch_lab.controller.looking import answers
from monarch_lab.controller.stalls import Rank, stalled
from monarch_lab.controller.waiting import Pending
from monarch_lab.wire.looking import Look, Looked

GRACE_S = 0.8  # two looks so far apart show the same
_FIRST_S = 1.5
_AGAIN_S, _MOST_S = 1.0, 30.0  # between two looks; they become rarer while nothing is wrong
_LEAST_S = 0.4  # between two where a group has a time-out
_GAP_S = 0.5  # more between two calls is a stop in a debugger


class StallWatch:
    def __init__(self, client: Any, now: float) -> None:
        self._client = client
        self._pause = _FIRST_S
        self._called = now
        self._clock = 0.0
        self._next = _FIRST_S
        self._asked: Pending | None = None
        self._asked_at = 0.0
        self._seen: dict[int, tuple[object, float]] = {}  # rank -> what it did, since when
        self._waits: dict[tuple[int, str, int], float] = {}  # rank, group, number of a collective -> since when
        self._ended = 0

    def look(self, running: set[int], begun: Mapping[int, Mapping[str, int]], now: float) -> tuple[str, set[int]]:
        """What is wrong and the ranks to be freed; ("", none) while they may go on. To be called often."""
        self._clock += min(now - self._called, _GAP_S)
        self._called, now = now, self._clock
        if len(begun) != self._ended:
            self._ended = len(begun)
            self._pause, self._next = _AGAIN_S, min(self._next, now + _AGAIN_S)
        if self._asked is not None and self._has_told(self._asked, running, now):
            told, self._asked = answers(self._asked), None
            shortest = min((s for one in told.values() for s in one.timeouts.values()), default=_MOST_S)
            self._pause = min(self._pause, max(shortest / 2, _LEAST_S))
            self._next = min(self._next, now + self._pause)
            ranks = {r: Rank(told[r], self._same_for(r, told[r], now)) for r in running if r in told}
            late = self._late({r: told[r] for r in ranks}, now)
            if late[1] or len(ranks) < len(running):
                return late
            # What a rank said as it ended counts send and receive as well.
            return stalled(ranks, {r: told[r].begun if r in told else n for r, n in begun.items()}, GRACE_S)
        if self._asked is None and now >= self._next and running:
            asked = running | begun.keys() & set(self._client.alive)
            self._asked = self._client.ask_aside(lambda ident: Look(ident), sorted(asked))
            self._asked_at = now
            self._next = now + self._pause
            self._pause = min(_MOST_S, 1.5 * self._pause)
        return "", set()

    def _has_told(self, asked: Pending, running: set[int], now: float) -> bool:
        """Who has ended the cell is not waited for any longer than those that run it: it may be stopped."""
        return asked.done or (now - self._asked_at > _AGAIN_S and running <= answers(asked).keys())

    def _late(self, told: Mapping[int, Looked], now: float) -> tuple[str, set[int]]:
        """Who has waited longer than the time-out of its group."""
        here = {(rank, c.group, c.number): c.name for rank, one in told.items() for c in one.collectives}
        self._waits = {key: self._waits.get(key, now) for key in here}
        late = [(k, told[k[0]].timeouts[k[1]]) for k in here if k[1] in told[k[0]].timeouts]
        late = [(k, limit) for k, limit in late if now - self._waits[k] >= limit]
        if not late:
            return "", set()
        (first, limit), ranks = late[0], {rank for (rank, _, _), _ in late}
        return f"{named(sorted(ranks))} waited for more than the {limit:g} s of the group in {here[first]}", ranks

    def _same_for(self, rank: int, told: Looked, now: float) -> float:
        what = (told.threads[:1], told.collectives, told.begun)
        before, since = self._seen.get(rank, (None, now))
        if before != what:
            since = now
        self._seen[rank] = what, since
        return now - since
