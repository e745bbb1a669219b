"""What both ends of a link ask of their socket."""

from __future__ import annotations

from collections.abc import Sequence

import zmq

from monarch_lab.transport.frames import send_frames, share
from monarch_lab.wire.link import Envelope, Frame, LinkLimits, LinkTimes, pack_envelope

# Beyond what travels in a piece: the mark, and slack for zmq's own framing.
_SLACK_BYTES = 4096


def is_tcp(address: str) -> bool:
    return address.startswith("tcp://")


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


def put(socket: zmq.Socket, route: bytes | None, envelope: Envelope, frames: Sequence[Frame]) -> bool:
    """On the wire, if it takes it now; else False, which costs a resend."""
    parts = [pack_envelope(envelope), *map(share, frames)]
    try:
        send_frames(socket, parts if route is None else [route, *parts])
    except zmq.Again:
        return False
    except zmq.ZMQError as e:
        if e.errno in (zmq.EHOSTUNREACH, zmq.EAGAIN):
            return False
        raise
    return True
