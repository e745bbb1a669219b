"""The kernel's side of one mesh's op stream: batches out, answers and failures in, and the waits between.

Two threads meet here. User threads issue ops and wait; the supervisor's I/O thread delivers reports through
``on_report``, ``on_process`` and ``on_lost``. ``lock`` guards the buffers of the stream; replies are handed over
through Pending objects.

Longer than a file of ours should be: what is here shares the stream's buffers and their lock.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import queue
import signal
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from monarch_lab.config import Settings
from monarch_lab.controller import failures, interrupts
from monarch_lab.controller.cache import Cache
from monarch_lab.controller.callbacks import Callbacks
from monarch_lab.controller.defined import Defined
from monarch_lab.controller.flusher import Flusher
from monarch_lab.controller.front import Front, get_default_front
from monarch_lab.controller.locations import Location, here
from monarch_lab.controller.progress import Progress
from monarch_lab.controller.prompts import Prompts
from monarch_lab.controller.state import is_process_wide
from monarch_lab.controller.state import recorder as current_recorder
from monarch_lab.controller.ties import Ties
from monarch_lab.controller.waiting import Pending
from monarch_lab.controller.watch import Notice, Watch
from monarch_lab.errors import ClosedError, DeviceException, InternalError, UsageError
from monarch_lab.supervisor import ProcessInfo, Supervisor
from monarch_lab.transport.frames import HeldInterrupt
from monarch_lab.transport.segments import SegmentReader
from monarch_lab.wire import engine as wire
from monarch_lab.wire.codec import Decoder, encode
from monarch_lab.wire.engine import Op

if TYPE_CHECKING:
    from monarch_lab.controller.mesh import DeviceMesh

log = logging.getLogger(__name__)
_reports = Decoder(wire.Report)
clients: weakref.WeakSet[Client] = weakref.WeakSet()
_HELD_OPS = 1 << 62
_FIRST_FLUSH_OPS = 16  # idle workers begin soon; batches then grow to the setting


class Client:
    """``sender`` is the mesh's supervisor; ``world`` its number of ranks."""

    def __init__(self, name: str, world: int, settings: Settings) -> None:
        self.name = name
        self.world = world
        self.settings = settings
        self.segments = SegmentReader()
        self.front: Front | None = None
        self.lock = threading.RLock()
        self.cache = Cache(settings.engine.cache_entries)
        self.dead: deque[int] = deque()  # refs whose handle died; any thread appends
        self.refs = itertools.count(1)
        self.all_ranks = tuple(range(world))
        self.scope_ranks: dict[int, tuple[int, ...]] = {0: self.all_ranks}
        self.leaves: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self.payloads: dict[bytes, int] = {}  # functions sent by value, by digest
        self.retained: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self.varied_mesh: Any = None
        self.flush_ops = _FIRST_FLUSH_OPS
        self.holds = 0  # blocks of ml.coalescing that are open
        self.due = False  # it is time to see how far the workers are behind
        self._reported = 0  # the last batch that every rank reports
        self.urgent = False  # a large value has died: its delete goes out with the next op
        self.vary_level = 0
        self.varied = 0  # mesh dims along which ranks draw numbers of their own, as a mask
        self.ties = Ties()
        self.state = "starting"
        self.note = ""
        self.ops = 0
        # the stream
        self.code: list[int] = []
        self.numbers: list[int | float] = []
        self.where: list[Location] = []
        self._elsewhere: list[int] = []  # deletes of a part's batch, for the ranks outside it
        self.scope: tuple[int, ...] | None = None  # ranks of the buffered batch
        self.scope_number = 0  # of its mesh; 0 is the whole one
        self.scope_mesh: Any = None
        self.recorder: Any = None  # notes what is sent, while a function is recorded
        self.recordings: dict[int, wire.RecordingDef] = {}
        self.published: weakref.WeakSet[Any] = weakref.WeakSet()  # whole recordings, of which these are parts
        self.ambient = -1  # ambient of the last op in the buffer
        self.cell = 0
        self.stream = 0  # of the buffered batch; 0 is the default one
        self._dead_of: dict[int, deque[int]] = {0: self.dead}
        self._busy_streams = False  # streams beside the default one were given something since the last settle
        self._is_wide = False  # since then an op had a state that torch keeps for a process
        self._told_streams: set[tuple[int, int]] = set()  # (rank, stream)
        self.lent: dict[int, list[int]] = {}  # ref of a borrowed value -> those it was lent from
        self.ended_loans: list[int] = []  # those that came back, whose failures may not have been shared
        self._supervisor: Supervisor | None = None
        self.batch = 0
        self.progress = Progress(world)
        self._cell_numbers = itertools.count(1)
        self._idents = itertools.count(1)
        self._last_ident = 0
        self._pending: dict[int, Pending] = {}
        self._marks: list[tuple[int, Pending]] = []
        self._definitions: list[wire.Definition] = []
        self._definition_frames: list[bytes | memoryview] = []
        self._known_ambients: set[int] = set()
        # Sent before, for processes that come later.
        self.defined = Defined()
        self._failures = failures.Log()
        self._prompts = Prompts(self._reply, self.label, self.is_gone)
        self.callbacks = Callbacks(self)
        self._waiters: list[Pending] = []
        self._stopped_at = (-1, -1)  # batch and question at the last Ctrl-C
        asked = settings.controller.operations_per_progress_request
        self._report_every = max(1, asked // settings.engine.flush_ops)  # batches
        self._watch = Watch(settings.timeouts.stopped_told, settings.controller.operation_timeout)
        self._next_look = 0.0
        self._stuck: dict[int, str] = {}  # ranks that count as failed: why
        self._gone: dict[int, ProcessInfo] = {}
        self._a_rank_ended = threading.Event()
        self.ending: frozenset[int] = frozenset()  # ranks whose process is ended on purpose: no news
        self._lost = self._silence = ""
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
        for pending in [*self._pending.values(), *(p for _, p in self._marks)]:
            pending.finish()

    def check_open(self) -> None:
        """Raises ClosedError where its owner has stopped it."""
        if self.state == "closed":
            raise ClosedError(f'mesh "{self.name}" was stopped: start another with %mesh start')

    def check_alive(self, ranks: Iterable[int] | None = None) -> None:
        """Raises ClosedError or DeviceException where ops on these ranks cannot run."""
        self.check_open()
        if self._lost:
            raise DeviceException(
                f'mesh "{self.name}" is dead: {self._lost}; %mesh restart gives it other processes',
                tuple(range(self.world)),
            )
        for rank in self._stuck if ranks is None else self._stuck.keys() & set(ranks):
            raise DeviceException(f'mesh "{self.name}" is dead: {self._stuck[rank]}', (rank,))
        gone = self._gone if ranks is None else {r: self._gone[r] for r in ranks if r in self._gone}
        if gone:
            told = "; ".join(p.headline() for p in gone.values())
            printed = "".join(f"\nrank {r} printed last:\n{p.last_lines}" for r, p in gone.items() if p.last_lines)
            listed = ",".join(map(str, sorted(gone)))
            raise DeviceException(
                f'mesh "{self.name}" is dead: {told}; the other ranks keep their values (ml.fetch_shard, mesh.slice), '
                f"%mesh restart --ranks {listed} brings it back{printed}",
                tuple(sorted(gone)),
            )

    @property
    def alive(self) -> list[int]:
        return [] if self._lost else [r for r in range(self.world) if r not in self._gone and r not in self._stuck]

    @property
    def is_lost(self) -> bool:
        """Whether the agent is gone, and every process with it."""
        return bool(self._lost)

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
            self._told_streams = {(rank, s) for rank, s in self._told_streams if rank not in ranks}
            for rank in ranks:
                self._gone.pop(rank, None)
                self._stuck.pop(rank, None)
            self._lost = ""
            if not self._gone:
                self._a_rank_ended.clear()
            self.note = "; ".join(p.obituary() for p in self._gone.values())

    @property
    def supervisor(self) -> Supervisor:
        if self._supervisor is None:
            raise InternalError("the client of a mesh was used before its supervisor started")
        return self._supervisor

    # --- definitions, sent before what uses them

    def define(self, definition: wire.Definition, frames: Sequence[bytes | memoryview] = ()) -> None:
        with HeldInterrupt():  # frames belong to their definition
            self._definitions.append(definition)
            self._definition_frames.extend(frames)

    def define_ambient(self, ambient: int, values: dict[str, Any], stream: int) -> None:
        if len(self._dead_of) > 1:
            self._keep_state_apart(values, stream)
        if ambient not in self._known_ambients:
            self.define(wire.AmbientDef(ambient, values))
            self._known_ambients.add(ambient)

    def _keep_state_apart(self, values: dict[str, Any], stream: int) -> None:
        """Streams are threads of one process: a state that torch keeps for all of it is for the default stream, and
        while the others have nothing to do."""
        if is_process_wide(values):
            if stream or self._busy_streams or (self.stream and self.code):  # sent, or about to be
                raise UsageError(
                    "the default dtype, deterministic algorithms, anomaly mode and switches of torch.backends are kept "
                    "for the whole process, and another stream would see them: wait for the streams first, with "
                    "mesh.sync(), and use them on the default stream"
                )
            self._is_wide = True
        elif stream and self._is_wide:
            raise UsageError(
                "ops with a default dtype, deterministic algorithms, anomaly mode or switches of torch.backends of "
                "their own may still run on the default stream, and torch keeps these for the whole process: wait for "
                "them with mesh.sync() first"
            )

    # --- sending; each caller holds the lock

    def use_scope(self, mesh: DeviceMesh) -> None:
        """The following ops are for this mesh: what is buffered for another goes out first."""
        self._check_recorder()
        if mesh.ranks_key is not self.scope:
            self.flush()
            mesh.check_alive()
            self.scope = mesh.ranks_key
            self.scope_number = mesh.scope
            self.scope_mesh = mesh
            if mesh.stream_number != self.stream:
                self._turn_to(mesh.stream_number)

    def _check_recorder(self) -> None:
        if (recorder := current_recorder.get()) is not None and recorder.client is not self:
            raise recorder.refuse("an op on another mesh", "a recording is of one mesh and parts of it")

    def hold(self, more: int) -> None:
        """Nothing is sent for its age or number alone while blocks of ``ml.coalescing`` hold it: one more, or fewer."""
        with self.lock:
            self.holds += more
            self.flush_ops = _HELD_OPS if self.holds else _FIRST_FLUSH_OPS
            if not self.holds and self.state == "live":
                self.flush()

    def forget_scope(self) -> None:
        """The next op asks for its scope, whatever it is."""
        with self.lock:
            self.flush()
            self.scope = None

    @property
    def is_waiting(self) -> bool:
        """Whether a thread waits for an answer: of a call that is being learned, say."""
        return bool(self._waiters)

    @property
    def has_streams(self) -> bool:
        """Whether anything was on another stream than the default one."""
        return len(self._dead_of) > 1

    def dead_of(self, stream: int) -> deque[int]:
        """Where refs of a stream go when their handle died: they are deleted in its own order."""
        with self.lock:
            return self._dead_of.setdefault(stream, deque())

    def _turn_to(self, stream: int) -> None:
        self.stream = stream
        self.dead = self.dead_of(stream)

    def _routed(self, order: Any, stream: int, ranks: tuple[int, ...] | None) -> bytes:
        if not stream:
            return encode(order)
        self._busy_streams = True
        for rank in self.all_ranks:
            # A stream that a worker has not heard of knows no definition; later ones go to all streams.
            if (rank, stream) not in self._told_streams:
                self._told_streams.add((rank, stream))
                define, payloads = self.defined.order()
                self.supervisor.send((rank,), encode(wire.OnStream(stream, define)), payloads)
                recordings = wire.Define(list(self.recordings.values()))
                self.supervisor.send((rank,), encode(wire.OnStream(stream, recordings)))
        return encode(wire.OnStream(stream, order))

    def flush(self) -> None:
        """Send what is buffered."""
        # A Ctrl-C between taking and sending would lose ops that later ones use.
        with self.lock, HeldInterrupt():
            self._flush_held()

    def flush_if_full(self) -> None:
        """After an op, without the lock: may wait for workers that are far behind."""
        if len(self.where) >= self.flush_ops:
            interrupts.raise_lost()
            self.flush()
        if self.due:
            self.due = False
            self._hold_back()

    def _flush_held(self, joining: tuple[int, ...] | None = None, reported: bool = False) -> wire.Batch | None:
        """``joining``: ranks of an order that follows at once; a batch for the same is returned, to be sent with it.
        ``reported``: someone waits for its end."""
        if self.dead:
            self.drain_dead()
        if not self.code:
            return None
        ranks = self.scope
        if self.recorder is not None:
            self.numbers = self.recorder.note_batch(self.code, self.numbers, self.where)
        self.batch += 1
        due = self.batch - self._reported >= self._report_every
        stream = self.stream
        report = (due or reported) and self._everywhere(ranks) and not stream
        batch = wire.Batch(self.batch, self.cell, self.scope_number, self.code, self.numbers, report)
        if self.where:
            self.progress.note_batch(self.batch, self.where)
        self.ops += len(self.where)
        self.code, self.numbers, self.where, self.ambient = [], [], [], -1
        if not self.holds:
            self.flush_ops = min(2 * self.flush_ops, self.settings.engine.flush_ops)
        if report:
            self._reported = self.batch
        self.due = self.due or due
        is_alone = not self._elsewhere and (report or not due)
        if joining is not None and is_alone and joining == (self.all_ranks if ranks is None else ranks):
            return batch
        self._send_definitions()  # before _routed, which tells a stream new to the worker all there are
        self._send(ranks, self._routed(batch, stream, ranks))
        if self._elsewhere:
            self.batch += 1
            rest = wire.Batch(self.batch, self.cell, 0, self._elsewhere, [], False)
            self._send(None, self._routed(rest, stream, None))
            self._elsewhere = []
        if due and not report:
            self._send_mark()
        return None

    def let_go_large(self, ref: int) -> None:
        """The last handle of a large value died. Any thread."""
        self.dead.append(ref)
        self.urgent = True

    def drain_dead(self) -> None:
        """Deletes ride in the stream, after the uses. With a part of the mesh in scope they also go to all at the end:
        a rank that does not have the ref ignores it."""
        self.urgent = False
        dead = self.dead
        whole = self._everywhere(self.scope)
        while dead:
            ref = dead.popleft()
            self.code += (Op.DELETE, ref)
            if not whole:
                self._elsewhere += (Op.DELETE, ref)

    def _delete_elsewhere(self) -> None:
        """What died on streams that are not in use now."""
        for stream, dead in self._dead_of.items():
            if dead and stream != self.stream:
                code: list[int] = []
                while dead:
                    code += (Op.DELETE, dead.popleft())
                self.batch += 1
                self._send(None, self._routed(wire.Batch(self.batch, self.cell, 0, code, [], False), stream, None))

    def _everywhere(self, ranks: tuple[int, ...] | None) -> bool:
        return ranks is None or len(ranks) == self.world

    def _send(self, ranks: tuple[int, ...] | None, header: bytes, frames: Sequence[bytes | memoryview] = ()) -> None:
        self._send_definitions()
        self.supervisor.send(None if self._everywhere(ranks) else ranks, header, frames)

    def _send_definitions(self) -> None:
        if self._definitions:
            definitions, payloads = self._definitions, self._definition_frames
            self._definitions, self._definition_frames = [], []
            self.defined.note(definitions, payloads)
            self.supervisor.send(None, encode(wire.Define(definitions)), payloads)

    def _send_mark(self) -> int:
        """An empty batch that every rank reports: completion is the same number everywhere."""
        self.batch += 1
        self._reported = self.batch
        self._send(None, encode(wire.Batch(self.batch, self.cell, 0, [], [], True)))
        return self.batch

    def _hold_back(self) -> None:
        """Bounds what the workers are behind, so that memory and interrupts stay within reach."""
        limit = self.batch - self.settings.engine.max_batches_in_flight
        alive = self.alive
        if not alive or all(self.progress.is_done(r, limit) for r in alive) or self._prompts.serving:
            return
        pending = self._wait_for_mark(limit)
        self.wait(pending)

    def _wait_for_mark(self, number: int, ranks: Iterable[int] | None = None) -> Pending:
        waiting = self.alive if ranks is None else ranks
        pending = Pending(r for r in waiting if not self.progress.is_done(r, number))
        self._marks.append((number, pending))
        for rank in list(pending.waiting):  # its report, or its end, may have come in between
            if rank in self._gone:
                pending.give_up(rank)
            elif self.progress.is_done(rank, number):
                pending.fill(rank, None, [])
        return pending

    def number_order(self, where: Location) -> int:
        """A number for an order that may fail: it is waited for and reported as a batch is. The caller holds the lock
        until it is sent."""
        self.flush()
        self.batch += 1
        self.progress.note_batch(self.batch, [where])
        return self.batch

    def order(
        self, message: Any, ranks: Sequence[int] | None, frames: Sequence[bytes | memoryview] = (), stream: int = 0
    ) -> None:
        """Send one order in its place in the stream."""
        self._check_recorder()
        if (recorder := current_recorder.get()) is not None:
            recorder.note_order(message, ranks, frames)
        with self.lock:
            self.flush()
            with HeldInterrupt():
                to = None if ranks is None else tuple(ranks)
                self._send_definitions()
                self._send(to, self._routed(message, stream, to), frames)

    def after_all(self, fn: Callable[[], None]) -> None:
        """Call ``fn`` once every rank has done what was sent so far, or one of them is gone. On the I/O thread."""
        with self.lock, HeldInterrupt():
            self._flush_held()
            pending = self._wait_for_mark(self._send_mark())
        pending.add_callback(fn)

    def request(
        self,
        make: Callable[[int], wire.Question],
        ranks: Sequence[int],
        frames: Sequence[bytes | memoryview] = (),
        stream: int = 0,
    ) -> Pending:
        """Send an order that each of ``ranks`` answers; ``make(ident)`` builds it."""
        self._check_recorder()
        with self.lock:
            ranks = tuple(ranks)
            self.check_alive(ranks)
            with HeldInterrupt():
                batch = self._flush_held(joining=ranks if stream == self.stream else None)
                ident = self._last_ident = next(self._idents)
                pending = self._pending[ident] = Pending(ranks, self.batch)
                self.progress.note_call(ident, here(2), pending)
                order = make(ident)
                whole = order if batch is None else wire.Together(batch, order)
                self._send_definitions()
                self._send(ranks, self._routed(whole, stream, ranks), frames)
        for rank in ranks:  # it may have died in between
            if rank in self._gone:
                pending.give_up(rank)
        return pending

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

    def wait(self, pending: Pending, deadline: float | None = None) -> None:
        """Until it is filled; debuggers are served meanwhile. KeyboardInterrupt reaches the workers first."""
        self._waiters.append(pending)
        try:
            if self._prompts:
                pending.bell.put(None)
            while not pending.done:
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    raise TimeoutError(f'no answer from mesh "{self.name}" in time')
                with contextlib.suppress(queue.Empty):
                    pending.bell.get(timeout=0.2 if left is None else min(0.2, left))
                interrupts.raise_lost()
                if self._prompts:
                    self._prompts.serve(self.front or get_default_front())
                if pending.calls:
                    self.callbacks.serve(pending)
        except KeyboardInterrupt:
            self.callbacks.refuse([*self._pending.values(), pending])
            self.stop_cell()
            raise
        finally:
            self._waiters.remove(pending)
        if pending.calls:  # of ranks whose answer no longer counts, for another one is gone
            self.callbacks.refuse([pending])
        if pending.error is not None:
            raise pending.error
        if self.state == "closed" and pending.waiting:
            self.check_alive()

    def sync(self) -> None:
        """Until every op issued so far has run on every rank.

        Raises the first failure among them (RemoteException), DeviceException where a rank died, and
        KeyboardInterrupt after the workers were told.
        """
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
            self.flush_ops = _FIRST_FLUSH_OPS
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

    def interrupt(self, *, hard: bool = False) -> None:
        """Stop the users' functions that the workers run or were sent; ``hard``: torch's ops too. Any thread."""
        supervisor = self._supervisor
        if supervisor is not None and self.state == "live":
            supervisor.send_control(None, encode(wire.Interrupt(self.batch, self._last_ident, hard)))

    def stop_cell(self) -> None:
        """After a Ctrl-C, once: tell the workers, and give them a moment to stop. Any thread; ends within prompt_back.

        Torch's ops that were sent may end first, so that every rank stops at the same one and no value is lost;
        where they do not come to an end they are dropped, each rank where it is.
        """
        if self._stopped_at == (self.batch, self._last_ident) and not self.code:
            return  # by the wait that the Ctrl-C ended
        self.interrupt()
        self._prompts.quitting = True
        try:
            self._prompts.leave_all()
            with self.lock:
                if self.state != "live" or not self.alive:
                    return
                self.flush()
                pending = self._wait_for_mark(self._send_mark())
            times = self.settings.timeouts
            last = time.monotonic() + times.prompt_back
            if not self._ends(pending, min(last, time.monotonic() + times.interrupt_heard)):
                self.interrupt(hard=True)
                if not self._ends(pending, last):
                    ranks = ", ".join(map(str, sorted(pending.waiting)))
                    log.warning("rank %s did not stop: its op goes on, and later cells wait for it", ranks)
        except KeyboardInterrupt:
            self.interrupt(hard=True)  # a second press: do not wait
        finally:
            self._prompts.quitting = False
            self._stopped_at = (self.batch, self._last_ident)
        self._failures.clear()

    def _ends(self, pending: Pending, deadline: float) -> bool:
        while not pending.done and time.monotonic() < deadline:
            try:
                pending.bell.get(timeout=0.1)
            except queue.Empty:
                continue
        return pending.done

    def _reply(self, rank: int, reply: wire.DebugReply) -> None:
        self.supervisor.send_control([rank], encode(reply))

    def label(self, rank: int) -> str:
        process = self.supervisor.processes.get(rank) if self._supervisor else None
        return process.label if process is not None else str(rank)

    # --- the supervisor's listener. Runs on: the I/O thread

    def on_report(self, rank: int, frames: list[Any]) -> None:
        message = _reports(frames[0])
        match message:
            case wire.Done():
                self._on_done(rank, message)
            case wire.OpFailed():
                where = self.progress.where(message.batch, message.position)
                self._failures.add(rank, message, getattr(where, "inside", {}).get(message.inside, where))
            case wire.Output():
                front = self.front or get_default_front()
                front.output(message.cell, rank, self.label(rank), message.stream, message.text)
            case wire.DeviceMemory():
                self.progress.device_bytes[rank] = message.reserved_bytes
            case wire.DebugRead():
                self._prompts.add(rank, message)
                for pending in self._waiters[-1:]:
                    pending.bell.put(None)
            case wire.Called():
                self.callbacks.on_called(rank, message, self._pending.get(message.ident))
            case wire.Released():
                self.callbacks.forget(message.handlers)
            case wire.DebugEnded():
                if message.text.strip():
                    front = self.front or get_default_front()
                    front.output(self.cell, rank, self.label(rank), "stdout", message.text)
            case wire.Crashed():
                log.error("a bug in rank %s of mesh %s: please report it\n%s", rank, self.name, message.text)
                failure = wire.Failure("InternalError", message.text, [], rank=rank)
                for waiting in [*self._pending.values(), *(p for _, p in list(self._marks))]:
                    waiting.fill(rank, wire.LearnFailed(0, failure), [])  # whichever it was, it gets no other answer
            case _:
                asked = self._pending.get(message.ident)
                frames = frames[1:]
                if isinstance(message, wire.Fetched) and message.segments:  # at once: who asked may have gone
                    message, frames = self._mapped(rank, message, frames)
                if asked is not None:
                    asked.fill(rank, message, frames)
                    self.progress.note_answer(rank, message.ident, asked)
                    if asked.done:
                        self._pending.pop(message.ident, None)

    def _mapped(self, rank: int, message: wire.Fetched, frames: list[Any]) -> tuple[wire.Report, list[Any]]:
        try:
            return message, self.segments.open(self.supervisor.processes[rank].pid, frames, message.segments)
        except (OSError, ValueError) as e:
            failure = wire.Failure("OSError", f"memory of rank {rank} cannot be mapped here: {e}", [], rank=rank)
            return wire.FetchFailed(message.ident, failure), []

    def _on_done(self, rank: int, message: wire.Done) -> None:
        self._failures.note(rank, message.poisoned, message.unwritten)  # before anyone takes the batch for done
        self.progress.note_done(rank, message.batch, self.alive)
        for mark in list(self._marks):
            number, pending = mark
            if message.batch >= number:
                pending.fill(rank, message, [])
            if pending.done:
                self._marks.remove(mark)

    def on_process(self, process: ProcessInfo) -> None:
        if not process.is_live and self.state == "live":
            self.note = process.obituary()
            if process.rank not in self.ending:
                self._tell_end(process)  # before anyone can raise it
            self._gone[process.rank] = process
            self._give_up(process.rank)

    def _tell_end(self, process: ProcessInfo) -> None:
        """One message, at once, in the cell that runs."""
        op, _, _ = self.progress.oldest(process.rank)
        text = process.obituary(f"; it had not reported {op}" if op else "")
        front = self.front or get_default_front()
        front.output(self.cell, process.rank, process.label, "stderr", f"{text}\n")

    def on_beat(self) -> None:
        now = time.monotonic()
        if self.state != "live" or self._lost:
            return
        if now >= self._next_look:
            self._next_look = now + self.settings.controller.progress_check_interval
            self._ask_progress()
        facts = [self.progress.facts(p) for p in self.supervisor.processes.values() if p.is_live]
        for notice in self._watch.look(facts, self._prompts.serving or bool(self._prompts), now):
            self._tell_notice(notice)

    def _ask_progress(self) -> None:
        """Ranks report when they are asked: without it, what has long been done would look stuck. Never waits."""
        if self.batch > self._reported and self.lock.acquire(blocking=False):
            try:
                self._send_mark()
            finally:
                self.lock.release()

    def _tell_notice(self, notice: Notice) -> None:
        self.note = notice.text
        front = self.front or get_default_front()
        front.output(self.cell, notice.ranks[0], self.label(notice.ranks[0]), "stderr", f"{notice.text}\n")
        if notice.is_stuck and self.settings.controller.fail_on_worker_timeout:
            self._stuck.update(dict.fromkeys(notice.ranks, notice.text))
            for rank in notice.ranks:
                self._give_up(rank)

    def on_silence(self, text: str) -> None:
        """For the status alone: workers do not hang on the agent's word."""
        if bool(text) != bool(self._silence):
            self.note = text
        self._silence = text

    def on_lost(self, reason: str) -> None:
        self._lost = self.note = reason
        if self.state == "live":
            text = f'mesh "{self.name}": {reason}, and every process with it; %mesh restart gives it others\n'
            (self.front or get_default_front()).output(self.cell, 0, self.name, "stderr", text)
        for rank in range(self.world):
            self._give_up(rank)

    def _give_up(self, rank: int) -> None:
        self._a_rank_ended.set()
        self._prompts.forget(rank)
        for ident, pending in list(self._pending.items()):
            pending.give_up(rank)
            if not pending.waiting:
                self._pending.pop(ident, None)
                self.progress.forget_call(ident)
        for _, mark in list(self._marks):
            mark.give_up(rank)

    # --- for displays

    def is_debugging(self, rank: int) -> bool:
        return self._prompts.is_waiting(rank)

    def is_gone(self, rank: int) -> bool:
        return bool(self._lost) or rank in self._gone
