"""Length-prefixed messages over a pipe or socket pair: four bytes, big-endian, then the message."""

from __future__ import annotations

import os
import struct

from monarch_lab.errors import ProtocolError

_LENGTH = struct.Struct("!I")
MAX_BYTES = 16 << 20


def pack(message: bytes) -> bytes:
    if len(message) > MAX_BYTES:
        raise ProtocolError(f"a message of {len(message)} bytes is longer than {MAX_BYTES}")
    return _LENGTH.pack(len(message)) + message


def write_message(fd: int, message: bytes) -> None:
    """Blocks until all is written; BrokenPipeError when the reader is gone."""
    data = memoryview(pack(message))
    while data:
        data = data[os.write(fd, data) :]


def read_message(fd: int) -> bytes | None:
    """The next message, blocking; None at the end of the stream."""
    head = _read_exactly(fd, _LENGTH.size)
    if head is None:
        return None
    (length,) = _LENGTH.unpack(head)
    if length > MAX_BYTES:
        raise ProtocolError(f"a message of {length} bytes is announced, longer than {MAX_BYTES}")
    return _read_exactly(fd, length)


def _read_exactly(fd: int, count: int) -> bytes | None:
    data = bytearray()
    while len(data) < count:
        more = os.read(fd, count - len(data))
        if not more:
            return None
        data += more
    return bytes(data)


class MessageReader:
    """Cuts what a poll loop reads into messages; ``feed`` never blocks and keeps an unfinished one."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        self._data += data
        messages = []
        while len(self._data) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._data)
            if length > MAX_BYTES:
                raise ProtocolError(f"a message of {length} bytes is announced, longer than {MAX_BYTES}")
            end = _LENGTH.size + length
            if len(self._data) < end:
                break
            messages.append(bytes(self._data[_LENGTH.size : end]))
            del self._data[:end]
        return messages
