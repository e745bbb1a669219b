"""A user's side of one mesh: cells, waits, failures and interrupts, over the op stream that outgoing.py sends.

Two threads meet here. User threads issue ops and wait; the supervisor's I/O thread delivers reports (listener.py).
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import queue
import signal
import time
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from monarch_lab.config import Settings
from monarch_lab.controller import failures, interrupts
from monarch_lab.controller.cache import Cache
from monarch_lab.controller.callbacks import Callbacks
from monarch_lab.controller.flusher import Flusher
from monarch_lab.controller.front import get_default_front
from monarch_lab.controller.ladder import Ladder
from monarch_lab.controller.listener import Listener
from monarch_lab.controller.locations import Location
from monarch_lab.controller.outgoing import FIRST_FLUSH_OPS
from monarch_lab.controller.ties import Ties
from monarch_lab.controller.waiting import Pending, unattended
from monarch_lab.errors import DetachedError
from monarch_lab.supervisor import Supervisor
from monarch_lab.transport.frames import HeldInterrupt
from monarch_lab.wire import engine as wire
from monarch_lab.wire.codec import encode

log = logging.getLogger(__name__)
clients: weakref.WeakSet[Client] = weakref.WeakSet()


class Client(Listener):
    """``world``: the mesh's number of ranks."""

    def __init__(self, name: str, world: int, settings: Settings) -> None:
        super().__init__(name, world, settings)
        self.cache = Cache(settings.engine.cache_entries)
        self.leaves: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self.retained: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self.varied_mesh: Any = None
        self.vary_level = 0
        self.varied = 0  # mesh dims along which ranks draw numbers of their own, as a mask
        self.ties = Ties()
        self.callbacks = Callbacks(self)
        self.ladder = Ladder(self)
        self._cell_numbers = itertools.count(1)
        self._stopped_at = (-1, -1)  # batch and question at the last Ctrl-C
        self.left_prompt: KeyboardInterrupt | None = None  # the last one that ended a debugger's prompt alone
        self._flusher = Flusher(self, settings.engine.flush_after_s)
        self.dirty = self._flusher.wake  # called with the first op of an empty buffer
        clients.add(self)

    # --- life

    def attach(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor

    def go_live(self) -> None:
        self.state = "live"
        self._flusher.start()

    def close(self, reason: str = "") -> None:
        """No more ops; whoever waits is told. The supervisor is stopped by its owner."""
        if self.state == "closed":
            return
        self.state = "closed"
        self._flusher.stop()
        self.lender.close()
        for pending in [*self._pending.values(), *(p for _, p in self._marks)]:
            pending.finish()

    def kill(self, ranks: Sequence[int]) -> tuple[int, ...]:
        """SIGKILL; the ranks that had a process."""
        there = tuple(rank for rank in ranks if not self.is_gone(rank))
        self.supervisor.signal(there, signal.SIGKILL, group=True)
        return there

    def take_back(self, ranks: Sequence[int]) -> None:
        """Other processes have these ranks: they learn what was defined, and are waited for from now on.

        The caller holds the lock.
        """
        with HeldInterrupt():
            define, payloads = self.defined.order()
            self.supervisor.send(tuple(ranks), encode(define), payloads)
            self.supervisor.send(tuple(ranks), encode(wire.Define(list(self.recordings.values()))))
            self.progress.begin_again(ranks, self.batch)
            self.breakpoints.send(ranks)
            self._told_streams = {(rank, s) for rank, s in self._told_streams if rank not in ranks}
            for rank in ranks:
                self._gone.pop(rank, None)
                self._stuck.pop(rank, None)
            self._lost = ""
            if not self._gone:
                self._a_rank_ended.clear()
            self.note = "; ".join(p.obituary() for p in self._gone.values())

    def forget_question(self, pending: Pending) -> None:
        """Nobody waits for its answer any more."""
        for ident in [ident for ident, known in list(self._pending.items()) if known is pending]:
            self._pending.pop(ident, None)

    # --- cells

    def begin_cell(self, name: str) -> int:
        """A cell of the notebook begins: output of the following ops carries the number returned.

        ``name`` is for the log alone: where an op was issued is known from its own code object.
        """
        log.debug("cell %s begins on mesh %s", name, self.name)
        with self.lock:
            self.flush()
            self.cell = next(self._cell_numbers)
            return self.cell

    def end_cell(self, number: int) -> None:
        with self.lock:
            self.flush()
            if self.cell == number:
                self.cell = 0

    # --- waiting

    def flush_if_full(self) -> None:
        """After an op, without the lock: may wait for workers that are far behind."""
        if len(self.where) >= self.flush_ops:
            interrupts.raise_lost()
            self.flush()
        if self.due:
            self.due = False
            self._hold_back()

    def _hold_back(self) -> None:
        """Bounds what the workers are behind, so that memory and interrupts stay within reach."""
        limit = self.batch - self.settings.engine.max_batches_in_flight
        alive = self.alive
        if not alive or all(self.progress.is_done(r, limit) for r in alive) or self._is_user_asked():
            return
        pending = self._wait_for_mark(limit)
        self.wait(pending)

    def wait(self, pending: Pending, deadline: float | None = None) -> None:
        """Until it is filled; debuggers are served meanwhile. KeyboardInterrupt reaches the workers first; one at a
        debugger's prompt leaves them where they stand."""
        self._waiters.append(pending)
        pending.is_left = False
        try:
            interrupts.raise_lost()  # one that came while the question was sent, even if it is answered by now
            if self._prompts or self._inputs:
                pending.bell.put(None)
            while not pending.done:
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    raise TimeoutError(f'no answer from mesh "{self.name}" in time')
                with contextlib.suppress(queue.Empty):
                    pending.bell.get(timeout=0.2 if left is None else min(0.2, left))
                interrupts.raise_lost()
                for asking in (self._prompts, self._inputs):
                    if asking and not unattended.get():
                        since = time.monotonic()
                        asking.serve(self.front or get_default_front())
                        if deadline is not None:  # what the user takes to answer does not count
                            deadline += time.monotonic() - since
                if len(self._prompts) and not unattended.get():
                    needed = {*pending.waiting, *pending.behind}
                    self._prompts.refuse_detached(needed, (self.front or get_default_front()).place)
                if pending.calls:
                    self.callbacks.serve(pending)
        except KeyboardInterrupt as error:
            if error is self.left_prompt:  # a wait inside this one has seen to the rest
                self.callbacks.leave(pending)
                raise
            if self._prompts.is_used and not unattended.get():
                self.callbacks.leave(pending)
                self._leave_prompt()
            self.callbacks.refuse([*self._pending.values(), pending])
            self.stop_cell(again=True)
            raise
        except DetachedError:
            self.callbacks.leave(pending)
            raise
        finally:
            self._waiters.remove(pending)
        if pending.calls:  # of ranks whose answer no longer counts, for another one is gone
            self.callbacks.refuse([pending])
        if pending.error is not None:
            raise pending.error
        if self.state == "closed" and pending.waiting:
            self.check_alive()

    def _leave_prompt(self) -> NoReturn:
        """After a Ctrl-C at a debugger's prompt: who has stopped stays there, for %mesh debug."""
        said = self._prompts.leave_prompt((self.front or get_default_front()).place)
        self.left_prompt = KeyboardInterrupt(said)
        self._stopped_at = (self.batch, self._last_ident)  # so that the end of the cell stops nothing
        raise self.left_prompt from None

    def sync(self) -> None:
        """Until every op issued so far has run on every rank.

        Raises the first failure among them (RemoteException), DeviceException where a rank died, and
        KeyboardInterrupt after the workers were told.
        """
        if self.late is not None:
            self.late()
        self.settle()
        self.raise_failure()
        self.check_alive()

    def settle(self, ranks: Iterable[int] | None = None) -> None:
        """As sync, and leaves the failures to be raised later. ``ranks``: waits for these alone."""
        with self.lock:
            if self.state in ("closed", "starting"):
                return self.check_alive()
            with HeldInterrupt():
                self._flush_held(reported=True)
                self._delete_elsewhere()
            if not self.alive:
                return self.check_alive()
            pending = None
            ended = len(self.ended_loans) if ranks is None else 0
            needed = self.alive if ranks is None else [r for r in self.alive if r in ranks]
            if not all(self.progress.is_done(r, self.batch) for r in needed):
                is_asked = self._reported == self.batch
                pending = self._wait_for_mark(self.batch if is_asked else self._send_mark(), needed)
        if pending is not None:  # else nothing is outstanding; what was told meanwhile may not have been shared
            self.wait(pending)
        if not self.holds:
            self.flush_ops = FIRST_FLUSH_OPS
        if ranks is None:
            self._busy_streams = self._is_wide = False
        self.ties.settle(ranks)
        self._share_failures(ranks)
        for ref in self.ended_loans[:ended]:
            self.lent.pop(ref, None)
        del self.ended_loans[:ended]

    def _share_failures(self, heard: Iterable[int] | None) -> None:
        """Every rank marks what hangs on a failure of another one: their part of a collective is meaningless."""
        for failure, refs in self._failures.take_poisoned(self.scope_ranks, heard):
            if self.world > 1:
                refs = refs + [origin for r in refs for origin in self.lent.get(r, ())]
                self.order(wire.Poison(refs, failure), None)

    def raise_failure(self, cause: wire.Failure | None = None) -> None:
        """Raises the first failure not yet raised, or the one with this cause, if there is one."""
        first, more = self._failures.take(cause)
        if first is None:
            return
        for entry in self._failures.forget:
            self.cache.forget(entry)
        self._failures.forget.clear()
        self.blame_death(first.by_rank.values())
        raise failures.remote_exception(first, more)

    def raise_failure_at(self, location: Location, batch: int) -> None:
        """Raises the failure of the op issued there in a batch after ``batch``, if it failed."""
        failed = self._failures.take_at(location, batch)
        if failed is not None:
            if failed.failure().entry:
                self.cache.forget(failed.failure().entry)
            self.blame_death(failed.by_rank.values())
            raise failures.remote_exception(failed)

    def blame_death(self, failed: Iterable[wire.Failure]) -> None:
        """Raises DeviceException where a collective was cut off by the end of a rank, which is told a moment later."""
        if any(f.severed for f in failed) and self._a_rank_ended.wait(self.settings.timeouts.beat):
            self.check_alive()

    def interrupt(self, *, hard: bool = False, ranks: Sequence[int] | None = None) -> None:
        """Stop the users' functions that the workers run or were sent; ``hard``: torch's ops too. Any thread."""
        supervisor = self._supervisor
        if supervisor is not None and self.state == "live":
            supervisor.send_control(ranks, encode(wire.Interrupt(self.batch, self._last_ident, hard)))

    def stop_cell(self, *, again: bool = False) -> None:
        """After a Ctrl-C, once: tell the workers, and give them a moment to stop. Any thread; ends within prompt_back.

        Torch's ops that were sent may end first, so that every rank stops at the same one and no value is lost;
        where they do not come to an end they are dropped, each rank where it is. ``again``: see Ladder.climb.
        """
        if self._stopped_at == (self.batch, self._last_ident) and not self.code and not self._prompts:
            return  # by the wait that the Ctrl-C ended
        self.interrupt()
        self._prompts.quitting = self._inputs.quitting = True
        try:
            self._prompts.leave_all()
            self._inputs.leave_all()
            with self.lock:
                if self.state != "live" or not self.alive:
                    return
                self.flush()
                mark = self._send_mark()
                pending = self._wait_for_mark(mark)
            self.ladder.climb(pending, mark, again)
        except KeyboardInterrupt:
            self.interrupt(hard=True)  # another press: do not wait
        finally:
            self._prompts.quitting = self._inputs.quitting = False
            self._stopped_at = (self.batch, self._last_ident)
        self._failures.clear()
