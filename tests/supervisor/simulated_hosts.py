"""Many hosts in one process: real links and the agent's real rules, children that are only played.

``python -m tests.supervisor.simulated_hosts`` reads invitations from stdin until its end, joins with each, and runs
until every one was let go.
"""

from __future__ import annotations

import resource
import sys
import time
from collections import deque

import zmq

from monarch_lab.agent.host_core import (
    Cleared,
    ClearTree,
    Connected,
    Ended,
    Event,
    Exit,
    Fenced,
    Forked,
    HostCore,
    Ordered,
    OwnerGone,
    Rejoin,
    Say,
    Sent,
    SignalChild,
    StartChild,
    Ticked,
    Took,
    WriteLetter,
)
from monarch_lab.supervisor.backlog import LETTER_COST_BYTES
from monarch_lab.supervisor.letters import pack_letter
from monarch_lab.transport import platform
from monarch_lab.transport.dialer import Dialer
from monarch_lab.transport.events import Received, Refused
from monarch_lab.transport.frames import poll_ms
from monarch_lab.transport.keys import Invitation, decode_invitation
from monarch_lab.transport.stream import read_message
from monarch_lab.wire.hosts import HostTerms, Report, pack_messages, unpack_orders
from monarch_lab.wire.link import Versions

_LAST_WORDS_S = 1.0
_VERSIONS = Versions(python=sys.version.split()[0], torch="", monarch_lab="0.1.0")


class PlayedHost:
    """Its processes start at once, answer each letter with the time at which all of the host had it, and end by a
    signal."""

    def __init__(self, context: zmq.Context, invitation: Invitation) -> None:
        self.dialer = Dialer(context, invitation, _VERSIONS, time.monotonic())
        self.ended_at = float("inf")
        self._core = HostCore(HostTerms(600, 3))
        self._reports: list[tuple[Report, bytes]] = []
        self._events: deque[Event] = deque()
        self._got: dict[bytes, int] = {}
        self._pid = 1 << 20

    def read(self) -> None:
        for event in self.dialer.read(time.monotonic()):
            match event:
                case Received():
                    self._events.append(Ordered(unpack_orders([bytes(frame) for frame in event.frames])))
                case Refused(final=True):
                    self._events.append(OwnerGone(event.reason))
                case Refused():
                    self._events.append(Fenced())
        self._work()

    def tick(self, now: float) -> None:
        self.dialer.tick(now)
        self._events.append(Ticked())
        self._work()

    def _work(self) -> None:
        while self._events:
            for action in self._core.handle(self._events.popleft(), time.monotonic()):
                self._do(action)
        if self._reports:
            reports, self._reports = self._reports, []
            self.dialer.send(pack_messages(reports), time.monotonic())

    def _do(self, action: object) -> None:
        match action:
            case Say():
                self._reports.append((action.report, action.payload))
            case StartChild():
                self._pid += 1
                process = action.order.first + action.index
                self._events += [Forked(process, self._pid), Connected(process)]
            case WriteLetter():
                self._deliver(action.process, action.letter)
            case SignalChild() if action.process in self._core.children:
                self._events.append(Ended(action.process, -action.signal, False, ""))
            case ClearTree():
                self._events.append(Cleared(True))
            case Rejoin():
                self.dialer.rejoin(time.monotonic())
            case Exit():
                self.ended_at = min(self.ended_at, time.monotonic())

    def _deliver(self, process: int, letter: bytes) -> None:
        self._events.append(Took(process, len(letter) + LETTER_COST_BYTES))
        count = self._got[letter] = self._got.get(letter, 0) + 1
        if count == len(self._core.children):
            del self._got[letter]
            self._events.append(Sent(process, pack_letter(time.monotonic(), 1 << 20)))


def main() -> None:
    platform.set_parent_death_signal()
    raise_descriptor_limit()
    context = zmq.Context()
    context.set(zmq.MAX_SOCKETS, 4096)
    hosts = []
    while (message := read_message(0)) is not None:
        hosts.append(PlayedHost(context, decode_invitation(message)))
    poller = zmq.Poller()
    by_socket = {host.dialer.socket: host for host in hosts}
    for socket in by_socket:
        poller.register(socket, zmq.POLLIN)
    while by_socket:
        now = time.monotonic()
        wake = min(now + 1, *(host.dialer.next_wake() for host in by_socket.values()))
        for socket, _ in poller.poll(poll_ms(wake - now)):
            by_socket[socket].read()
        now = time.monotonic()
        for socket, host in list(by_socket.items()):
            if host.dialer.next_wake() <= now:
                host.tick(now)
            if now > host.ended_at + _LAST_WORDS_S or (now > host.ended_at and not host.dialer.backlog_bytes()):
                poller.unregister(socket)
                del by_socket[socket]
                host.dialer.close(linger_s=1)
    context.term()


def raise_descriptor_limit() -> None:
    """A thousand connections need more than the usual 1024."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


if __name__ == "__main__":
    main()
