"""Frames between an agent and a process it started, over a Unix socket in the agent's private directory.

A stream socket and not zmq: what a process has sent is in the system's hands before ``send`` returns, so that its
letters outlive it however it ends, and the agent reads them before it tells the end.
"""

from __future__ import annotations

import os
import socket
import struct
from collections import deque
from enum import IntEnum

from monarch_lab.errors import ProtocolError

KEY_NAME = "key"
SOCKET_NAME = "processes"
_HEAD = struct.Struct("!BQ")
_NUMBER = struct.Struct("!Q")
_READ_BYTES = 1 << 18
HELLO_BYTES = 4096


class Kind(IntEnum):
    HELLO = 1  # process to agent: a ChildHello
    WELCOME = 2  # agent to process: the key
    CALL = 3  # agent to process: the FunctionCall it runs
    LETTER = 4  # both ways
    TOOK = 5  # process to agent: so many bytes of letters were read
    CREDIT = 6  # agent to process: so many bytes of its letters were read


def pack_frame(kind: Kind, body: bytes) -> bytes:
    return _HEAD.pack(kind, len(body)) + body


def pack_number(kind: Kind, number: int) -> bytes:
    return pack_frame(kind, _NUMBER.pack(number))


def number_of(body: bytes) -> int:
    if len(body) != _NUMBER.size:
        raise ProtocolError(f"a number of {len(body)} bytes")
    return int(_NUMBER.unpack(body)[0])


class FrameReader:
    """Cuts a stream into (kind, body); one longer than ``largest`` is a ProtocolError before it is read."""

    def __init__(self, largest: int) -> None:
        self.largest = largest
        self._data = bytearray()

    def feed(self, data: bytes) -> None:
        self._data += data

    def next(self) -> tuple[Kind, bytes] | None:
        if len(self._data) < _HEAD.size:
            return None
        number, length = _HEAD.unpack_from(self._data)
        if number not in _KINDS:
            raise ProtocolError(f"a frame of kind {number}")
        if length > self.largest:
            raise ProtocolError(f"a frame of {length} bytes is announced, more than {self.largest}")
        end = _HEAD.size + length
        if len(self._data) < end:
            return None
        with memoryview(self._data) as view:
            body = bytes(view[_HEAD.size : end])
        del self._data[:end]
        return _KINDS[number], body


_KINDS = {int(kind): kind for kind in Kind}


class Connection:
    """The agent's end of one: never blocks, keeps what the other side does not take."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._socket = sock
        self.fd = sock.fileno()
        self.reader = FrameReader(HELLO_BYTES)
        self._outgoing: deque[memoryview] = deque()

    @property
    def wants_to_write(self) -> bool:
        return bool(self._outgoing)

    def read(self) -> bool:
        """Feed the reader with what is there, up to a round's worth; False at the end of the stream."""
        try:
            data = self._socket.recv(_READ_BYTES)
        except BlockingIOError:
            return True
        except OSError:
            return False
        self.reader.feed(data)
        return bool(data)

    def has_more(self) -> bool:
        """Whether there is something to read: for one whose process has ended, what it sent last."""
        try:
            return bool(self._socket.recv(1, socket.MSG_PEEK))
        except OSError:
            return False

    def write(self, frame: bytes) -> None:
        self._outgoing.append(memoryview(frame))
        self.flush()

    def flush(self) -> None:
        """A connection that is broken is seen by ``read``."""
        while self._outgoing:
            try:
                sent = self._socket.send(self._outgoing[0])
            except BlockingIOError:
                return
            except OSError:
                self._outgoing.clear()
                return
            if sent < len(self._outgoing[0]):
                self._outgoing[0] = self._outgoing[0][sent:]
                return
            self._outgoing.popleft()

    def close(self) -> None:
        self._socket.close()


def user_of_peer(sock: socket.socket) -> int | None:
    """The user at the other end; None where the system does not say."""
    if not hasattr(socket, "SO_PEERCRED"):
        return None
    _, user, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return int(user)


def listen(directory: str, key: bytes) -> socket.socket:
    """Bind in the agent's private directory, and leave the key there for the processes it starts."""
    fd = os.open(os.path.join(directory, KEY_NAME), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(key)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.bind(os.path.join(directory, SOCKET_NAME))
    sock.listen(128)
    sock.setblocking(False)
    return sock


def pipe_address(directory: str) -> str:
    """What a process finds in SUPERVISOR_PIPE."""
    return f"ipc://{os.path.join(directory, SOCKET_NAME)}"


def connect(pipe: str) -> tuple[socket.socket, bytes]:
    """(socket, key) of the agent whose ``pipe_address`` it is. OSError when it is gone, or is another user's."""
    path = pipe.removeprefix("ipc://")
    with open(os.path.join(os.path.dirname(path), KEY_NAME), "rb") as file:
        key = file.read()
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.connect(path)
    except BaseException:
        sock.close()
        raise
    return sock, key
