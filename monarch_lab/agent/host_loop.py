"""A host's agent at work: the link to its supervisor, its children and their connections, for a HostCore.

Runs on: the agent's only thread. It waits in one poll and never blocks elsewhere, but while it clears up.
"""

from __future__ import annotations

import logging
import os
import platform as python_platform
import secrets
import signal
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import zmq

import monarch_lab
from monarch_lab.agent.children import Child, Children, start_guard
from monarch_lab.agent.command import Surroundings, start_command
from monarch_lab.agent.ending import end_everything
from monarch_lab.agent.host_core import (
    AgentState,
    Cleared,
    ClearTree,
    Connected,
    Ended,
    Event,
    Exit,
    Fenced,
    Forked,
    ForkFailed,
    HostCore,
    Noted,
    Ordered,
    OwnerGone,
    Rejoin,
    Say,
    Sent,
    SignalChild,
    StartChild,
    Ticked,
    Took,
    WriteCall,
    WriteCredit,
    WriteLetter,
)
from monarch_lab.agent.relay import Relay
from monarch_lab.agent.stderr_tails import StderrTails
from monarch_lab.config import MARK_VARIABLE, Settings
from monarch_lab.errors import BacklogError, ProtocolError
from monarch_lab.transport import platform
from monarch_lab.transport.child_link import Kind, number_of, pipe_address
from monarch_lab.transport.dialer import Dialer
from monarch_lab.transport.directory import hold_directory, make_directory, remove_directory, sweep_directories
from monarch_lab.transport.doorbell import Doorbell
from monarch_lab.transport.events import Received, Refused
from monarch_lab.transport.faults import Faults, Point
from monarch_lab.transport.frames import poll_ms
from monarch_lab.transport.keys import Invitation
from monarch_lab.wire.hosts import HostTerms, Report, pack_messages, unpack_orders
from monarch_lab.wire.link import Versions

log = logging.getLogger("monarch_lab.agent")
# One message of the link: reports of one round are sent together, up to about so much.
_BATCH_REPORTS = 512
_BATCH_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Owner:
    """The supervisor, where it is a process of this machine that started us; ``pid`` 0: it is elsewhere."""

    pid: int = 0
    pid_fd: int = -1
    stderr_fd: int = -1
    stdin_is_leash: bool = False


def versions() -> Versions:
    return Versions(python=python_platform.python_version(), torch="", monarch_lab=monarch_lab.__version__)


class HostAgent:
    """Made in the process it is the agent of; ``run`` returns its exit code."""

    def __init__(self, invitation: Invitation, owner: Owner, settings: Settings, clean_environ: dict[str, str]) -> None:
        self._core = HostCore(HostTerms(settings.timeouts.lease, settings.timeouts.stop_grace))
        self._owner = owner
        self._settings = settings
        self._clean_environ = clean_environ
        self._mark = secrets.token_hex(16)
        self._directory = make_directory()
        # For as long as we live: what is left of an agent that was killed with its guard is removed by a later one.
        self._hold = hold_directory(self._directory)
        sweep_directories(os.path.dirname(self._directory))
        self._surroundings = Surroundings(environ=clean_environ, mark=self._mark, pipe=pipe_address(self._directory))
        self._children = Children()
        self._stderr = StderrTails(owner.stderr_fd if owner.stderr_fd >= 0 else sys.stderr.fileno())
        self._relay = Relay(
            self._directory,
            secrets.token_bytes(32),
            settings.letters.largest_bytes,
            self._core.children.keys(),
            self._on_frame,
        )
        self._own_fd = platform.open_pidfd(os.getpid())
        self._guard_pid = 0
        self._signals = Doorbell()
        self._reports: deque[tuple[Report, bytes]] = deque()
        self._exit: Exit | None = None
        self._asked: list[int] = []  # signals to us that ask for our end
        self._is_refused = False
        self._context = zmq.Context()
        faults = Faults(settings.faults)
        self._fork_fault: Point[None] | None = faults.at("agent.fork")
        self._dialer = Dialer(self._context, invitation, versions(), time.monotonic(), faults)
        self._do: dict[type, Callable[..., None]] = {
            StartChild: self._start,
            WriteCall: lambda a: self._relay.write(a.process, Kind.CALL, a.call),
            WriteLetter: lambda a: self._relay.write(a.process, Kind.LETTER, a.letter),
            WriteCredit: lambda a: self._relay.write_number(a.process, Kind.CREDIT, a.size),
            SignalChild: lambda a: self._children.signal(a.process, a.signal, a.group),
            Say: lambda a: self._reports.append((a.report, a.payload)),
            ClearTree: lambda _: self._clear(),
            Rejoin: lambda _: self._rejoin(),
            Exit: self._set_exit,
        }

    def run(self) -> int:
        """Serve until the supervisor, its end, its silence or a signal ends us; nothing is left below then."""
        platform.become_subreaper()
        signal.set_wakeup_fd(self._signals.button_fd, warn_on_full_buffer=False)
        # Python drops the byte of a signal that has no handler of its own.
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for sig in (signal.SIGTERM, signal.SIGINT):
            signal.signal(sig, lambda number, _: self._asked.append(number))
        try:
            self._start_guard()
            while self._exit is None:
                self._round()
            self._say_last()
        finally:
            self._end()
        if self._exit.text:
            log.warning("ending: %s", self._exit.text)
        return self._exit.code

    # --- one round

    def _round(self) -> None:
        poller = zmq.Poller()
        poller.register(self._dialer.socket, zmq.POLLIN)
        poller.register(self._signals.fd, zmq.POLLIN)
        poller.register(self._relay.fd, zmq.POLLIN)
        if self._owner.pid_fd >= 0:
            poller.register(self._owner.pid_fd, zmq.POLLIN)
        if self._owner.stdin_is_leash:
            poller.register(0, zmq.POLLIN)
        over = {process for process, child in self._core.children.items() if child.is_over}
        for fd, read, write in self._relay.sources(over):
            if flags := (zmq.POLLIN if read else 0) | (zmq.POLLOUT if write else 0):
                poller.register(fd, flags)
        tails = self._stderr.sources()
        for fd in tails:
            poller.register(fd, zmq.POLLIN)
        now = time.monotonic()
        # At the latest after a beat: the lease, and a supervisor without a pidfd, are looked at.
        until = min(self._dialer.next_wake(), self._core.stop_due, now + self._settings.timeouts.beat)
        ready = dict(poller.poll(poll_ms(until - now)))
        if self._dialer.socket in ready:
            self._read_owner()
        if self._relay.fd in ready:
            self._relay.accept()
        for fd in tails:
            if fd in ready:
                self._stderr.read(fd)
                del ready[fd]
        for fd, flags in ready.items():
            if isinstance(fd, int):
                if flags & zmq.POLLOUT:
                    self._relay.flush(fd)
                if flags & ~zmq.POLLOUT:
                    self._relay.read(fd)
        if self._signals.fd in ready:
            self._collect()
        self._watch_owner(ready)
        self._tell_owner()

    def _handle(self, event: Event) -> None:
        actions = self._core.handle(event, time.monotonic())
        for action in actions:
            self._do[type(action)](action)

    def _read_owner(self) -> None:
        for event in self._dialer.read(time.monotonic()):
            match event:
                case Received():
                    try:
                        orders = unpack_orders([bytes(frame) for frame in event.frames])
                    except ProtocolError as e:
                        log.error("orders were dropped: %s", e)
                        continue
                    self._handle(Ordered(orders))
                case Refused(final=True):
                    self._handle(OwnerGone(event.reason))
                case Refused():
                    log.warning("given up by the supervisor: %s", event.reason)
                    self._handle(Fenced())

    def _watch_owner(self, ready: dict[object, int]) -> None:
        now = time.monotonic()
        terms = self._core.terms
        if self._asked:
            self._handle(OwnerGone(f"{signal.Signals(self._asked.pop()).name} was sent to it", terms.stop_grace_s))
        if self._owner.pid_fd in ready or (0 in ready and self._owner.stdin_is_leash):
            self._handle(OwnerGone("the supervisor has ended"))
        elif self._owner.pid and self._owner.pid_fd < 0 and not platform.is_alive(self._owner.pid):
            self._handle(OwnerGone("the supervisor has ended"))
        elif self._dialer.silent_for(now) >= terms.lease_s:
            self._handle(OwnerGone(f"nothing was heard of the supervisor for {terms.lease_s:g} s"))
        else:
            self._handle(Ticked())

    def _tell_owner(self) -> None:
        """Send what is to be told, in order; what the link does not take now waits for the next round."""
        while self._reports:
            batch: list[tuple[Report, bytes]] = []
            size = 0
            while self._reports and len(batch) < _BATCH_REPORTS and size < _BATCH_BYTES:
                if batch and size + len(self._reports[0][1]) > _BATCH_BYTES:
                    break
                batch.append(self._reports.popleft())
                size += len(batch[-1][1])
            try:
                self._dialer.send(pack_messages(batch), time.monotonic())
            except BacklogError:
                self._reports.extendleft(reversed(batch))
                break
        self._dialer.tick(time.monotonic())

    # --- children

    def _start(self, action: StartChild) -> None:
        process = action.order.first + action.index
        if self._fork_fault is not None and self._fork_fault.strike() is not None:
            self._handle(ForkFailed(process, "fork: a fault was made on purpose"))
            return
        try:
            pid, log_path, trouble = start_command(
                action.order, action.index, self._surroundings, lambda: self._stderr.open(process)
            )
        except Exception:
            self._stderr.last_lines(process)  # forget it
            self._handle(ForkFailed(process, traceback.format_exc()))
            return
        self._children.add(Child(process, pid, log_path))
        self._handle(Forked(process, pid))
        if trouble:
            self._handle(Noted(process, trouble))

    def _on_frame(self, process: int, kind: Kind, body: bytes) -> None:
        if kind is Kind.HELLO:
            self._handle(Connected(process))
        elif kind is Kind.LETTER:
            self._handle(Sent(process, body))
        else:
            self._handle(Took(process, number_of(body)))

    def _collect(self) -> None:
        self._signals.answer()
        ended, others = self._children.collect(expecting=False)
        for exited in ended:
            self._relay.drain(exited.process)
            lines = exited.last_lines or self._stderr.last_lines(exited.process)
            self._handle(Ended(exited.process, exited.code, exited.out_of_memory, lines))
        for pid, code in others:
            if pid == self._guard_pid and self._core.state in (AgentState.SERVING, AgentState.STOPPING):
                log.error("the guard has ended (%d); another is started", code)
                self._start_guard()

    def _start_guard(self) -> None:
        own = os.getpid()
        own_fd = -1 if self._own_fd is None else self._own_fd
        # Without a supervisor on this machine the guard watches the agent alone.
        owner = (self._owner.pid, self._owner.pid_fd) if self._owner.pid else (own, -1)
        args = [*owner, own, own_fd, MARK_VARIABLE, self._mark, self._directory]
        self._guard_pid = start_guard(self._clean_environ, [str(arg) for arg in args], [owner[1], own_fd])

    # --- the end

    def _clear(self) -> None:
        grace = self._core.terms.stop_grace_s
        self._handle(Cleared(end_everything(self._mark, {self._guard_pid}, grace, self._collect)))

    def _rejoin(self) -> None:
        self._reports.clear()  # of the agent that was given up
        self._dialer.rejoin(time.monotonic())

    def _set_exit(self, action: Exit) -> None:
        self._exit = action

    def _say_last(self) -> None:
        """Give the last reports time to be acknowledged."""
        deadline = time.monotonic() + self._core.terms.stop_grace_s
        self._tell_owner()
        while (now := time.monotonic()) < deadline and self._dialer.backlog_bytes() and not self._is_refused:
            self._dialer.socket.poll(poll_ms(min(self._dialer.next_wake(), deadline) - now))
            self._is_refused = any(isinstance(event, Refused) for event in self._dialer.read(time.monotonic()))
            self._dialer.tick(time.monotonic())

    def _end(self) -> None:
        """The guard has nothing left to do, then nothing of the directory is left."""
        end_everything(self._mark, (), self._core.terms.stop_grace_s, self._collect)
        self._relay.close()
        self._stderr.close()
        remove_directory(self._directory)
        os.close(self._hold)
        self._dialer.close()
        self._context.destroy(linger=0)
