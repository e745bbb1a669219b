"""The supervisor's end of the links to its hosts' agents: one socket for all, driven by the owner's loop.

Runs on: the thread that owns it. It never blocks: what the socket does not take now is sent again later. The rules
are in roster.py.
"""

from __future__ import annotations

import logging
import os
import platform as python_platform
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType

import zmq

from monarch_lab.errors import ProtocolError, UsageValueError
from monarch_lab.transport.complaints import Complaints
from monarch_lab.transport.curve import Gatekeeper, as_server, user_of
from monarch_lab.transport.dialer import payload
from monarch_lab.transport.directory import bind_private
from monarch_lab.transport.events import Fenced, Joined, LinkEvent, Received, Refused
from monarch_lab.transport.faults import NO_FAULTS, Faults
from monarch_lab.transport.keys import KEY_BYTES, Invitation, make_pair
from monarch_lab.transport.link_socket import LinkSocket, configure_link, is_tcp
from monarch_lab.transport.roster import Action, Peer, Reply, Roster, Stranger
from monarch_lab.wire.link import Frame, LinkLimits, LinkTimes, LinkWelcome, Versions, unpack_envelope

log = logging.getLogger(__name__)
_MESSAGES_A_ROUND = 1024
_NOBODY = 0  # the number of no peer


@dataclass(slots=True)
class LinkStats:
    frames_in: int = 0
    frames_out: int = 0
    undelivered: int = 0  # not taken by the socket, for want of a connection or of room
    resends: int = 0
    duplicates: int = 0
    strangers: int = 0
    refused_keys: int = 0


class Hub:
    """``socket`` goes into the owner's poller; ``read`` when it is readable, ``tick`` at ``next_wake``.

    ``address``: "ipc://..." in a directory of mode 0700, or "tcp://HOST:*"; ``open`` makes it the one that was bound.
    """

    def __init__(
        self,
        context: zmq.Context,
        *,
        mesh: bytes,
        address: str,
        times: LinkTimes,
        limits: LinkLimits,
        versions: Versions,
        faults: Faults = NO_FAULTS,
    ) -> None:
        self.address = address
        self._context = context
        self._mesh = mesh
        self._times = times
        self._limits = limits
        self._key = secrets.token_bytes(KEY_BYTES)
        welcome = LinkWelcome(
            self._key, versions.python, versions.torch, versions.monarch_lab, os.getpid(), python_platform.node()
        )
        self._roster = Roster(mesh, self._key, welcome, times, limits)
        self._numbers = 0
        self._pair = make_pair() if is_tcp(address) else None
        self._gatekeeper = Gatekeeper(context) if is_tcp(address) else None
        self._public: dict[int, bytes] = {}  # of invited peers
        self._complaints = Complaints()
        self._frames_in = self._frames_out = 0
        self._now = 0.0  # of the last call that told it
        self._resends = self._duplicates = 0  # of sessions that are over
        self.socket: zmq.Socket = context.socket(zmq.ROUTER)
        self._wire = LinkSocket(self.socket, "hub", faults)

    def __enter__(self) -> Hub:
        self.open()
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def open(self) -> None:
        """Bind; on TCP, start the gatekeeper. UsageError where libzmq has no CURVE; nothing is left then."""
        try:
            configure_link(self.socket, self._limits, self._times)
            # A peer that is gone is an error of the send, which the session makes good, and not a silent loss.
            self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
            if self._gatekeeper is not None:
                assert self._pair is not None
                self._gatekeeper.start()
                as_server(self.socket, self._pair, self._times.handshake)
                self.socket.bind(self.address)
            elif self.address.startswith("ipc://"):
                bind_private(self.socket, self.address)
            else:
                raise UsageValueError(f'a hub listens at "ipc://..." or "tcp://HOST:*", not at {self.address!r}')
            self.address = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)
        except BaseException:
            self.close()
            raise

    def invite(self, address: str | None = None) -> Invitation:
        """A new peer may join. ``address``: where it finds us, when that is not where we listen (forwarded sockets).

        On TCP its keys are its own; hand it over by a channel that nobody else reads.
        """
        self._numbers += 1
        number = self._numbers
        self._roster.expect(number)
        own = None
        if self._gatekeeper is not None:
            own = make_pair()
            self._public[number] = own.public
            self._gatekeeper.allow(own.public, b"%d" % number)
        return Invitation(
            address=address or self.address,
            mesh=self._mesh,
            key=self._key,
            peer=number,
            times=self._times,
            limits=self._limits,
            server=self._pair.public if self._pair is not None else None,
            own=own,
        )

    def read(self, now: float) -> list[LinkEvent]:
        """What has come, up to a round's worth."""
        self._now = now
        events: list[LinkEvent] = []
        heard: set[int] = set()
        for parts in self._wire.receive(_MESSAGES_A_ROUND, now):
            self._frames_in += 1
            for action in self._handle(parts, now):
                match action:
                    case Reply():
                        self._put(action, now)
                    case Stranger(reason):
                        self._complain(parts[0].bytes, reason, now)
                    case Joined() | Received() | Fenced() | Refused():
                        events.append(action)
            if (number := self._user(parts)) is not None:
                heard.add(number)
        # Acks have made room, and what was heard wants one; without User-Ids it is simplest to ask everyone.
        self._flush(self._roster.peers() if self._gatekeeper is None else self._known(heard), now)
        return events

    def send(self, peer: int, frames: Sequence[Frame], now: float) -> None:
        """ClosedError (not joined), PayloadTooLarge or BacklogError: the message was not taken."""
        found = self._roster.joined(peer)
        assert found.session is not None
        found.session.send(frames)
        self._flush([found], now)

    def fence(self, peer: int, reason: str, final: bool) -> None:
        """Its incarnation is never heard again, and is told so when it speaks; ``final``: nor is any other."""
        self._note_session(self._roster.known(peer))
        for action in self._roster.fence(peer, reason, final):
            if isinstance(action, Reply):
                self._put(action, self._now)

    def revoke(self, peer: int) -> None:
        """Its invitation is void: it is a stranger from now on, and on TCP its key opens nothing."""
        self._note_session(self._roster.known(peer))
        self._roster.revoke(peer)
        public = self._public.pop(peer, None)
        if self._gatekeeper is not None and public is not None:
            self._gatekeeper.strike(public)

    def tick(self, now: float) -> None:
        self._wire.put_late(now)
        self._flush(self._roster.peers(), now)

    def next_wake(self) -> float:
        wakes = [peer.session.next_wake() for peer in self._roster.peers() if peer.session is not None]
        return min([self._wire.next_late(), *wakes])

    def silent_for(self, peer: int, now: float) -> float:
        """Seconds since its last authenticated message; infinity before the first."""
        found = self._roster.known(peer)
        return float("inf") if found is None else now - found.heard

    def backlog_bytes(self, peer: int) -> int:
        """What was sent to it and is not acknowledged."""
        session = self._roster.joined(peer).session
        assert session is not None
        return session.backlog_bytes()

    def stats(self) -> LinkStats:
        sessions = [peer.session for peer in self._roster.peers() if peer.session is not None]
        return LinkStats(
            frames_in=self._frames_in,
            frames_out=self._frames_out,
            undelivered=self._wire.undelivered,
            resends=self._resends + sum(session.resends for session in sessions),
            duplicates=self._duplicates + sum(session.duplicates for session in sessions),
            strangers=self._complaints.count,
            refused_keys=0 if self._gatekeeper is None else self._gatekeeper.refused,
        )

    def close(self) -> None:
        self.socket.close(linger=0)
        if self._gatekeeper is not None:
            self._gatekeeper.close()

    # --- what the rules ask for

    def _handle(self, parts: list[zmq.Frame], now: float) -> list[Action]:
        if len(parts) < 2:
            return [Stranger("it has not said hello")]
        frames = payload(parts[2:])
        try:
            envelope = unpack_envelope(parts[1].buffer, frames)
        except ProtocolError as e:
            return [Stranger(str(e))]
        return self._roster.handle(envelope, frames, self._user(parts), parts[0].bytes, now)

    def _user(self, parts: list[zmq.Frame]) -> int | None:
        if self._gatekeeper is None:
            return None
        user = user_of(parts[-1])
        return int(user) if user is not None and user.isdigit() else _NOBODY

    def _known(self, numbers: Iterable[int]) -> list[Peer]:
        return [peer for number in numbers if (peer := self._roster.known(number)) is not None]

    def _flush(self, peers: Iterable[Peer], now: float) -> None:
        for peer in peers:
            if peer.session is not None and peer.current is not None:
                for envelope, frames in peer.session.outgoing(now):
                    self._put(Reply(peer.current.route, envelope, frames), now)

    def _put(self, reply: Reply, now: float) -> None:
        self._frames_out += 1
        self._wire.put(reply.route, reply.envelope, reply.frames, now)

    def _note_session(self, peer: Peer | None) -> None:
        if peer is not None and peer.session is not None:
            self._resends += peer.session.resends
            self._duplicates += peer.session.duplicates

    def _complain(self, route: bytes, reason: str, now: float) -> None:
        if (line := self._complaints.note(route, reason, now)) is not None:
            log.warning("%s", line)
