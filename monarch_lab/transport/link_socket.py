"""What both ends of a link ask of their socket."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeAlias

import zmq

from monarch_lab.transport.faults import Faults
from monarch_lab.transport.frames import receive_frames, send_frames, share
from monarch_lab.wire.link import Envelope, Frame, LinkLimits, LinkTimes, pack_envelope

# Beyond what travels in a piece: the mark, and slack for zmq's own framing.
_SLACK_BYTES = 4096
Parts: TypeAlias = list[bytes | memoryview | zmq.Frame]


def configure_link(socket: zmq.Socket, limits: LinkLimits, times: LinkTimes) -> None:
    """Before bind or connect. The session holds what waits, so zmq need hold no more than is under way."""
    socket.setsockopt(zmq.SNDHWM, 2 * limits.window_messages)
    socket.setsockopt(zmq.RCVHWM, 2 * limits.window_messages)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, limits.piece_bytes + _SLACK_BYTES)
    socket.setsockopt(zmq.HANDSHAKE_IVL, int(times.handshake * 1000))
    # Without it a cut connection is tried again after ever longer pauses, by the system and for a quarter of an hour.
    socket.setsockopt(zmq.TCP_MAXRT, int(times.connection * 1000))
    socket.setsockopt(zmq.CONNECT_TIMEOUT, int(times.connection * 1000))


def is_tcp(address: str) -> bool:
    return address.startswith("tcp://")


class LinkSocket:
    """A socket of a link, with the faults that are asked for on its way."""

    def __init__(self, socket: zmq.Socket, end: str, faults: Faults) -> None:
        self.zmq = socket
        self.undelivered = 0  # not taken by zmq, for want of a connection or of room: a resend each
        self._sends = faults.at(f"{end}.send", _shorten_sent)
        self._receives = faults.at(f"{end}.receive", _shorten_received)

    def receive(self, most: int, now: float) -> Iterator[list[zmq.Frame]]:
        """What has come, at most so many messages."""
        if self._receives is not None:
            yield from self._receives.due(now)
        for _ in range(most):
            try:
                parts = receive_frames(self.zmq, wait=False)
            except zmq.Again:
                return
            if self._receives is None:
                yield parts
            else:
                yield from self._receives.pass_on(parts, now)

    def put(self, route: bytes | None, envelope: Envelope, frames: Sequence[Frame], now: float) -> None:
        """On the wire, if it takes it now; else it costs a resend."""
        parts = [pack_envelope(envelope, frames), *map(share, frames)]
        if route is not None:
            parts.insert(0, route)
        if self._sends is None:
            self._send(parts)
            return
        for message in self._sends.pass_on(parts, now):
            self._send(message)

    def put_late(self, now: float) -> None:
        if self._sends is not None:
            for message in self._sends.due(now):
                self._send(message)

    def next_late(self) -> float:
        return float("inf") if self._sends is None else self._sends.next_due()

    def _send(self, parts: Parts) -> None:
        try:
            send_frames(self.zmq, parts)
        except zmq.ZMQError as e:
            if e.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            self.undelivered += 1


def _shorten_sent(parts: Parts) -> Parts:
    """Without its last frame, or what comes close for the shortest."""
    return parts[:-1] if len(parts) > 2 else [*parts[:-1], b""]


def _shorten_received(parts: list[zmq.Frame]) -> list[zmq.Frame]:
    return parts[:-1] if len(parts) > 1 else [zmq.Frame(parts[0].bytes[:-1])]
