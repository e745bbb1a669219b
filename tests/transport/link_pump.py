"""One hub and its agents' dialers on real sockets, driven in turn until something has come about."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

import msgspec
import zmq

from monarch_lab.config import Link, Timeouts
from monarch_lab.transport.dialer import Dialer
from monarch_lab.transport.events import Joined, LinkEvent, Received
from monarch_lab.transport.frames import poll_ms
from monarch_lab.transport.hub import Hub
from monarch_lab.transport.keys import Invitation
from monarch_lab.wire.link import Versions, link_limits, link_times

PATIENCE_S = 30.0
MESH = b"m" * 16
TIMES = link_times(Timeouts(beat=0.1, link_resend=0.05, link_resend_at_most=0.2))
LIMITS = link_limits(Link())
VERSIONS = Versions("3.11.2", "", "0.1.0")


def hub_at(context: zmq.Context, address: str, **changes: object) -> Hub:
    limits = msgspec.structs.replace(LIMITS, **changes)
    return Hub(context, mesh=MESH, address=address, times=TIMES, limits=limits, versions=VERSIONS)


def dial(context: zmq.Context, invitation: Invitation) -> Dialer:
    return Dialer(context, invitation, VERSIONS, time.monotonic())


class Pump:
    def __init__(self, hub: Hub, dialers: Iterable[Dialer] = ()) -> None:
        self.hub = hub
        self.dialers = list(dialers)
        self.hub_events: list[LinkEvent] = []
        self.events: list[LinkEvent] = []  # of all dialers

    def turn(self) -> None:
        poller = zmq.Poller()
        for end in (self.hub, *self.dialers):
            poller.register(end.socket, zmq.POLLIN)
        wake = min(end.next_wake() for end in (self.hub, *self.dialers))
        poller.poll(min(50, poll_ms(wake - time.monotonic())))
        now = time.monotonic()
        self.hub_events += self.hub.read(now)
        for dialer in self.dialers:
            self.events += dialer.read(now)

    def until(self, done: Callable[[], object]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not done():
            assert time.monotonic() < deadline, (self.hub_events[-5:], self.events[-5:], self.hub.stats())
            self.turn()

    def until_joined(self, count: int = 1) -> None:
        self.until(lambda: sum(isinstance(e, Joined) for e in self.hub_events) >= count)

    def received(self) -> list[list[bytes]]:
        return messages(self.hub_events)

    def heard(self) -> list[list[bytes]]:
        return messages(self.events)


def messages(events: Iterable[LinkEvent]) -> list[list[bytes]]:
    return [[bytes(frame) for frame in e.frames] for e in events if isinstance(e, Received)]
