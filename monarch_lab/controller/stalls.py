"""Ranks of a ``%%spmd`` cell that wait for one another in vain: which, and what to say of it. Rules alone, no I/O.

A collective ends when every member of its group has begun it. torch numbers the collectives of a group on each rank,
so that a member that has ended the cell with a lower number will never come, and one that begins another under the
same number is out of step.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass

from monarch_lab.controller.failures import named
from monarch_lab.wire.looking import Collective, Looked

_SAME_SIZE = {"all_reduce", "broadcast", "reduce"}  # every rank gives as many elements
_UNSEEN_S = 10.0  # a wait that torch keeps no record of (send, receive, a store) has lasted so long


@dataclass(frozen=True, slots=True)
class Rank:
    """One that has not ended the cell: what its reader thread said, and since when that is the same."""

    told: Looked
    same_for_s: float

    @property
    def is_in_torch(self) -> bool:
        main = next((thread.frames for thread in self.told.threads if thread.is_main), [])
        return any("/torch/distributed/" in frame[0] for frame in main)


def stalled(
    running: Mapping[int, Rank], begun: Mapping[int, Mapping[str, int]], grace_s: float
) -> tuple[str, set[int]]:
    """(what is wrong, the ranks to be freed); ("", none) where they may still go on.

    ``begun``: of the ranks that have ended the cell or do not run it, how many collectives each group had begun there.
    """
    counts = {**begun, **{rank: r.told.begun for rank, r in running.items()}}
    waiting = {
        rank: r.told.collectives for rank, r in running.items() if r.same_for_s >= grace_s and r.told.collectives
    }
    while True:  # who waits for one that may still come is not stuck, nor is who waits for that one
        in_vain = waiting.keys() | begun.keys()
        stuck = {r: w for r, w in waiting.items() if any(_never(c, r, waiting, in_vain, counts) for c in w)}
        if len(stuck) == len(waiting):
            break
        waiting = stuck
    if waiting:
        return _told(waiting, begun), set(waiting)
    if begun and running and all(r.is_in_torch and r.same_for_s >= _UNSEEN_S for r in running.values()):
        return f"nobody is left whom {named(sorted(running))} could wait for", set(running)
    return "", set()


def _never(
    c: Collective,
    rank: int,
    waiting: Mapping[int, list[Collective]],
    in_vain: Set[int],
    counts: Mapping[int, Mapping[str, int]],
) -> bool:
    """Whether the collective cannot end as things stand: one of ``in_vain`` has not begun it, or begun another."""
    if c.missing:
        return not in_vain.isdisjoint(c.missing)
    others = [member for member in c.members if member != rank]
    if any(member in in_vain and counts[member].get(c.group, -1) < c.number for member in others):
        return True
    return any(_differs(c, other) for member in others for other in waiting.get(member, ()))


def _differs(c: Collective, other: Collective) -> bool:
    """Another collective in the place of this one, or data that do not fit it."""
    if (c.group, c.number) != (other.group, other.number):
        return False
    sizes = c.name in _SAME_SIZE and sum(c.elements) != sum(other.elements)
    return c.name != other.name or sizes or (bool(c.dtypes and other.dtypes) and c.dtypes[0] != other.dtypes[0])


def _told(waiting: Mapping[int, list[Collective]], begun: Mapping[int, Mapping[str, int]]) -> str:
    by_call: dict[str, list[int]] = {}
    for rank, waits in waiting.items():
        by_call.setdefault(_call(waits[0], len({c.name for w in waiting.values() for c in w}) == 1), []).append(rank)
    calls = "; ".join(f"{named(ranks)} in {call}" for call, ranks in sorted(by_call.items(), key=lambda item: item[1]))
    absent = sorted({m for waits in waiting.values() for m in _absent(waits[0], begun)})
    if absent:
        return f"{calls} waited for {named(absent)}, which had ended the cell or does not run it"
    return f"the ranks are in different calls and wait for one another: {calls}"


def _absent(c: Collective, begun: Mapping[int, Mapping[str, int]]) -> list[int]:
    return [m for m in c.missing or c.members if m in begun and (c.missing or begun[m].get(c.group, -1) < c.number)]


def _call(c: Collective, with_size: bool) -> str:
    if not with_size or c.name not in _SAME_SIZE:
        return c.name
    return f"{c.name} ({sum(c.elements)} × {c.dtypes[0].lower()})" if c.dtypes else c.name
