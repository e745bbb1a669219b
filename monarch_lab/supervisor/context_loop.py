"""The supervision library at work: users' commands and agents' words in, orders and letters out, for a SupervisorCore.

Runs on: its own thread, but for ``post``, ``call``, ``start``, ``join`` and ``status``, which any thread may call.
"""

from __future__ import annotations

import logging
import platform as python_platform
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

import zmq

import monarch_lab
from monarch_lab.config import Settings
from monarch_lab.errors import BacklogError, ClosedError, ProtocolError
from monarch_lab.supervisor.backlog import Backlog
from monarch_lab.supervisor.core import SupervisorCore
from monarch_lab.supervisor.core_events import (
    AgentEnded,
    AgentStarted,
    Announce,
    EndProcess,
    Event,
    Fence,
    PassOn,
    PeerBroken,
    PeerFenced,
    PeerJoined,
    PeerReported,
    Release,
    ShutdownAsked,
    StartAgents,
    Tell,
    Ticked,
    Warn,
)
from monarch_lab.supervisor.inbox import Entry, Inbox
from monarch_lab.supervisor.local_hosts import LocalAgent
from monarch_lab.supervisor.records import HostTimes
from monarch_lab.supervisor.status import LoopClock, Status, time_to_live
from monarch_lab.transport.doorbell import Doorbell
from monarch_lab.transport.events import Fenced, Joined, LinkEvent, Received
from monarch_lab.transport.faults import Faults
from monarch_lab.transport.frames import poll_ms
from monarch_lab.transport.hub import Hub
from monarch_lab.transport.keys import Invitation
from monarch_lab.wire.hosts import Order, pack_messages, unpack_reports
from monarch_lab.wire.link import MESH_BYTES, LinkHello, Versions, link_limits, link_times

log = logging.getLogger(__name__)
T = TypeVar("T")
# One message of the link holds at most so many orders, and about so many bytes.
_BATCH_ORDERS = 512
_BATCH_BYTES = 4 << 20
_RETRY_S = 0.05
# With many agents what they say is read together: one look at each costs more than what one says. Commands are heard
# at once all the same.
_MANY_PEERS = 64
_QUIET_S = 0.02
_BUSY_S = 0.003
_SHUT_POLL_S = 0.02
_FAREWELL_S = 0.1


@dataclass(frozen=True, slots=True)
class LoopPlan:
    address: str
    directory: str
    times: HostTimes
    settings: Settings
    starts_agents: bool  # on this machine, when hosts are asked for
    status_s: float  # between two statuses; 0: none
    on_status: Callable[[Status], None]


class ContextLoop:
    def __init__(self, plan: LoopPlan, inbox: Inbox, backlog: Backlog) -> None:
        self._plan = plan
        self._inbox = inbox
        self._backlog = backlog
        self._core = SupervisorCore(plan.times)
        self._commands: deque[Event | Callable[[], None]] = deque()
        self._doorbell = Doorbell()
        self._letters: list[Entry] = []  # of this round
        self._outboxes: dict[int, deque[tuple[Order, bytes]]] = {}
        self._retry_at = float("inf")
        self._agents: dict[int, LocalAgent] = {}  # by peer
        self._clock = LoopClock()
        self._heard_before = 0
        self._next_status = time.monotonic() + plan.status_s if plan.status_s else float("inf")
        self._quiet_until = 0.0
        self._has_guests = False  # agents that we did not start
        self._farewell_by = float("inf")
        self._thread = threading.Thread(target=self._run, name="supervisor", daemon=True)
        self._do: dict[type, Callable[[Any], None]] = {
            Tell: lambda a: self._outboxes.setdefault(a.peer, deque()).append((a.order, a.payload)),
            Announce: lambda a: self._letters.append(Entry(a.sender.handle, a.message)),
            PassOn: lambda a: self._letters.append(Entry(a.sender.handle, data=a.payload)),
            Release: lambda a: self._backlog.release(a.process, a.size),
            EndProcess: lambda a: self._backlog.close(a.process),
            Fence: self._fence,
            StartAgents: self._start_agents,
            Warn: lambda a: log.warning("%s", a.text),
        }

    # --- any thread

    def start(self) -> None:
        """Bind and start the thread; raises what the binding raises, and leaves nothing then."""
        settings = self._plan.settings
        self._zmq = zmq.Context()
        self._hub = Hub(
            self._zmq,
            mesh=secrets.token_bytes(MESH_BYTES),
            address=self._plan.address,
            times=link_times(settings.timeouts),
            limits=link_limits(settings.link),
            versions=Versions(python=python_platform.python_version(), torch="", monarch_lab=monarch_lab.__version__),
            faults=Faults(settings.faults),
        )
        try:
            self._hub.open()
        except BaseException:
            self._zmq.destroy(linger=0)
            raise
        self._thread.start()

    def post(self, event: Event) -> None:
        self._commands.append(event)
        self._doorbell.ring()

    def call(self, function: Callable[[], T], within_s: float) -> T:
        """What ``function`` gives on the loop's thread; ClosedError when the loop has ended."""
        answer: Future[T] = Future()

        def run() -> None:
            try:
                answer.set_result(function())
            except BaseException as e:
                answer.set_exception(e)

        self._commands.append(run)
        self._doorbell.ring()
        if not self._thread.is_alive() and not answer.done():
            raise ClosedError("the context was shut down")
        return answer.result(within_s)

    def invite(self, address: str | None) -> Invitation:
        """On the loop's thread only."""
        self._has_guests = True
        return self._hub.invite(address)

    def join(self, within_s: float) -> bool:
        self._thread.join(within_s)
        return not self._thread.is_alive()

    # --- the thread

    def _run(self) -> None:
        why = "the context was shut down"
        try:
            while not self._is_over():
                self._round()
        except Exception as e:
            log.exception("a supervisor failed")
            why = f"the supervisor failed: {e!r}; please report it with the log"
        finally:
            self._end()
            self._put_letters()
            self._inbox.close(why)

    def _is_over(self) -> bool:
        if not self._core.stopping or not self._core.is_empty:
            return False
        now = time.monotonic()
        if self._agents:
            return now >= self._give_up
        # Agents elsewhere hear our last word before the socket goes; without it they wait for it a while.
        self._farewell_by = min(self._farewell_by, now + _FAREWELL_S)
        return now >= self._farewell_by or not self._has_guests

    def _round(self) -> None:
        ready = self._poll()
        now = self._clock.poll_ended()
        busy = bool(self._commands)
        self._doorbell.answer()
        while self._commands:
            command = self._commands.popleft()
            if callable(command):
                command()
            else:
                self._command(command, now)
        if self._hub.socket in ready:
            for event in self._hub.read(now):
                busy = True
                self._hear(event, now)
        self._collect_agents(ready, now)
        self._handle(Ticked(lambda peer: self._hub.silent_for(peer, now)), now)
        self._put_letters()
        self._flush(now)
        self._hub.tick(now)
        if now >= self._next_status:
            self._next_status = now + self._plan.status_s
            self._tell_status(now)
        if len(self._core.peers) >= _MANY_PEERS:
            self._quiet_until = now + (_BUSY_S if busy else _QUIET_S)
        self._clock.round_ended()

    def _poll(self) -> dict[object, int]:
        poller = zmq.Poller()
        poller.register(self._doorbell.fd, zmq.POLLIN)
        for agent in self._agents.values():
            if agent.end_fd is not None:
                poller.register(agent.end_fd, zmq.POLLIN)
        now = time.monotonic()
        if now < self._quiet_until:
            ready: dict[object, int] = dict(poller.poll(poll_ms(self._quiet_until - now)))
            if ready:
                return ready
            now = time.monotonic()
        poller.register(self._hub.socket, zmq.POLLIN)
        until = min(self._next_status, self._retry_at)
        if self._core.peers or self._agents:
            until = min(until, self._hub.next_wake(), now + self._plan.times.beat / 2)
        if self._core.stopping:
            until = min(until, now + _SHUT_POLL_S)
        return dict(poller.poll(-1 if until == float("inf") else poll_ms(until - now)))

    def _handle(self, event: Event, now: float) -> None:
        for action in self._core.handle(event, now):
            self._do[type(action)](action)

    def _command(self, event: Event, now: float) -> None:
        if isinstance(event, ShutdownAsked) and not self._core.stopping:
            self._give_up = now + self._plan.times.stop
        self._handle(event, now)

    def _hear(self, event: LinkEvent, now: float) -> None:
        match event:
            case Received():
                try:
                    reports = unpack_reports([bytes(frame) for frame in event.frames])
                except ProtocolError as e:
                    self._handle(PeerBroken(event.peer, f"it is not understood: {e}"), now)
                    return
                self._handle(PeerReported(event.peer, reports), now)
            case Joined(hello=LinkHello() as hello):
                self._outboxes.pop(event.peer, None)
                self._handle(PeerJoined(event.peer, hello.hostname), now)
            case Fenced():
                self._outboxes.pop(event.peer, None)
                self._handle(PeerFenced(event.peer, event.reason), now)

    def _put_letters(self) -> None:
        if self._letters:
            letters, self._letters = self._letters, []
            self._inbox.put(letters)

    def _flush(self, now: float) -> None:
        """Send each peer what it is to hear; what its link does not take waits, in order."""
        self._retry_at = float("inf")
        for peer in [peer for peer, outbox in self._outboxes.items() if outbox]:
            outbox = self._outboxes[peer]
            while outbox:
                batch = _take_batch(outbox)
                try:
                    self._hub.send(peer, pack_messages(batch), now)
                except BacklogError:
                    outbox.extendleft(reversed(batch))
                    self._retry_at = now + _RETRY_S
                    break
                except ClosedError:  # fenced by the link meanwhile; the event is on its way
                    outbox.clear()

    def _fence(self, action: Fence) -> None:
        self._outboxes.pop(action.peer, None)
        self._hub.fence(action.peer, action.reason, action.final)

    # --- agents on this machine

    def _start_agents(self, action: StartAgents) -> None:
        if not self._plan.starts_agents:
            return
        for _ in range(action.count):
            invitation = self._hub.invite()
            # As commands: they are rules of their own, and the actions of this one are not done yet.
            self._commands.append(AgentStarted(invitation.peer))
            try:
                self._agents[invitation.peer] = LocalAgent(invitation, self._plan.directory)
            except OSError as e:
                self._commands.append(AgentEnded(invitation.peer, f"no agent could be started: {e}"))
        self._doorbell.ring()

    def _collect_agents(self, ready: dict[object, int], now: float) -> None:
        for peer, agent in list(self._agents.items()):
            if (agent.end_fd in ready or agent.end_fd is None) and agent.has_ended():
                del self._agents[peer]
                text = agent.end_text()
                agent.close()
                self._handle(AgentEnded(peer, text), now)
                self._hub.revoke(peer)

    # --- how it is

    def status(self, now: float) -> Status:
        """On the loop's thread only. Starts a new interval."""
        core, counters = self._core, self._core.counters
        states: dict[str, int] = {}
        for host in list(core.hosts.values()):
            states[host.state.name] = states.get(host.state.name, 0) + 1
        heard = self._hub.stats().frames_in
        heard, self._heard_before = heard - self._heard_before, heard
        status = Status(
            launches=counters.launches,
            starts=counters.starts,
            exits=counters.exits,
            sends=counters.sends,
            responses=counters.responses,
            process_deletions=counters.deletions,
            hosts_waiting=core.hosts_waiting,
            connections_waiting=core.peers_waiting,
            states=states,
            unread_letters=len(self._inbox),
            heartbeats=heard,
            **time_to_live(core.silences(lambda peer: self._hub.silent_for(peer, now)), self._plan.times.lost),
            **self._clock.figures(),
        )
        self._clock.reset()
        return status

    def _tell_status(self, now: float) -> None:
        try:
            self._plan.on_status(self.status(now))
        except Exception:
            # The user's hook must not cost the hosts their supervisor.
            log.exception("log_status failed")

    # --- the end

    def _end(self) -> None:
        for agent in self._agents.values():
            agent.kill()
        for agent in self._agents.values():
            agent.end_text()
            agent.close()
        self._hub.close()
        self._zmq.destroy(linger=0)
        while self._commands:
            command = self._commands.popleft()
            if callable(command):
                command()
        self._doorbell.close()


def _take_batch(outbox: deque[tuple[Order, bytes]]) -> list[tuple[Order, bytes]]:
    batch = [outbox.popleft()]
    size = len(batch[0][1])
    while outbox and len(batch) < _BATCH_ORDERS and size + len(outbox[0][1]) <= _BATCH_BYTES:
        batch.append(outbox.popleft())
        size += len(batch[-1][1])
    return batch
