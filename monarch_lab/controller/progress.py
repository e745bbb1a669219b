"""How far each rank is: which batches it has run, which calls it has not answered, and the user's lines of those.

Runs on: the I/O thread notes reports; whoever sends notes what was sent, under the client's lock; any thread reads.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from monarch_lab.controller import failures
from monarch_lab.controller.anomaly import Lines
from monarch_lab.controller.locations import Location
from monarch_lab.controller.waiting import Pending
from monarch_lab.controller.watch import RankFacts
from monarch_lab.supervisor import ProcessInfo


@dataclass(frozen=True, slots=True)
class Sent:
    """A batch of ops, or one call that is answered."""

    number: int
    where: list[Location]
    at: float
    call: Pending | None = None  # None: a batch


class Progress:
    def __init__(self, world: int) -> None:
        self.done: dict[int, int] = dict.fromkeys(range(world), 0)  # the last batch a rank has reported
        self._ran: dict[int, int] = dict.fromkeys(range(world), 0)  # and the last one that an answer shows it has run
        self.device_bytes: dict[int, int] = {}  # what torch holds on a rank's GPU, as it said last
        self._batches: dict[int, Sent] = {}
        self._calls: dict[int, Sent] = {}
        self.lines = Lines()

    # --- what was sent

    def note_batch(self, number: int, where: list[Location]) -> None:
        self._batches[number] = Sent(number, where, time.monotonic())
        self.lines.note(number, where)

    def note_call(self, ident: int, where: Location, call: Pending) -> None:
        self._calls[ident] = Sent(call.after, [where], time.monotonic(), call)
        self.lines.note(ident, [where], is_call=True)

    def where(self, batch: int, position: int) -> Location | None:
        """The line of a batch's op."""
        sent = self._batches.get(batch)
        return sent.where[position] if sent is not None and position < len(sent.where) else None

    # --- what was heard

    def note_done(self, rank: int, batch: int, alive: Iterable[int]) -> None:
        self.done[rank] = batch
        self._ran[rank] = max(self._ran[rank], batch)
        finished = min((self.done[r] for r in alive), default=batch)
        for number in [n for n in list(self._batches) if n <= finished]:
            self._batches.pop(number, None)

    def note_answer(self, rank: int, ident: int, call: Pending) -> None:
        """It has run all that was sent before the call."""
        self._ran[rank] = max(self._ran[rank], call.after)
        if call.done:
            self._calls.pop(ident, None)

    def forget_call(self, ident: int) -> None:
        """Nobody is left who could answer it."""
        self._calls.pop(ident, None)

    def begin_again(self, ranks: Iterable[int], batch: int) -> None:
        """Other processes have these ranks: nothing before ``batch`` is theirs to run."""
        for rank in ranks:
            self.done[rank] = self._ran[rank] = batch

    # --- for waits and displays

    def is_done(self, rank: int, batch: int) -> bool:
        return self.done[rank] >= batch

    def _waiting(self, rank: int) -> list[Sent]:
        """What the rank may not have run, oldest first."""
        ran = self._ran.get(rank, 0)
        batches = [sent for n, sent in sorted(self._batches.copy().items()) if n > ran]
        calls = [s for s in self._calls.copy().values() if s.call is not None and rank in s.call.waiting]
        return sorted([*batches, *calls], key=lambda sent: sent.at)

    def oldest(self, rank: int) -> tuple[str, float, int]:
        """(line of the oldest op a rank may not have run, seconds since it was sent, number of such ops)."""
        waiting = self._waiting(rank)
        if not waiting:
            return "", 0.0, 0
        first = waiting[0]
        return _line(first.where), time.monotonic() - first.at, sum(len(sent.where) for sent in waiting)

    def facts(self, process: ProcessInfo) -> RankFacts:
        waiting = self._waiting(process.rank)
        first = waiting[0] if waiting else None
        key = 0.0 if first is None else first.at
        return RankFacts(process.rank, process.pid, process.activity, key, _line(first.where) if first else "")


def _line(where: Sequence[Location]) -> str:
    return failures.place(where[0]) if where else ""
