"""``%%spmd --async``: a cell that runs while the notebook goes on, and the handle of it.

One runs at a time on a mesh: the next one of its kind is queued. What else comes after it (the next ``%%spmd`` cell,
``mesh.sync()``, the end of a ``%%mesh`` cell) waits for it, and raises what it failed with unless the handle did.
Runs on: a thread for each cell, which asks the user nothing; the thread that waits does.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from monarch_lab.controller.futures import Future
from monarch_lab.controller.spmd import SpmdCell, SpmdResult, run_spmd
from monarch_lab.controller.waiting import Pending, unattended
from monarch_lab.errors import UsageError

log = logging.getLogger(__name__)
_END = -1  # fills the Pending, which no rank does
# By client: the last of those that have not ended.
_last: weakref.WeakKeyDictionary[Any, AsyncResult] = weakref.WeakKeyDictionary()


class AsyncResult(Future[dict[int, str]]):
    """Of a ``%%spmd`` cell: ``result(timeout)``, ``exception(timeout)``, ``done()``, ``await``.

    ``result`` is a dict: rank -> text of the last expression (ranks without one are left out).
    """

    def __init__(self, client: Any, ranks: tuple[int, ...]) -> None:
        self.ranks = ranks
        self.is_heard = False  # its error was raised somewhere
        self.is_queued = False
        self._ended: SpmdResult | BaseException | None = None
        self._whole = Pending([_END])
        self._whole.behind = ranks
        super().__init__(client, self._whole, self._opened)

    def __repr__(self) -> str:
        state = "queued" if self.is_queued else "running"
        if self.done():
            state = "failed" if isinstance(self._ended, BaseException) else "done"
        where = f"rank {self.ranks[0]}" if len(self.ranks) == 1 else f"ranks {', '.join(map(str, self.ranks))}"
        return f"<%%spmd cell on {where}: {state}>"

    def end(self, ended: SpmdResult | BaseException) -> None:
        """Whoever waits is told."""
        self._ended = ended
        self._whole.fill(_END, None, [])

    def wait_turn(self) -> None:
        """Until it has ended, for the cell after it: raises where that one is not to run."""
        is_over = threading.Event()
        self.add_callback(lambda _: is_over.set())
        is_over.wait()
        if isinstance(self._ended, BaseException):
            what = str(self._ended).partition("\n")[0]
            raise UsageError(f"this %%spmd cell did not run: the one before it failed ({what})")

    def _wait(self, timeout: float | None) -> tuple[dict[int, str] | None, BaseException | None]:
        try:
            outcome = super()._wait(timeout)
        except KeyboardInterrupt as error:  # who has ended it knows; one at a debugger's prompt has not
            self.is_heard = error is not self._client.left_prompt
            raise
        self.is_heard = True
        return outcome

    def _opened(self, pending: Pending) -> dict[int, str]:
        if isinstance(self._ended, BaseException):
            raise self._ended
        assert self._ended is not None
        return self._ended.shown


def finished(mesh: Any, ranks: tuple[int, ...], result: SpmdResult) -> AsyncResult:
    """The handle of a cell that was waited for."""
    handle = AsyncResult(mesh.client, ranks)
    handle.end(result)
    return handle


def start_spmd(mesh: Any, cell: SpmdCell, on_end: Callable[[SpmdResult | BaseException], None]) -> AsyncResult:
    """Run the cell and return once it was sent, or, where an earlier one runs, at once: it runs after that one, and not
    where that one fails. ``on_end`` is called on the cell's thread, before whoever waits for the handle goes on.

    Raises what an earlier cell of this mesh has failed with. What this one fails with, be it that it could not be sent,
    is its handle's to raise.
    """
    client = mesh.client
    before = _last.get(client)
    if before is not None and before.done():
        before = None
        if client.late is not None:
            client.late()
    handle = AsyncResult(client, cell.ranks)
    handle.is_queued = before is not None
    is_sent = threading.Event()

    def run() -> None:
        unattended.set(True)
        ended: SpmdResult | BaseException
        try:
            if before is not None:
                before.wait_turn()
                handle.is_queued = False
            ended = run_spmd(mesh, replace(cell, number=client_cell, on_sent=is_sent.set))
        except BaseException as e:
            ended = e
        try:
            on_end(ended)
        except Exception:
            log.exception("the end of a %%spmd cell could not be shown")
        handle.end(ended)
        if _last.get(client) is handle:
            del _last[client]
        is_sent.set()

    def late() -> None:
        if unattended.get():  # the thread of such a cell, whose turn it is
            return
        if before is not None and not before.is_heard and (error := before.exception()) is not None:
            handle.is_heard = True  # which says no more than that
            raise error
        error = None if handle.is_heard else handle.exception()
        if handle.done():
            if client.late is late:
                client.late = None
            if error is not None:
                raise error

    client_cell = client.cell
    client.late = late
    _last[client] = handle
    threading.Thread(target=run, name="monarch-spmd", daemon=True).start()
    if before is None:
        is_sent.wait()
    return handle
