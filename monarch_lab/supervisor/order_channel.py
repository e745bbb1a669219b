"""The socket on which a mesh's orders go out, and on which its workers' subscriptions come in.

Any thread sends; the supervisor's I/O thread takes the subscriptions. One lock guards the socket: any use of a zmq
socket may swallow the edge its descriptor gives, so whoever sends says whether subscriptions wait.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import zmq

from monarch_lab.transport.door import Door
from monarch_lab.transport.frames import configure, is_readable, receive_frames, send_frames

# What comes in are handshakes, and subscriptions by the names of ranks.
_LONGEST_TOPIC = 1024


class OrderChannel:
    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards _socket
        self._socket: zmq.Socket | None = None

    def open(self, context: zmq.Context, door: Door, address: str) -> str:
        """Bind; the address that workers connect to."""
        socket = context.socket(zmq.XPUB)
        configure(socket, 0)
        # Each subscription is told, also one to a topic whose last subscriber's end was not noticed yet.
        socket.setsockopt(zmq.XPUB_VERBOSE, 1)
        socket.setsockopt(zmq.MAXMSGSIZE, _LONGEST_TOPIC)
        bound = door.bind(socket, address)
        self.fd = socket.getsockopt(zmq.FD)
        self._socket = socket
        return bound

    def send(self, messages: Sequence[Sequence[bytes | memoryview | zmq.Frame]]) -> bool | None:
        """Each with its topic first. Never blocks: nothing limits the queue.

        Whether subscriptions wait to be taken; None where it is closed.
        """
        with self._lock:
            if self._socket is None:
                return None
            for message in messages:
                send_frames(self._socket, message)
            return is_readable(self._socket)

    def take_subscriptions(self) -> list[bytes]:
        """The topics that were subscribed to since."""
        names = []
        with self._lock:
            while self._socket is not None and is_readable(self._socket):
                frame = receive_frames(self._socket, wait=False)[0].bytes
                if frame[:1] == b"\1":
                    names.append(frame[1:])
        return names

    def close(self) -> None:
        with self._lock:
            if self._socket is not None:
                self._socket.close(linger=0)
            self._socket = None
