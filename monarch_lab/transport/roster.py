"""Who may join, who has, who is fenced: the rules of the supervisor's end. Pure: messages and times in, actions out.

A peer joins in three steps: its hello with the mesh's key; our welcome with a number made for it; a frame that names
this number. So a hello that is late, or sent again by somebody who saw it, brings nobody in. The number then stands
for the key: whoever does not know it is a stranger, whatever connection it comes by.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from monarch_lab.errors import ClosedError, ProtocolError
from monarch_lab.transport.events import Fenced, Joined, LinkEvent, Received
from monarch_lab.wire.codec import encode
from monarch_lab.wire.link import (
    HELLO_BYTES,
    VERSION,
    Envelope,
    Frame,
    Kind,
    LinkHello,
    LinkLimits,
    LinkRefused,
    LinkTimes,
    LinkWelcome,
    Versions,
    decode_hello,
    explain_difference,
)
from monarch_lab.wire.session import Session

# All are remembered, so that none comes back; a peer that needs more is broken.
_MOST_FENCED = 64


@dataclass(frozen=True, slots=True)
class Reply:
    route: bytes
    envelope: Envelope
    frames: Sequence[Frame]


@dataclass(frozen=True, slots=True)
class Stranger:
    """Dropped without an answer; count it."""

    reason: str


Action: TypeAlias = LinkEvent | Reply | Stranger


@dataclass(frozen=True, slots=True)
class Verdict:
    reason: str
    final: bool


@dataclass(slots=True)
class _Call:
    """A hello that is waiting for its confirmation, or was confirmed."""

    hello: LinkHello
    incarnation: int
    token: int
    route: bytes


@dataclass(slots=True)
class Peer:
    number: int
    pending: _Call | None = None
    current: _Call | None = None
    session: Session | None = None
    heard: float = float("-inf")
    fenced: dict[int, Verdict] = field(default_factory=dict)  # by incarnation
    barred: Verdict | None = None

    def verdict(self, incarnation: int) -> Verdict | None:
        return self.barred or self.fenced.get(incarnation)

    def worn_out(self) -> Verdict | None:
        return Verdict(f"it was fenced {_MOST_FENCED} times", True) if len(self.fenced) >= _MOST_FENCED else None


class Roster:
    def __init__(
        self,
        mesh: bytes,
        key: bytes,
        welcome: LinkWelcome,
        times: LinkTimes,
        limits: LinkLimits,
        make_number: Callable[[], int] = lambda: secrets.randbits(63) + 1,
    ) -> None:
        self._mesh = mesh
        self._key = key
        self._welcome = encode(welcome)
        self._versions = Versions(welcome.python, welcome.torch, welcome.version)
        self._times = times
        self._limits = limits
        self._make_number = make_number
        self._peers: dict[int, Peer] = {}
        self._by_token: dict[int, tuple[Peer, int]] = {}  # token -> (peer, incarnation); of fenced ones too

    def expect(self, number: int) -> None:
        self._peers[number] = Peer(number)

    def peers(self) -> list[Peer]:
        return list(self._peers.values())

    def joined(self, number: int) -> Peer:
        """A peer with a session; ClosedError for any other."""
        peer = self._peers.get(number)
        if peer is None or peer.session is None:
            raise ClosedError(f"host {number} is not connected: it has not joined, or was given up")
        return peer

    def known(self, number: int) -> Peer | None:
        return self._peers.get(number)

    def fence(self, number: int, reason: str, final: bool) -> list[Action]:
        """Nothing is heard again of the incarnation that is joined; with ``final``, of the peer. It is told at once."""
        peer = self._peers[number]
        verdict = Verdict(reason, final)
        if final:
            peer.barred = verdict
        return self._end_current(peer, verdict)

    def revoke(self, number: int) -> None:
        """The invitation is void: nothing of the peer is known any more."""
        self._peers.pop(number, None)
        self._by_token = {token: found for token, found in self._by_token.items() if found[0].number != number}

    def handle(
        self, envelope: Envelope, frames: list[Frame], user: int | None, route: bytes, now: float
    ) -> list[Action]:
        """``user``: the peer that the transport has authenticated; None where it does not tell peers apart."""
        if envelope.mesh != self._mesh:
            return [Stranger("it belongs to another mesh")]
        match envelope.kind:
            case Kind.HELLO:
                return self._hello(envelope, frames, user, route)
            case Kind.DATA | Kind.PIECE | Kind.BARE:
                return self._frame(envelope, frames, user, route, now)
        return [Stranger("it speaks as if it were the supervisor")]

    # --- joining

    def _hello(self, envelope: Envelope, frames: list[Frame], user: int | None, route: bytes) -> list[Action]:
        if len(frames) != 1 or len(frames[0]) > HELLO_BYTES:
            return [Stranger("its hello is too long")]
        try:
            hello = decode_hello(frames[0])
        except ProtocolError:
            return [Stranger("it has not said hello")]
        if not hmac.compare_digest(hello.key, self._key):
            return [Stranger("it does not hold the mesh's key")]
        peer = self._peers.get(hello.peer)
        if peer is None or envelope.sender == 0 or user not in (None, hello.peer):
            return [Stranger(f"it is not invited as host {hello.peer}")]
        verdict = peer.verdict(envelope.sender) or peer.worn_out() or self._judge(envelope, hello)
        if verdict is not None:
            return [self._refuse(route, 0, envelope.sender, verdict)]
        call = peer.current
        if call is None or call.incarnation != envelope.sender:
            call = self._call(peer, hello, envelope.sender, route)
        return [self._reply(Kind.WELCOME, route, call.token, call.incarnation, self._welcome)]

    def _judge(self, envelope: Envelope, hello: LinkHello) -> Verdict | None:
        where = f"{hello.hostname} (pid {hello.pid})"
        if envelope.version != VERSION:
            return Verdict(
                f"the link is version {VERSION} here and {envelope.version} on {where}: install the same there", True
            )
        theirs = Versions(hello.python, hello.torch, hello.version)
        difference = explain_difference(self._versions, theirs, where)
        return Verdict(difference, True) if difference else None

    def _call(self, peer: Peer, hello: LinkHello, incarnation: int, route: bytes) -> _Call:
        if peer.pending is not None:
            if peer.pending.incarnation == incarnation:
                peer.pending.route = route
                return peer.pending
            del self._by_token[peer.pending.token]
        token = self._make_number()
        peer.pending = _Call(hello, incarnation, token, route)
        self._by_token[token] = (peer, incarnation)
        return peer.pending

    # --- frames of those who have joined

    def _frame(
        self, envelope: Envelope, frames: list[Frame], user: int | None, route: bytes, now: float
    ) -> list[Action]:
        peer, incarnation = self._by_token.get(envelope.receiver, (None, 0))
        if (
            peer is None
            or incarnation != envelope.sender
            or user not in (None, peer.number)
            or envelope.version != VERSION
        ):
            return [Stranger("it has not said hello")]
        if (verdict := peer.verdict(incarnation)) is not None:
            return [self._refuse(route, envelope.receiver, incarnation, verdict)]
        actions: list[Action] = []
        if peer.pending is not None and peer.pending.token == envelope.receiver:
            actions += self._join(peer, now)
        assert peer.current is not None and peer.session is not None
        peer.current.route = route
        peer.heard = now
        try:
            messages = peer.session.receive(envelope, frames, now)
        except ProtocolError as e:
            reason = f"it broke the protocol: {e}"
            return [*actions, *self.fence(peer.number, reason, True), Fenced(peer.number, incarnation, reason)]
        return [*actions, *(Received(peer.number, message) for message in messages)]

    def _join(self, peer: Peer, now: float) -> list[Action]:
        call, peer.pending = peer.pending, None
        assert call is not None
        actions: list[Action] = []
        if peer.current is not None:
            old = peer.current.incarnation
            reason = f"process {call.hello.pid} on {call.hello.hostname} has joined in its place"
            # Final: two processes that hold one invitation would else take turns.
            actions += [*self._end_current(peer, Verdict(reason, True)), Fenced(peer.number, old, reason)]
        peer.current = call
        peer.session = Session(self._mesh, call.token, call.incarnation, self._times, self._limits, now)
        actions.append(Joined(peer.number, call.incarnation, call.hello))
        return actions

    def _end_current(self, peer: Peer, verdict: Verdict) -> list[Action]:
        call = peer.current
        if call is None:
            return []
        peer.fenced[call.incarnation] = verdict
        peer.current = peer.session = None
        return [self._refuse(call.route, call.token, call.incarnation, verdict)]

    # --- answers

    def _reply(self, kind: Kind, route: bytes, token: int, incarnation: int, body: bytes) -> Reply:
        return Reply(route, Envelope(kind, self._mesh, token, incarnation), [body])

    def _refuse(self, route: bytes, token: int, incarnation: int, verdict: Verdict) -> Reply:
        return self._reply(Kind.REFUSED, route, token, incarnation, encode(LinkRefused(verdict.reason, verdict.final)))
