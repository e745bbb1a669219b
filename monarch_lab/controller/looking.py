"""What the workers do now: stacks and memory by rank, from their reader threads. Any thread may ask."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from monarch_lab.controller.failures import named
from monarch_lab.controller.waiting import Pending
from monarch_lab.errors import RemoteFrame
from monarch_lab.wire.looking import Look, Looked, Memory

ANSWER_S = 3.0  # a reader thread answers in milliseconds, unless C code keeps Python's lock


@dataclass(frozen=True, slots=True)
class ThreadStack:
    """``frames``, outermost first, without monarch_lab's own; none: the thread waits for work."""

    thread: str
    frames: tuple[RemoteFrame, ...]

    def text(self, place: Callable[[RemoteFrame], str] = lambda f: f'File "{f.filename}", line {f.line}') -> str:
        lines = [f"{self.thread}:" if self.frames else f"{self.thread}: waits for work"]
        for frame in self.frames:
            function = f", in {frame.function}" if frame.function != "<module>" else ""
            lines.append(f"  {place(frame)}{function}" + (f"\n    {frame.source}" if frame.source else ""))
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class RankStacks:
    """``waits``: collectives that were begun and have not ended, in words. ``is_silent``: it gave no answer."""

    threads: tuple[ThreadStack, ...]
    waits: tuple[str, ...] = ()
    is_silent: bool = False

    @property
    def is_busy(self) -> bool:
        """Whether its main thread runs something."""
        return bool(self.threads and self.threads[0].frames)

    def text(self, **options: Any) -> str:
        if self.is_silent:
            return "no answer: it is stopped, or C code holds Python's lock"
        return "\n".join([*(f"waits in {wait}" for wait in self.waits), *(t.text(**options) for t in self.threads)])


class Stacks(dict[int, RankStacks]):
    """rank -> RankStacks. As text: equal ones once, with their ranks."""

    @property
    def groups(self) -> list[tuple[tuple[int, ...], RankStacks]]:
        folded: dict[RankStacks, list[int]] = {}
        for rank, stacks in sorted(self.items()):
            folded.setdefault(stacks, []).append(rank)
        return [(tuple(ranks), stacks) for stacks, ranks in folded.items()]

    def text(self, **options: Any) -> str:
        return "\n\n".join(f"On {named(ranks)}:\n{stacks.text(**options)}" for ranks, stacks in self.groups)

    def __str__(self) -> str:
        return self.text()

    __repr__ = __str__


def stacks(client: Any, ranks: Sequence[int], timeout_s: float = ANSWER_S) -> Stacks:
    """Of the ranks that have a process."""
    there = [rank for rank in ranks if not client.is_gone(rank)]
    found = _ask(client, there, False, timeout_s)
    return Stacks({rank: _stacks(found[rank]) if rank in found else RankStacks((), (), True) for rank in there})


def wait_heard(client: Any, ranks: Sequence[int]) -> None:
    """Until they have heard what was sent to them aside so far, which comes in order; a few seconds at most."""
    _ask(client, [rank for rank in ranks if not client.is_gone(rank)], False, ANSWER_S)


def memory(client: Any, ranks: Sequence[int], timeout_s: float = ANSWER_S) -> dict[int, Memory]:
    """Of the ranks that answer."""
    found = _ask(client, [rank for rank in ranks if not client.is_gone(rank)], True, timeout_s)
    return {rank: told.memory for rank, told in sorted(found.items()) if told.memory is not None}


def _ask(client: Any, ranks: Sequence[int], with_memory: bool, timeout_s: float) -> dict[int, Looked]:
    if not ranks:
        return {}
    pending = client.ask_aside(lambda ident: Look(ident, with_memory), ranks)
    deadline = time.monotonic() + timeout_s
    while not pending.done and (left := deadline - time.monotonic()) > 0:
        try:
            pending.bell.get(timeout=left)
        except queue.Empty:
            break
    return answers(pending)


def answers(pending: Pending) -> dict[int, Looked]:
    return {rank: m for rank, (m, _) in list(pending.replies.items()) if isinstance(m, Looked)}


def _stacks(told: Looked) -> RankStacks:
    threads = tuple(ThreadStack(t.thread, tuple(RemoteFrame(*f) for f in t.frames)) for t in told.threads)
    waits = tuple(
        f"{c.name} of {named(c.members)}" + (f", to which {named(c.missing)} has not come" if c.missing else "")
        for c in told.collectives
    )
    return RankStacks(threads, waits)
