"""What the supervisor says of one mesh's processes: their reports, and their ends.

Runs on: the supervisor's I/O thread, but for ``is_debugging``. It fills Pending objects and wakes who waits for them.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from monarch_lab.config import Settings
from monarch_lab.controller import failures, looking
from monarch_lab.controller.breakpoints import Breakpoints
from monarch_lab.controller.callbacks import Callbacks
from monarch_lab.controller.debug_console import with_names
from monarch_lab.controller.front import Front, get_default_front
from monarch_lab.controller.inputs import Inputs
from monarch_lab.controller.outgoing import Outgoing
from monarch_lab.controller.prompts import Prompts
from monarch_lab.controller.waiting import Pending
from monarch_lab.controller.watch import Notice, Watch
from monarch_lab.supervisor import ProcessInfo
from monarch_lab.tensors import payload
from monarch_lab.transport.lending import SegmentLender
from monarch_lab.transport.segments import SegmentReader
from monarch_lab.wire import engine as wire
from monarch_lab.wire.codec import Decoder, encode

if TYPE_CHECKING:
    from monarch_lab.controller.mesh import DeviceMesh

log = logging.getLogger(__name__)
_reports = Decoder(wire.Report)
_LINE = re.compile(r"(\S+):(\d+) ")  # as failures.place has it


class Listener(Outgoing):
    callbacks: Callbacks

    def __init__(self, name: str, world: int, settings: Settings) -> None:
        super().__init__(name, world, settings)
        self.note = ""
        self.front: Front | None = None
        self.segments = SegmentReader()
        self.lender = SegmentLender(payload.fill)
        self.ending: frozenset[int] = frozenset()  # ranks whose process is ended on purpose: no news
        self._failures = failures.Log()
        self.dims: dict[str, int] = {"rank": world}  # of the whole mesh
        self.stream_names: dict[int, str] = {}
        self.prompts = self._prompts = Prompts(
            self._reply,
            self.label,
            self.is_gone,
            lambda n: self.stream_names.get(n, str(n)),
            lambda: self.dims,
            lambda *news: (self.front or get_default_front()).debugger_news(name, *news),
        )
        self.breakpoints = Breakpoints(
            lambda ranks, order: self.supervisor.send_control(ranks, encode(order)),
            lambda ranks: looking.wait_heard(self, ranks),
        )
        self._inputs = Inputs(self._reply, self.label, self.is_gone)
        self._waiters: list[Pending] = []
        self._a_rank_ended = threading.Event()
        self._watch = Watch(settings.timeouts.stopped_told, settings.controller.operation_timeout)
        self._next_look = 0.0
        self._silence = ""

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
                text = self.progress.lines.put_into(message.text)
                front.output(message.cell, rank, self.label(rank), message.stream, text)
            case wire.OutputTail():
                (self.front or get_default_front()).output_tail(rank, self.label(rank), message)
            case wire.DeviceMemory():
                self.progress.device_bytes[rank] = message.reserved_bytes
            case wire.DebugRead():
                self._prompts.add(rank, message, self.is_waiting)
                self._ring()
            case wire.Displayed() | wire.Cleared():
                (self.front or get_default_front()).show(rank, message)
            case wire.InputRead():
                self._inputs.add(rank, message)
                self._ring()
            case wire.Called():
                self.callbacks.on_called(rank, message, self._pending.get(message.ident))
            case wire.Returned():
                self.lender.returned(rank, message.loans, message.dropped)
            case wire.Released():
                self.callbacks.forget(message.handlers)
            case wire.DebugEnded():
                label = self._prompts.end(rank, message.session, message.text)
                self._ring()
                if message.text.strip() and label is not None:
                    front = self.front or get_default_front()
                    text = with_names(message.text, front.place)
                    front.output(self.cell, rank, label or self.label(rank), "stdout", text)
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
            self.lender.ended(process.rank)
            self._give_up(process.rank)

    def _tell_end(self, process: ProcessInfo) -> None:
        """One message, at once, in the cell that runs."""
        op, _, _ = self.progress.oldest(process.rank)
        text = process.obituary(f"; it had not reported {op}" if op else "")
        front = self.front or get_default_front()
        front.output(self.cell, process.rank, process.label, "stderr", f"{_with_cells(text, front.place)}\n")

    def on_beat(self) -> None:
        now = time.monotonic()
        if self.state != "live" or self._lost:
            return
        if now >= self._next_look:
            self._next_look = now + self.settings.controller.progress_check_interval
            self._ask_progress()
        facts = [self.progress.facts(p) for p in self.supervisor.processes.values() if p.is_live]
        for notice in self._watch.look(facts, self._is_user_asked(), now):
            self._tell_notice(notice)

    def _is_user_asked(self) -> bool:
        return len(self._prompts) > 0 or self._inputs.serving or bool(self._inputs)

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
        text = _with_cells(notice.text, front.place)
        front.output(self.cell, notice.ranks[0], self.label(notice.ranks[0]), "stderr", f"{text}\n")
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
        self._inputs.forget(rank)
        for ident, pending in list(self._pending.items()):
            pending.give_up(rank)
            if not pending.waiting:
                self._pending.pop(ident, None)
                self.progress.forget_call(ident)
        for _, mark in list(self._marks):
            mark.give_up(rank)

    @property
    def is_waiting(self) -> bool:
        """Whether a thread waits for an answer: of a call that is being learned, say."""
        return bool(self._waiters)

    def is_debugging(self, rank: int) -> bool:
        return self._prompts.is_waiting(rank) or self._inputs.is_waiting(rank)

    def learn_names(self, mesh: DeviceMesh) -> None:
        """Of the whole mesh and of streams, for debuggers. Runs on: the main thread."""
        if mesh.stream is not None:
            self.stream_names[mesh.stream_number] = mesh.stream.name
        elif len(mesh.ranks_key) == self.world and "rank" in self.dims:
            self.dims = mesh.sizes

    def ask_aside(self, make: Callable[[int], Any], ranks: Sequence[int]) -> Pending:
        """As request, for what a worker hears and answers while an op runs there (wire.Control). Any thread."""
        ident = next(self._idents)
        pending = self._pending[ident] = Pending(r for r in ranks if not self.is_gone(r))
        self.supervisor.send_control(sorted(pending.ranks), encode(make(ident)))
        return pending

    def _ring(self) -> None:
        """A debugger or an input() has news for who waits."""
        for pending in self._waiters[-1:]:
            pending.bell.put(None)

    def _reply(self, rank: int, reply: wire.DebugReply | wire.InputReply) -> None:
        self.supervisor.send_control([rank], encode(reply))


def _with_cells(text: str, place: Callable[[str], str]) -> str:
    """Lines of cells by the cell's number: "In[3] line 2: y = x @ w"."""

    def named(found: re.Match[str]) -> str:
        file, line = found.groups()
        return found[0] if place(file) == file else f"{place(file)} line {line}: "

    return _LINE.sub(named, text)
