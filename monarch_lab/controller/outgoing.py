"""The kernel's side of one mesh's op stream: the buffers, and what goes out of them.

User threads issue ops; ``lock`` guards the buffers. Questions and marks are Pending objects, which the listener fills.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from monarch_lab.config import Settings
from monarch_lab.controller import interrupts, messages
from monarch_lab.controller.defined import Defined
from monarch_lab.controller.locations import Location, here
from monarch_lab.controller.progress import Progress
from monarch_lab.controller.state import is_process_wide
from monarch_lab.controller.state import recorder as current_recorder
from monarch_lab.controller.waiting import Pending
from monarch_lab.errors import ClosedError, DeviceException, InternalError
from monarch_lab.supervisor import ProcessInfo, Supervisor
from monarch_lab.transport.frames import HeldInterrupt
from monarch_lab.wire import engine as wire
from monarch_lab.wire.codec import encode
from monarch_lab.wire.engine import Op

if TYPE_CHECKING:
    from monarch_lab.controller.mesh import DeviceMesh

_HELD_OPS = 1 << 62
FIRST_FLUSH_OPS = 16  # idle workers begin soon; batches then grow to the setting


class Outgoing:
    """``world``: the mesh's number of ranks."""

    def __init__(self, name: str, world: int, settings: Settings) -> None:
        self.name = name
        self.world = world
        self.settings = settings
        self.lock = threading.RLock()
        self.state = "starting"
        self.dead: deque[int] = deque()  # refs whose handle died; any thread appends
        self.refs = itertools.count(1)
        self.all_ranks = tuple(range(world))
        self.scope_ranks: dict[int, tuple[int, ...]] = {0: self.all_ranks}
        self.flush_ops = FIRST_FLUSH_OPS
        self.holds = 0  # blocks of ml.coalescing that are open
        self.due = False  # it is time to see how far the workers are behind
        self._reported = 0  # the last batch that every rank reports
        self.urgent = False  # a large value has died: its delete goes out with the next op
        self.ops = 0
        # the batch that is filled
        self.code: list[int] = []
        self.numbers: list[int | float] = []
        self.where: list[Location] = []
        self._elsewhere: list[int] = []  # deletes of a part's batch, for the ranks outside it
        self.scope: tuple[int, ...] | None = None  # ranks of the buffered batch
        self.scope_number = 0  # of its mesh; 0 is the whole one
        self.scope_mesh: Any = None
        self.ambient = -1  # ambient of the last op in the buffer
        self.cell = 0
        self.stream = 0  # of the buffered batch; 0 is the default one
        self.batch = 0
        # recordings
        self.recorder: Any = None  # notes what is sent, while a function is recorded
        self.recordings: dict[int, wire.RecordingDef] = {}
        self.published: weakref.WeakSet[Any] = weakref.WeakSet()  # whole recordings, of which these are parts
        # streams
        self._dead_of: dict[int, deque[int]] = {0: self.dead}
        self._busy_streams = False  # streams beside the default one were given something since the last settle
        self._is_wide = False  # since then an op had a state that torch keeps for a process
        self._told_streams: set[tuple[int, int]] = set()  # (rank, stream)
        self.lent: dict[int, list[int]] = {}  # ref of a borrowed value -> those it was lent from
        self.ended_loans: list[int] = []  # those that came back, whose failures may not have been shared
        # definitions
        self._definitions: list[wire.Definition] = []
        self._definition_frames: list[bytes | memoryview] = []
        self._known_ambients: set[int] = set()
        self.defined = Defined()  # sent before, for processes that come later
        # what is asked, and how far the ranks are
        self.progress = Progress(world)
        self._idents = itertools.count(1)
        self._last_ident = 0
        self._pending: dict[int, Pending] = {}
        self._marks: list[tuple[int, Pending]] = []
        asked = settings.controller.operations_per_progress_request
        self._report_every = max(1, asked // settings.engine.flush_ops)  # batches
        self.late: Callable[[], None] | None = None  # waits for a %%spmd --async cell, and raises what it failed with
        # the processes
        self._supervisor: Supervisor | None = None
        self._stuck: dict[int, str] = {}  # ranks that count as failed: why
        self._gone: dict[int, ProcessInfo] = {}
        self._lost = ""
        self.dirty: Callable[[], None] = lambda: None  # called with the first op of an empty buffer

    def check_open(self) -> None:
        """Raises ClosedError where its owner has stopped it."""
        if self.state == "closed":
            raise ClosedError(f'mesh "{self.name}" was stopped: start another with %mesh start')

    def check_alive(self, ranks: Iterable[int] | None = None) -> None:
        """Raises ClosedError or DeviceException where ops on these ranks cannot run."""
        self.check_open()
        if self._lost:
            told = f'mesh "{self.name}" is dead: {self._lost}; %mesh restart gives it other processes'
            raise DeviceException(told, tuple(range(self.world)))
        for rank in self._stuck if ranks is None else self._stuck.keys() & set(ranks):
            raise DeviceException(f'mesh "{self.name}" is dead: {self._stuck[rank]}', (rank,))
        gone = self._gone if ranks is None else {r: self._gone[r] for r in ranks if r in self._gone}
        if gone:
            told = "; ".join(p.headline() for p in gone.values())
            printed = "".join(f"\nrank {r} printed last:\n{p.last_lines}" for r, p in gone.items() if p.last_lines)
            listed = ",".join(map(str, sorted(gone)))
            others = "; the other ranks keep their values (ml.fetch_shard, mesh.slice)" * (len(self._gone) < self.world)
            raise DeviceException(
                f'mesh "{self.name}" is dead: {told}{others}, %mesh restart --ranks {listed} brings it back{printed}',
                tuple(sorted(gone)),
            )

    @property
    def alive(self) -> list[int]:
        return [] if self._lost else [r for r in range(self.world) if r not in self._gone and r not in self._stuck]

    @property
    def is_lost(self) -> bool:
        """Whether the agent is gone, and every process with it."""
        return bool(self._lost)

    def is_gone(self, rank: int) -> bool:
        return bool(self._lost) or rank in self._gone

    @property
    def supervisor(self) -> Supervisor:
        if self._supervisor is None:
            raise InternalError("the client of a mesh was used before its supervisor started")
        return self._supervisor

    def label(self, rank: int) -> str:
        process = self.supervisor.processes.get(rank) if self._supervisor else None
        return process.label if process is not None else str(rank)

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
            self.progress.lines.is_kept |= bool(values["anomaly"])

    def _keep_state_apart(self, values: dict[str, Any], stream: int) -> None:
        """Streams are threads of one process: a state that torch keeps for all of it is for the default stream, and
        while the others have nothing to do."""
        if is_process_wide(values):
            if stream or self._busy_streams or (self.stream and self.code):  # sent, or about to be
                raise messages.wide_state_beside_streams()
            self._is_wide = True
        elif stream and self._is_wide:
            raise messages.stream_beside_wide_state()

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
            self.flush_ops = _HELD_OPS if self.holds else FIRST_FLUSH_OPS
            if not self.holds and self.state == "live":
                self.flush()

    def forget_scope(self) -> None:
        """The next op asks for its scope, whatever it is."""
        with self.lock:
            self.flush()
            self.scope = None

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
        self.send_definitions()  # before _routed, which tells a stream new to the worker all there are
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
        # At once, for a small loop drops one value for each op. What other threads add meanwhile waits for the next.
        refs = [dead.popleft() for _ in range(len(dead))]
        deletes = [int(Op.DELETE)] * (2 * len(refs))
        deletes[1::2] = refs
        self.code += deletes
        if not self._everywhere(self.scope):
            self._elsewhere += deletes

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
        self.send_definitions()
        self.supervisor.send(None if self._everywhere(ranks) else ranks, header, frames)

    def send_definitions(self) -> None:
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
                self.send_definitions()
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
        where: Location | None = None,
    ) -> Pending:
        """Send an order that each of ``ranks`` answers; ``make(ident)`` builds it. ``where``: None: the caller's line.

        A Ctrl-C that comes while it is sent is raised where the answer is waited for: who asked knows then what for.
        """
        self._check_recorder()
        ranks = tuple(ranks)
        pending: Pending | None = None
        try:
            with self.lock:
                self.check_alive(ranks)
                with HeldInterrupt():
                    batch = self._flush_held(joining=ranks if stream == self.stream else None)
                    ident = self._last_ident = next(self._idents)
                    order = make(ident)
                    pending = self._pending[ident] = Pending(ranks, self.batch)
                    self.progress.note_call(ident, where or here(2), pending)
                    whole = order if batch is None else wire.Together(batch, order)
                    self.send_definitions()
                    self._send(ranks, self._routed(whole, stream, ranks), frames)
        except KeyboardInterrupt:
            if pending is None:
                raise
            interrupts.raise_later()
        assert pending is not None
        for rank in ranks:  # it may have died in between
            if rank in self._gone:
                pending.give_up(rank)
        return pending
