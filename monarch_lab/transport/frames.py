"""Messages of several frames that a KeyboardInterrupt cannot cut in two.

A message half sent would be completed by the next one, and half received would be taken for two. Python's signal
handlers run between bytecodes and inside every call of pyzmq, so SIGINT is held back while a message passes; what can
be interrupted is the wait for one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import zmq

from monarch_lab.errors import UsageValueError
from monarch_lab.transport.held_interrupt import HeldInterrupt as HeldInterrupt

# One frame. zmq drops what exceeds ZMQ_MAXMSGSIZE without telling anyone, so it is checked before sending.
MAX_FRAME_BYTES = 8 << 30
_COPIED_BELOW = 1 << 16
_LAST = int(zmq.DONTWAIT)
_MORE = int(zmq.DONTWAIT | zmq.SNDMORE)


def configure(socket: zmq.Socket, linger_s: float) -> None:
    """Before bind or connect: no limit on queued messages (nothing is dropped), a limit on a frame."""
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.LINGER, int(linger_s * 1000))
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)


def share(frame: bytes | memoryview | zmq.Frame) -> bytes | memoryview | zmq.Frame:
    """A large frame made ready to be sent to several peers without being copied. Do not write to it afterwards."""
    if isinstance(frame, zmq.Frame):
        return frame
    size = len(frame) if isinstance(frame, bytes) else memoryview(frame).nbytes
    if size > MAX_FRAME_BYTES:
        raise UsageValueError(f"{size} bytes in one piece is more than the {MAX_FRAME_BYTES} that can be sent")
    if size < _COPIED_BELOW:
        return frame
    return zmq.Frame(frame, copy=False)


def send_frames(socket: zmq.Socket, frames: Sequence[bytes | memoryview | zmq.Frame]) -> None:
    """Send one message. What went through ``share`` is not copied."""
    with HeldInterrupt():
        for frame in frames[:-1]:
            socket.send(frame, _MORE, copy=not isinstance(frame, zmq.Frame))
        socket.send(frames[-1], _LAST, copy=not isinstance(frames[-1], zmq.Frame))


def receive_frames(socket: zmq.Socket, wait: bool = True) -> list[zmq.Frame]:
    """The next message. ``wait=False``: raises zmq.Again when there is none."""
    while True:
        try:
            with HeldInterrupt():
                frames = [socket.recv(zmq.DONTWAIT, copy=False)]
                while frames[-1].more:
                    frames.append(socket.recv(zmq.DONTWAIT, copy=False))
                return frames
        except zmq.Again:
            if not wait:
                raise
        socket.poll()


def is_readable(socket: zmq.Socket) -> bool:
    """Whether a message is there; without waiting."""
    return bool(int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)


def poll_ms(seconds: float) -> int:
    """For zmq's polls: rounded up, so that a deadline is not spun at; never negative, which would be for ever."""
    return max(0, math.ceil(seconds * 1000))
