"""Strangers of this user at the socket where an agent hears the processes it started."""

from __future__ import annotations

import logging
import os
import random
import select
import socket
import threading
from pathlib import Path

import pytest

from monarch_lab.agent.relay import _MAX_STRANGERS, Relay
from monarch_lab.transport.child_link import SOCKET_NAME, Kind, pack_frame
from monarch_lab.transport.directory import make_directory, remove_directory
from monarch_lab.wire.codec import encode
from monarch_lab.wire.hosts import ChildHello
from tests.fuzz.inputs import damaged, frames_of_a_process

KEY = b"k" * 32


class Room:
    def __init__(self) -> None:
        self.heard: list[tuple[int, Kind, bytes]] = []
        self.path = make_directory()
        self.relay = Relay(self.path, KEY, 1 << 20, {1}, lambda *frame: self.heard.append(frame))

    def connect(self) -> socket.socket:
        made = socket.socket(socket.AF_UNIX)
        made.connect(str(Path(self.path) / SOCKET_NAME))
        return made

    def turn(self) -> None:
        """One round of the agent's loop."""
        sources = [fd for fd, _, _ in self.relay.sources(())]
        for fd in select.select([self.relay.fd, *sources], [], [], 0.2)[0]:
            self.relay.accept() if fd == self.relay.fd else self.relay.read(fd)

    def until_heard(self, frame: tuple[int, Kind, bytes]) -> None:
        for _ in range(1000):
            if frame in self.heard:
                return
            self.turn()
        raise AssertionError(self.heard[-5:])


def test_what_strangers_say_is_refused_and_a_process_is_heard_beside_them(caplog: pytest.LogCaptureFixture) -> None:
    room, rng = Room(), random.Random(1)
    silent = [room.connect() for _ in range(2 * _MAX_STRANGERS)]
    room.turn()
    before, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    hello = encode(ChildHello(KEY, 1, 5))
    with caplog.at_level(logging.INFO):
        for _ in range(500):
            stranger = room.connect()
            match rng.randrange(4):
                case 0:
                    stranger.sendall(rng.randbytes(rng.randrange(1, 200)))
                case 1:
                    stranger.sendall(damaged(pack_frame(Kind.HELLO, hello.replace(KEY, b"x" * 32)), rng) or b"x")
                case 2:
                    stranger.sendall(damaged(frames_of_a_process(rng), rng) or b"x")
                case _:
                    stranger.sendall(pack_frame(Kind.HELLO, encode(ChildHello(KEY, 2, 5))))
            stranger.close()
            room.turn()
    good = room.connect()
    good.sendall(pack_frame(Kind.HELLO, hello) + pack_frame(Kind.LETTER, b"heard"))
    room.until_heard((1, Kind.LETTER, b"heard"))
    second = room.connect()
    second.sendall(pack_frame(Kind.HELLO, hello) + pack_frame(Kind.LETTER, b"of another"))
    good.sendall(pack_frame(Kind.LETTER, b"still heard"))
    room.until_heard((1, Kind.LETTER, b"still heard"))
    assert [frame for frame in room.heard if frame[1] is Kind.HELLO] == [(1, Kind.HELLO, b"")]
    assert (1, Kind.LETTER, b"of another") not in room.heard
    assert len(caplog.records) < 20
    for one in (good, second, *silent):
        one.close()
    for _ in range(5):
        room.turn()
    assert len(os.listdir("/proc/self/fd")) <= before and threading.active_count() == threads
    room.relay.close()
    remove_directory(room.path)
