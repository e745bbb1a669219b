"""Ranks that do not get on: stopped by a signal, or in one op for too long. Each is told once.

Pure: what is known of the ranks and the time in, what to tell out. It counts the time it has seen an op itself, so
that what passes while someone is in a debugger does not count.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RankFacts:
    rank: int
    pid: int
    activity: str  # the state letter of /proc
    since: float  # when the oldest op that it may not have run was sent; 0: there is none
    op: str  # its line


@dataclass(frozen=True, slots=True)
class Notice:
    ranks: tuple[int, ...]
    text: str
    is_stuck: bool = False


@dataclass(slots=True)
class _Seen:
    since: float = 0.0
    for_s: float = 0.0
    stopped_s: float | None = None
    stop_told: bool = False
    stuck_told: bool = False


class Watch:
    def __init__(self, stopped_after_s: float, stuck_after_s: float) -> None:
        self._stopped_after_s = stopped_after_s
        self._stuck_after_s = stuck_after_s
        self._seen: dict[int, _Seen] = {}
        self._looked: float | None = None

    def look(self, facts: Iterable[RankFacts], is_debugging: bool, now: float) -> list[Notice]:
        """``is_debugging``: someone sits in a debugger of the mesh, so that all may wait for it."""
        passed = 0.0 if self._looked is None else now - self._looked
        self._looked = now
        notices: list[Notice] = []
        stuck: dict[tuple[float, str], list[int]] = {}
        known = self._seen
        self._seen = {}
        for fact in facts:
            seen = self._seen[fact.rank] = known.get(fact.rank, _Seen())
            notices += self._look_stopped(seen, fact, passed)
            if fact.since != seen.since:
                seen.since, seen.for_s, seen.stuck_told = fact.since, 0.0, False
            elif fact.since and not is_debugging:
                seen.for_s += passed
            if seen.for_s >= self._stuck_after_s and not seen.stuck_told:
                seen.stuck_told = True
                stuck.setdefault((fact.since, fact.op), []).append(fact.rank)
        for (_, op), ranks in stuck.items():
            notices.append(Notice(tuple(ranks), self._stuck_text(ranks, op), is_stuck=True))
        return notices

    def _look_stopped(self, seen: _Seen, fact: RankFacts, passed: float) -> list[Notice]:
        who = f"rank {fact.rank} (pid {fact.pid})"
        if fact.activity != "T":
            was_told, seen.stopped_s, seen.stop_told = seen.stop_told, None, False
            return [Notice((fact.rank,), f"{who} goes on")] if was_told else []
        seen.stopped_s = 0.0 if seen.stopped_s is None else seen.stopped_s + passed
        if seen.stop_told or seen.stopped_s < self._stopped_after_s:
            return []
        seen.stop_told = True
        text = f"{who} is stopped by a signal (state T): kill -CONT {fact.pid} lets it go on, "
        return [Notice((fact.rank,), f"{text}%mesh restart --ranks {fact.rank} replaces it")]

    def _stuck_text(self, ranks: list[int], op: str) -> str:
        listed = ", ".join(map(str, ranks))
        who = f"rank {listed} has" if len(ranks) == 1 else f"ranks {listed} have"
        where = f" or after {op}" if op else ""
        restart = f"%mesh restart --ranks {','.join(map(str, ranks))}"
        return (
            f"{who} not come to an end for {self._stuck_after_s:g} s, in{where}: "
            f"%mesh interrupt stops it, {restart} replaces the process"
        )
