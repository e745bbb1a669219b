"""The supervisor's I/O thread: what agent and workers say, and their ends, in; snapshots and the listener's calls out.

Runs on: its own thread, but for ``publish``, ``order_agent`` and ``ask_to_stop``, which any thread may call. The
thread reads the report socket; a sender that sees subscriptions waiting rings for it, and it takes them in.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

import zmq
from msgspec import structs

from monarch_lab.config import Settings
from monarch_lab.errors import ClosedError, LaunchError
from monarch_lab.supervisor.agent_process import AgentProcess
from monarch_lab.supervisor.held_ends import QUIET_AT_LATEST_S, QUIET_S, HeldEnds
from monarch_lab.supervisor.launch import Listener, Plan
from monarch_lab.supervisor.leftovers import end_what_is_left
from monarch_lab.supervisor.lifecycle import Event, Exited, NotStarted, ProcessInfo, ProcessState, Started, Welcomed
from monarch_lab.supervisor.order_channel import OrderChannel
from monarch_lab.supervisor.process_table import ProcessTable
from monarch_lab.supervisor.progress import MeshState, Stage, StartClock
from monarch_lab.supervisor.report_socket import ReportSocket
from monarch_lab.supervisor.roll import AGENT, Entry, Roll, worker_identity
from monarch_lab.supervisor.silence import Silence, Verdict
from monarch_lab.transport.door import Door
from monarch_lab.transport.doorbell import Doorbell
from monarch_lab.transport.frames import poll_ms
from monarch_lab.wire.codec import encode
from monarch_lab.wire.engine import control_topic, topic
from monarch_lab.wire.supervision import (
    AgentEnding,
    AgentHello,
    AgentSpec,
    AgentStopped,
    Beat,
    LaunchWorker,
    Message,
    ProcessExited,
    ProcessNotStarted,
    ProcessStarted,
    StopAgent,
    Welcome,
    ZygoteFailed,
    ZygoteReady,
)

log = logging.getLogger(__name__)


class SupervisorLoop:
    """Made with the agent's spec; ``open`` brings it to life, ``launch`` gives it workers, ``ask_to_stop`` ends it.

    ``name`` is the mesh's in messages, until a plan brings another.
    """

    def __init__(self, spec: AgentSpec, settings: Settings, name: str) -> None:
        self._table = ProcessTable()
        self.start = StartClock(settings.timeouts)
        self.name = name
        self._spec = spec
        self._timeouts = settings.timeouts
        self._plans: deque[Plan] = deque()
        self._plan_taken = threading.Event()
        self._listener: Listener | None = None
        self._roll = Roll(spec.key)
        self._welcome = encode(Welcome(spec.key))
        self._orders = OrderChannel()
        self._reports = ReportSocket(self._roll, self._tell_report, self._handle_agent, self._admit)
        self._to_agent: deque[Message] = deque()
        self._to_replace: deque[int] = deque()  # ranks whose process has ended and shall have another
        self._doorbell = Doorbell()
        self._stop_asked = threading.Event()
        self._agent: AgentProcess | None = None
        self._silence = Silence(self._timeouts.look, self._timeouts.unreachable, self._timeouts.lost)
        self._given_up = ""
        self._lifeline = -1
        self._ends = HeldEnds()
        self._thread = threading.Thread(target=self._run, name=f"supervisor {name}", daemon=True)
        self._opened = contextlib.ExitStack()

    # --- any thread

    def open(self, start_agent: Callable[[AgentSpec], tuple[AgentProcess, int]]) -> None:
        """Bind, start the agent (its process, and the lifeline's reading end), then the thread."""
        context = zmq.Context()
        self._opened.callback(context.destroy, linger=0)
        self._door = Door(context, self._spec.key, self._timeouts.link_handshake)
        self._opened.callback(self._door.close)
        self._door.open()
        reports = self._reports.open(context, self._door, self._spec.reports)
        self._opened.callback(self._reports.close)
        orders = self._orders.open(context, self._door, self._spec.orders)
        self._spec = structs.replace(self._spec, orders=orders, reports=reports, curve=self._door.make_keys(AGENT))
        self._agent, self._lifeline = start_agent(self._spec)
        self.start.enter(Stage.AGENT, 1, time.monotonic())
        self._thread.start()

    def launch(self, plan: Plan) -> None:
        """Have its workers started, as soon as the agent can; returns once ``processes`` holds them. Once."""
        self._plans.append(plan)
        self._doorbell.ring()
        # The thread takes it at once, but for one that ends in this very moment.
        if self.start.progress.state is not MeshState.STARTING or not self._plan_taken.wait(self._timeouts.stop_grace):
            raise LaunchError(f"mesh {plan.name} cannot start: {self.start.progress}")

    @property
    def processes(self) -> dict[int, ProcessInfo]:
        """By rank: a snapshot."""
        return self._table.by_rank

    @property
    def agent_pid(self) -> int:
        return self._agent.pid if self._agent is not None else 0

    def publish(self, messages: Sequence[Sequence[bytes | memoryview | zmq.Frame]]) -> None:
        """Send on the order socket, topic first. Never blocks: nothing limits the queue."""
        waiting = self._orders.send(messages)
        if waiting is None:
            raise ClosedError(f"mesh {self.name} is closed")
        if waiting:
            self._doorbell.ring()

    def order_agent(self, message: Message) -> None:
        self._to_agent.append(message)
        self._doorbell.ring()

    def replace(self, rank: int) -> None:
        """Ask for another process under a rank whose own has ended."""
        self._to_replace.append(rank)
        self._doorbell.ring()

    def wait_processes(self, done: Callable[[], bool], timeout: float) -> bool:
        """Until ``done()``, which is asked whenever a process has changed; what it said last."""
        return self._table.wait(done, timeout)

    def kill_agent(self) -> None:
        """As a crash would."""
        if self._agent is not None:
            self._agent.kill()

    def ask_to_stop(self) -> None:
        self._stop_asked.set()
        self._doorbell.ring()

    def join(self, within_s: float) -> bool:
        if self._thread.ident is None:
            return True
        self._thread.join(within_s)
        return not self._thread.is_alive()

    def close(self) -> None:
        """Once the thread has ended, or was never started: sockets and descriptors."""
        self._orders.close()
        self._opened.close()
        if self._agent is not None:
            self._agent.close()
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1
        self._doorbell.close()
        self.start.move(MeshState.CLOSED)

    # --- the thread

    def _run(self) -> None:
        try:
            self._serve()
            self._stop_agent()
        except Exception as e:
            log.exception("the supervisor of mesh %s failed", self.name)
            self.start.fail_start(f"the supervisor failed: {e!r}; please report it with the log")
            self._lose_agent(f"the supervisor failed: {e!r}")
            if self._agent is not None:
                self._agent.kill()

    def _serve(self) -> None:
        assert self._agent is not None
        poller = zmq.Poller()
        sources: list[object] = [self._reports.socket, self._orders.fd, self._doorbell.fd]
        if self._agent.end_fd is not None:
            sources.append(self._agent.end_fd)
        for source in sources:
            poller.register(source, zmq.POLLIN)
        while not self._stop_asked.is_set():
            ready = dict(poller.poll(self._wait_ms()))
            self._doorbell.answer()
            self._take_plan()
            quiet = not self._reports.read() if self._reports.socket in ready else True
            self._take_subscriptions()
            self._replace_asked()
            self._send_to_agent()
            self._tell_ended(quiet)
            self._check_stage()
            self._judge_silence(time.monotonic())
            if self._agent.end_fd in ready or (self._agent.end_fd is None and self._agent.has_ended()):
                self._handle_agent_end()
                self._stop_asked.wait()

    def _take_plan(self) -> None:
        if not self._plans:
            return
        plan = self._plans.popleft()
        self.name = plan.name
        self._thread.name = f"supervisor {plan.name}"
        self._listener = plan.listener
        for rank, launch in plan.launches.items():
            self._roll.expect(rank, launch.process)
        self._table.fill(plan.launches, plan.processes)
        if self.start.progress.stage is Stage.IDLE:
            self.start.enter(Stage.WORKERS, len(plan.processes), time.monotonic())
        self._to_agent.extend(plan.launches.values())
        self._plan_taken.set()

    def _wait_ms(self) -> int:
        if self._ends:
            return poll_ms(QUIET_S)
        now = time.monotonic()
        until = min(self.start.due, self._silence.next_look) - now
        if self._agent is not None and self._agent.end_fd is None:
            until = min(until, self._timeouts.beat)
        return -1 if until == float("inf") else poll_ms(until)

    def _send_to_agent(self) -> None:
        while self._to_agent and self._roll.is_agent(AGENT):
            message = self._to_agent.popleft()
            if isinstance(message, LaunchWorker):
                # Listed before the process can be there: libzmq's clients try no second time once they were refused.
                keys = self._door.make_keys(worker_identity(message.process))
                message = structs.replace(message, curve=keys)
            self._reports.send_to_agent(message)

    def _replace_asked(self) -> None:
        while self._to_replace:
            launch = self._table.succeed(self._to_replace.popleft())
            self._roll.expect(launch.rank, launch.process)
            self._to_agent.append(launch)

    def _tell_report(self, rank: int, frames: list[bytes | memoryview]) -> None:
        self._tell(lambda listener: listener.on_report(rank, frames))

    def _admit(self, peer: AgentHello | Entry) -> None:
        if isinstance(peer, Entry):
            self._greet(peer)
        else:
            self._to_agent.appendleft(Welcome(self._spec.key))
            self.start.enter(Stage.IMPORTS, 1, time.monotonic())

    def _take_subscriptions(self) -> None:
        for name in self._orders.take_subscriptions():
            if entry := self._roll.subscribe(name):
                self._greet(entry)

    def _greet(self, entry: Entry) -> None:
        """Hello and both subscriptions are there, in any order: nothing that is sent now can be missed."""
        if entry.is_greeted():
            names = (topic(entry.rank), control_topic(entry.rank))
            self.publish([(name, self._welcome) for name in names])
            self._make_ready(entry.rank)

    def _make_ready(self, rank: int) -> None:
        info = self.processes[rank]
        # Its hello may overtake the agent's word that it was started: the later of the two makes it ready.
        if info.state is ProcessState.RUNNING and self._roll.is_greeted(info.process):
            self._apply(rank, Welcomed())
            self.start.count(self._table.count_ready(), len(self.processes))

    # --- the agent

    def _handle_agent(self, message: Message) -> None:
        match message:
            case ZygoteReady():
                stage = Stage.WORKERS if self.processes else Stage.IDLE
                self.start.enter(stage, len(self.processes), time.monotonic())
            case ZygoteFailed():
                self.start.note_zygote_end(message.text)
            case ProcessStarted():
                rank = self._table.rank(message.process)
                self._apply(rank, Started(message.pid))
                self._make_ready(rank)
            case ProcessNotStarted():
                rank = self._table.rank(message.process)
                self._door.strike(worker_identity(message.process))
                self._apply(rank, NotStarted(message.text))
                self.start.fail_start(self.processes[rank].obituary())
            case ProcessExited() if self._given_up:
                pass  # one word for all of them follows, with the agent's end
            case ProcessExited():
                self._table.rank(message.process)
                self._ends.add(message)
            case Beat():
                self._silence.hear(time.monotonic())
                self._table.note_usage(message.usage)
                self._tell(lambda listener: listener.on_beat())
            case AgentEnding():
                self._given_up = f"it was stopped from outside ({message.note})"
            case AgentStopped() | AgentHello():
                pass

    def _judge_silence(self, now: float) -> None:
        if self._given_up or not self._silence.is_due(now):
            return
        assert self._agent is not None
        verdict = self._silence.look(now)
        text = f"the agent (pid {self._agent.pid}, state {self._agent.activity()}) has been silent"
        if verdict is Verdict.LOST:
            # Killed, and the rest is as with any agent that ends: the guard ends what is below it.
            self._given_up = f"{text} for {self._silence.for_s(now):.0f} s"
            self._agent.kill()
        else:
            self._tell(lambda listener: listener.on_silence(text if verdict is Verdict.UNREACHABLE else ""))

    def _tell_ended(self, quiet: bool) -> None:
        for exited in self._ends.due(quiet):
            rank = self._table.rank(exited.process)
            self._roll.strike(exited.process)
            self._door.strike(worker_identity(exited.process))
            self._apply(rank, Exited(exited.code, exited.out_of_memory, exited.last_lines))
            self.start.fail_start(self.processes[rank].obituary())

    def _handle_agent_end(self) -> None:
        assert self._agent is not None
        self._take_plan()  # who asked in this moment is told what became of it
        while self._reports.read():
            pass
        self._tell_ended(quiet=True)
        self._end_what_is_left(time.monotonic() + self._timeouts.stop_grace)
        self._agent.wait(self._timeouts.stop_grace)  # readable a moment before it can be collected
        how = self._given_up or f"the agent (pid {self._agent.pid}) {self._agent.end_text()}"
        self.start.fail_start(f"{how} before the mesh was up\n{self._agent.last_lines()}")
        self._lose_agent(how)

    def _lose_agent(self, reason: str) -> None:
        self._table.lose_all()
        self.start.move(MeshState.FAILED)
        self._tell(lambda listener: listener.on_lost(reason))

    # --- stages and snapshots

    def _apply(self, rank: int, event: Event) -> None:
        info = self._table.apply(rank, event)
        if info is not None:
            self._tell(lambda listener: listener.on_process(info))

    def _check_stage(self) -> None:
        if time.monotonic() >= self.start.due:
            missing = [rank for rank, info in self.processes.items() if info.state is not ProcessState.READY]
            assert self._agent is not None
            self.start.fail_start(f"{self.start.late_text(missing)}\n{self._agent.last_lines()}")

    def _tell(self, say: Callable[[Listener], None]) -> None:
        if self._listener is None:
            return
        try:
            say(self._listener)
        except Exception:
            # The listener's bug must not cost the mesh its supervisor.
            log.exception("a listener of mesh %s failed", self.name)

    # --- the end

    def _stop_agent(self) -> None:
        """Ask, wait, kill; then wait for the guard. Bounded by ``timeouts.stop``."""
        assert self._agent is not None
        self.start.move(MeshState.STOPPING)
        give_up = time.monotonic() + self._timeouts.stop
        if self._roll.is_agent(AGENT) and not self._agent.has_ended():
            self._to_agent.append(StopAgent(self._timeouts.stop_grace))
            self._send_to_agent()
            self._serve_until_end(give_up - self._timeouts.stop_grace)
        self._agent.kill()
        self._agent.wait(give_up - time.monotonic())
        self._tell_ended(quiet=True)
        self._table.lose_all()
        self._end_what_is_left(give_up)

    def _end_what_is_left(self, deadline: float) -> None:
        end_what_is_left(self.name, self._spec.mark, self._lifeline, deadline)

    def _serve_until_end(self, deadline: float) -> None:
        """Go on reading, so that the last reports and the ends are told."""
        assert self._agent is not None
        poller = zmq.Poller()
        poller.register(self._reports.socket, zmq.POLLIN)
        if self._agent.end_fd is not None:
            poller.register(self._agent.end_fd, zmq.POLLIN)
        while not self._agent.has_ended() and (left := deadline - time.monotonic()) > 0:
            # In short rounds: a pidfd is readable a moment before its process can be collected, or is not there.
            poller.poll(poll_ms(min(left, QUIET_AT_LATEST_S)))
            self._reports.read()
            self._tell_ended(quiet=True)
        while self._reports.read():
            pass
