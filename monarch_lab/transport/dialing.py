"""The rules of an agent's end of the link: call until answered, join, be refused, begin anew. Pure."""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Callable, Sequence
from enum import Enum, auto

from monarch_lab.errors import ClosedError, ProtocolError
from monarch_lab.transport.events import Joined, LinkEvent, Received, Refused
from monarch_lab.transport.keys import Invitation
from monarch_lab.wire.codec import encode
from monarch_lab.wire.link import (
    HELLO_BYTES,
    Envelope,
    Frame,
    Kind,
    LinkHello,
    Versions,
    decode_refused,
    decode_welcome,
)
from monarch_lab.wire.session import Session


class DialState(Enum):
    CALLING = auto()  # the hello is sent again until it is answered
    WELCOMED = auto()  # speaks, and goes on saying hello until the supervisor has spoken too
    JOINED = auto()
    REFUSED = auto()  # this incarnation is over
    ENDED = auto()  # and no other may follow


class Dialing:
    def __init__(
        self,
        invitation: Invitation,
        versions: Versions,
        pid: int,
        hostname: str,
        now: float,
        make_number: Callable[[], int] = lambda: secrets.randbits(63) + 1,
    ) -> None:
        self._invitation = invitation
        hello = LinkHello(
            invitation.key,
            invitation.peer,
            versions.python,
            versions.torch,
            versions.monarch_lab,
            pid,
            hostname,
        )
        self._hello = encode(hello)
        if len(self._hello) > HELLO_BYTES:
            raise ProtocolError(f"a hello of {len(self._hello)} bytes would not be read")
        self._make_number = make_number
        self.heard = now
        self._begin(now)

    @property
    def incarnation(self) -> int:
        return self.session.own

    def _begin(self, now: float) -> None:
        invitation = self._invitation
        self.state = DialState.CALLING
        self.session = Session(invitation.mesh, self._make_number(), 0, invitation.times, invitation.limits, now)
        self._hello_at = now
        self._hello_pause = invitation.times.ack  # the first may find no connection yet

    def rejoin(self, now: float) -> None:
        """A new incarnation: what the old one had sent and not delivered is gone."""
        if self.state is DialState.ENDED:
            raise ClosedError("the supervisor has refused this host for good")
        self._begin(now)

    def send(self, frames: Sequence[Frame]) -> None:
        if self.state in (DialState.REFUSED, DialState.ENDED):
            raise ClosedError("the supervisor has refused this host")
        self.session.send(frames)

    def handle(self, envelope: Envelope, frames: list[Frame], now: float) -> list[LinkEvent]:
        """ProtocolError for what is not from the supervisor, or not for this incarnation; it changed nothing."""
        if envelope.mesh != self._invitation.mesh or envelope.receiver != self.incarnation:
            raise ProtocolError("a message of another mesh or incarnation")
        if self.state in (DialState.REFUSED, DialState.ENDED):
            return []
        match envelope.kind:
            case Kind.WELCOME:
                return self._take_welcome(envelope, frames, now)
            case Kind.REFUSED:
                refused = decode_refused(_only(frames))
                self.state = DialState.ENDED if refused.final else DialState.REFUSED
                return [Refused(refused.reason, refused.final)]
            case Kind.HELLO:
                raise ProtocolError("the supervisor says hello")
        if self.state is DialState.CALLING:
            raise ProtocolError("a message before the welcome")
        messages = self.session.receive(envelope, frames, now)
        self.state = DialState.JOINED
        self.heard = now
        return [Received(0, message) for message in messages]

    def outgoing(self, now: float) -> list[tuple[Envelope, Sequence[Frame]]]:
        if self.state in (DialState.REFUSED, DialState.ENDED):
            return []
        out = self.session.outgoing(now)
        if self.state is not DialState.JOINED and now >= self._hello_at:
            self._hello_at = now + self._hello_pause
            self._hello_pause = min(2 * self._hello_pause, self._invitation.times.resend_at_most)
            out.append((Envelope(Kind.HELLO, self._invitation.mesh, self.incarnation, 0), [self._hello]))
        return out

    def next_wake(self) -> float:
        match self.state:
            case DialState.JOINED:
                return self.session.next_wake()
            case DialState.CALLING | DialState.WELCOMED:
                return min(self._hello_at, self.session.next_wake())
        return float("inf")

    def _take_welcome(self, envelope: Envelope, frames: list[Frame], now: float) -> list[LinkEvent]:
        welcome = decode_welcome(_only(frames))
        if not hmac.compare_digest(welcome.key, self._invitation.key) or not envelope.sender:
            raise ProtocolError("a welcome without the mesh's key")
        if self.state is DialState.JOINED:
            return []
        # Until it has spoken under a number the supervisor may forget it, for a late hello of another incarnation.
        self.session.meet(envelope.sender)
        if self.state is DialState.WELCOMED:
            return []
        self._hello_at = now + self._invitation.times.resend
        self.state = DialState.WELCOMED
        self.heard = now
        return [Joined(0, envelope.sender, welcome)]


def _only(frames: list[Frame]) -> Frame:
    if len(frames) != 1 or len(frames[0]) > HELLO_BYTES:
        raise ProtocolError("a message of the handshake is one short frame")
    return frames[0]
