"""An agent's end of its link to the supervisor: one socket, driven by the agent's loop.

Runs on: the thread that owns it. It never blocks: what the socket does not take now is sent again later.
"""

from __future__ import annotations

import logging
import os
import platform as python_platform
from collections.abc import Sequence

import zmq

from monarch_lab.errors import ProtocolError, UsageValueError
from monarch_lab.transport.complaints import Complaints
from monarch_lab.transport.curve import as_client
from monarch_lab.transport.dialing import Dialing, DialState
from monarch_lab.transport.events import LinkEvent
from monarch_lab.transport.faults import NO_FAULTS, Faults
from monarch_lab.transport.keys import Invitation
from monarch_lab.transport.link_socket import LinkSocket, configure_link, is_tcp
from monarch_lab.wire.link import Frame, Versions, unpack_envelope

log = logging.getLogger(__name__)
_MESSAGES_A_ROUND = 256


class Dialer:
    """``socket`` goes into the owner's poller; ``read`` when it is readable, ``tick`` at ``next_wake``."""

    def __init__(
        self,
        context: zmq.Context,
        invitation: Invitation,
        versions: Versions,
        now: float,
        faults: Faults = NO_FAULTS,
    ) -> None:
        self._rules = Dialing(invitation, versions, os.getpid(), python_platform.node(), now)
        self._complaints = Complaints()
        self.socket: zmq.Socket = context.socket(zmq.DEALER)
        self._wire = LinkSocket(self.socket, "dialer", faults)
        configure_link(self.socket, invitation.limits, invitation.times)
        if is_tcp(invitation.address):
            if invitation.server is None or invitation.own is None:
                self.socket.close()
                raise UsageValueError("an invitation to a TCP address needs the server's key and a pair of its own")
            as_client(self.socket, invitation.own, invitation.server)
        # Nothing is queued for a connection that is not there: the session keeps it.
        self.socket.setsockopt(zmq.IMMEDIATE, 1)
        self.socket.setsockopt(zmq.RECONNECT_IVL_MAX, int(1000 * invitation.times.resend_at_most))
        self.socket.connect(invitation.address)
        self.tick(now)

    @property
    def state(self) -> DialState:
        return self._rules.state

    def read(self, now: float) -> list[LinkEvent]:
        """What has come, up to a round's worth."""
        events: list[LinkEvent] = []
        for parts in self._wire.receive(_MESSAGES_A_ROUND, now):
            try:
                frames = payload(parts[1:])
                events += self._rules.handle(unpack_envelope(parts[0].buffer, frames), frames, now)
            except ProtocolError as e:
                if (line := self._complaints.note(b"supervisor", str(e), now)) is not None:
                    log.warning("%s", line)
        self.tick(now)
        return events

    def send(self, frames: Sequence[Frame], now: float) -> None:
        """From before it has joined too. PayloadTooLarge, BacklogError or ClosedError: the message was not taken."""
        self._rules.send(frames)
        self.tick(now)

    def tick(self, now: float) -> None:
        self._wire.put_late(now)
        for envelope, frames in self._rules.outgoing(now):
            self._wire.put(None, envelope, frames, now)

    def next_wake(self) -> float:
        return min(self._rules.next_wake(), self._wire.next_late())

    def silent_for(self, now: float) -> float:
        """Seconds since the supervisor was last heard, or since this was made."""
        return now - self._rules.heard

    def backlog_bytes(self) -> int:
        return self._rules.session.backlog_bytes()

    def rejoin(self, now: float) -> None:
        """As a new incarnation; ClosedError after a final refusal."""
        self._rules.rejoin(now)
        self.tick(now)

    def close(self, linger_s: float = 0.0) -> None:
        self.socket.close(linger=int(linger_s * 1000))


def payload(parts: Sequence[zmq.Frame]) -> list[Frame]:
    """The first as bytes, for decoders; the rest as views of what has arrived."""
    return [parts[0].bytes, *(part.buffer for part in parts[1:])] if parts else []
