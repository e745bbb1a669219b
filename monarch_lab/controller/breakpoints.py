"""Breakpoints set from the notebook, of one mesh. The workers are sent the whole table of theirs with each change.

Those that a function has itself are seen in its code.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from monarch_lab.errors import UsageKeyError
from monarch_lab.wire.debugging import BreakpointDef, DebugBreakpoints

_STOPS = {"breakpoint", "set_trace"}


@dataclass(frozen=True, slots=True)
class Breakpoint:
    """``where`` is as the user wrote it; ``points`` are where that may be."""

    number: int
    where: str
    condition: str
    ranks: tuple[int, ...]
    points: tuple[BreakpointDef, ...]


class Breakpoints:
    """``send_control(ranks, order)`` sends to workers, which hear it while an op runs, and so before or after what was
    sent on the other way: ``wait_heard(ranks)`` returns when they have."""

    def __init__(
        self,
        send_control: Callable[[Sequence[int], DebugBreakpoints], None],
        wait_heard: Callable[[Sequence[int]], None],
    ) -> None:
        self.all: dict[int, Breakpoint] = {}
        self._send = send_control
        self._wait_heard = wait_heard
        self._last = 0

    def add(
        self, where: str, places: Sequence[tuple[str, int]], function: str, condition: str, ranks: Iterable[int]
    ) -> Breakpoint:
        """At one of ``places`` (file, line), or at the first line of ``function``."""
        self._last += 1
        number = self._last
        points = [BreakpointDef(number, file, line, "", condition) for file, line in places]
        if function:
            points.append(BreakpointDef(number, function=function, condition=condition))
        added = self.all[number] = Breakpoint(number, where, condition, tuple(ranks), tuple(points))
        self.send(added.ranks)
        self._wait_heard(added.ranks)
        return added

    def clear(self, number: int | None = None) -> list[Breakpoint]:
        """Remove one, or all. Raises UsageKeyError for a number that none has."""
        if number is not None and number not in self.all:
            there = ", ".join(map(str, self.all)) or "none"
            raise UsageKeyError(f"no breakpoint has the number {number}; there is {there}")
        gone = list(self.all.values()) if number is None else [self.all[number]]
        for point in gone:
            del self.all[point.number]
        ranks = sorted({rank for point in gone for rank in point.ranks})
        self.send(ranks)
        self._wait_heard(ranks)
        return gone

    def send(self, ranks: Iterable[int]) -> None:
        """What these ranks have, as after a change; to new processes of theirs too."""
        for rank in sorted(ranks):
            mine = [p for point in self.all.values() if rank in point.ranks for p in point.points]
            if mine or self._last:
                self._send([rank], DebugBreakpoints(mine))


def may_stop(fn: Any, seen: frozenset[int] = frozenset()) -> bool:
    """Whether the function, or one of the user's that it names, calls breakpoint() or pdb.set_trace()."""
    fn = getattr(fn, "__func__", fn)
    if not isinstance(fn, types.FunctionType) or id(fn) in seen:
        return False
    names = names_in(fn.__code__)
    if names & _STOPS:
        return True
    named = (fn.__globals__.get(name) for name in names)
    return any(may_stop(f, seen | {id(fn)}) for f in named if getattr(f, "__module__", "") == fn.__module__)


def names_in(code: types.CodeType) -> set[str]:
    """Names of globals and attributes, of the functions inside too."""
    found = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found |= names_in(constant)
    return found
