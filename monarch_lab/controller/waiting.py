"""Answers that are on their way, and a thread that waits for them.

The I/O thread fills a Pending and rings its bell; the waiting thread also wakes for debugger prompts.
"""

from __future__ import annotations

import logging
import queue
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from typing import Any

log = logging.getLogger(__name__)

# A thread of ours that waits for nobody's cell: it leaves prompts to one that the user looks at.
unattended: ContextVar[bool] = ContextVar("unattended", default=False)


class Pending:
    """One answer from each of ``ranks``, given after batch ``after``. Filled on the I/O thread, read by who waits.

    ``calls``: what ranks ask meanwhile (callbacks.py); ``error``: what a function called so raised; ``equal``: how far
    what it gives is known equal; ``mesh``: where it runs; ``behind``: ranks that who fills it waits for in turn;
    ``is_left``: who waited was sent away, for a rank stands in a debugger, and may wait again.
    """

    __slots__ = (
        "ranks",
        "after",
        "waiting",
        "replies",
        "bell",
        "done",
        "calls",
        "was_called",
        "error",
        "equal",
        "mesh",
        "behind",
        "is_left",
        "_callbacks",
    )

    def __init__(self, ranks: Iterable[int], after: int = 0) -> None:
        self.ranks = frozenset(ranks)
        self.after = after
        self.waiting = set(self.ranks)
        self.replies: dict[int, tuple[Any, list[Any]]] = {}  # rank -> (message, frames)
        self.bell: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.done = not self.waiting
        self.calls: dict[int, Any] = {}
        self.was_called = False
        self.error: BaseException | None = None
        self.equal = 0
        self.mesh: Any = None
        self.behind: tuple[int, ...] = ()
        self.is_left = False
        self._callbacks: list[Callable[[], None]] = []

    def fill(self, rank: int, message: Any, frames: list[Any]) -> None:
        if rank not in self.waiting:
            return
        self.replies[rank] = (message, frames)
        self.waiting.discard(rank)
        if not self.waiting:
            self.finish()

    def give_up(self, rank: int) -> None:
        """A rank is gone: whoever waits for it is told at once, not when the others have ended theirs."""
        if rank in self.ranks and not self.done:
            self.waiting.discard(rank)
            self.finish()

    def finish(self) -> None:
        self.done = True
        self.bell.put(None)
        while self._callbacks:
            self._call(self._callbacks.pop())

    def add_callback(self, fn: Callable[[], None]) -> None:
        self._callbacks.append(fn)
        if self.done and fn in self._callbacks:
            self._callbacks.remove(fn)
            self._call(fn)

    def _call(self, fn: Callable[[], None]) -> None:
        try:
            fn()
        except Exception:
            log.exception("a callback of a future failed")
