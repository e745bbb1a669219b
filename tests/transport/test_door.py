from __future__ import annotations

import logging
import os
from collections.abc import Iterator

import pytest
import zmq

from monarch_lab.errors import ProtocolError, UsageError
from monarch_lab.transport import curve
from monarch_lab.transport.directory import address, make_directory, remove_directory
from monarch_lab.transport.door import Door, show_keys
from monarch_lab.transport.keys import make_pair
from monarch_lab.wire.keys import CurveKeys

KEY = os.urandom(31) + b"\0"  # any bytes
PATIENCE_MS = 30_000


class Room:
    """A door with one ROUTER behind it."""

    def __init__(self, where: str) -> None:
        self.context = zmq.Context()
        self.door = Door(self.context, KEY, 5.0)
        self.door.open()
        self.server = self.context.socket(zmq.ROUTER)
        self.where = self.door.bind(self.server, where)

    def knock(self, key: bytes, keys: CurveKeys | None, identity: bytes) -> zmq.Socket:
        socket = self.context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.IDENTITY, identity)
        show_keys(socket, self.where, key, keys)
        socket.connect(self.where)
        socket.send(b"hello")
        return socket

    def hear(self) -> list[zmq.Frame]:
        assert self.server.poll(PATIENCE_MS)
        return self.server.recv_multipart(copy=False)


@pytest.fixture
def room(request: pytest.FixtureRequest) -> Iterator[Room]:
    path = make_directory()
    made = Room(address(path, "room") if request.param == "unix" else "tcp://127.0.0.1:*")
    yield made
    made.server.close(linger=0)
    made.door.close()
    made.context.destroy(linger=0)
    remove_directory(path)


@pytest.mark.parametrize("room", ["unix"], indirect=True)
def test_a_unix_socket_opens_to_the_key_and_to_nothing_else(room: Room, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        wrong = [room.knock(os.urandom(32), None, b"w%d" % n) for n in range(5)]
        bare = room.context.socket(zmq.DEALER)
        bare.setsockopt(zmq.LINGER, 0)
        bare.connect(room.where)
        bare.send(b"hello")
        subscriber = room.context.socket(zmq.SUB)
        subscriber.connect(room.where)
        right = room.knock(KEY, None, b"w9")
        frames = room.hear()
        while room.door.refused < 5:
            room.server.poll(10)
    assert frames[0].bytes == b"w9" and room.door.is_from(frames[1], b"w9")
    assert not room.server.poll(0)
    assert len([r for r in caplog.records if "holds no key" in r.getMessage()]) == 1
    assert room.door.make_keys(b"w1") is None
    for socket in (*wrong, bare, subscriber, right):
        socket.close()


@pytest.mark.parametrize("room", ["tcp"], indirect=True)
def test_a_tcp_socket_opens_to_listed_keys_each_for_its_own_peer(room: Room) -> None:
    keys = room.door.make_keys(b"w1")
    assert keys is not None
    socket = room.knock(KEY, keys, b"w1")
    frames = room.hear()
    assert room.door.is_from(frames[1], b"w1") and not room.door.is_from(frames[1], b"w2")
    impostor = room.knock(KEY, keys, b"w2")
    frames = room.hear()
    assert frames[0].bytes == b"w2" and not room.door.is_from(frames[1], b"w2")
    room.door.strike(b"w1")
    late = [room.knock(KEY, keys, b"w3"), room.knock(KEY, CurveKeys(keys.server, make_pair()), b"w4")]
    while room.door.refused < 2:
        room.server.poll(10)
    assert not room.server.poll(0)
    fresh = room.door.make_keys(b"w2")
    again = room.knock(KEY, fresh, b"w5")
    assert room.door.is_from(room.hear()[1], b"w2")
    room.door.strike(b"nobody")
    for one in (socket, impostor, again, *late):
        one.close()


def test_tcp_without_curve_and_without_keys_is_refused_here(monkeypatch: pytest.MonkeyPatch) -> None:
    context = zmq.Context()
    door, socket = Door(context, KEY, 5.0), context.socket(zmq.DEALER)
    with pytest.raises(ProtocolError, match="there are no keys for it"):
        show_keys(socket, "tcp://127.0.0.1:1", KEY, None)
    monkeypatch.setattr(curve.zmq, "has", lambda _: False)
    with pytest.raises(UsageError, match="socket_type"):
        door.bind(socket, "tcp://127.0.0.1:*")
    door.close()
    context.destroy(linger=0)
