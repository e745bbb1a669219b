from __future__ import annotations

import os
import select
import socket
import stat
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch_lab.agent.relay import Relay
from monarch_lab.errors import ProtocolError
from monarch_lab.transport.child_link import (
    HELLO_BYTES,
    FrameReader,
    Kind,
    connect,
    number_of,
    pack_frame,
    pack_number,
    pipe_address,
)
from monarch_lab.wire.codec import encode
from monarch_lab.wire.hosts import ChildHello, pack_messages, unpack_orders, unpack_reports

KEY = b"k" * 32
LARGEST = 1 << 20


class Told(list[tuple[int, Kind, bytes]]):
    """Frames that a relay has told of, and the relay."""

    relay: Relay

    def pump(self) -> None:
        """A round of the agent's loop, as far as connections go."""
        self.relay.accept()
        for fd, _, write in self.relay.sources(()):
            if write:
                self.relay.flush(fd)
            if select.select([fd], [], [], 0)[0]:
                self.relay.read(fd)


@pytest.fixture
def told(tmp_path: Path) -> Iterator[Told]:
    told = Told()
    told.relay = Relay(str(tmp_path), KEY, LARGEST, {1, 2}, lambda *frame: told.append(frame))
    yield told
    told.relay.close()


def dial(tmp_path: Path, *frames: bytes) -> socket.socket:
    sock, key = connect(pipe_address(str(tmp_path)))
    assert key == KEY
    for frame in frames:
        sock.sendall(frame)
    sock.settimeout(10)
    return sock


def hello(process: int = 1, key: bytes = KEY) -> bytes:
    return pack_frame(Kind.HELLO, encode(ChildHello(key, process, os.getpid())))


def test_a_process_proves_itself_and_speaks(told: Told, tmp_path: Path) -> None:
    with dial(tmp_path, hello(), pack_frame(Kind.LETTER, b"a"), pack_number(Kind.TOOK, 7)) as sock:
        told.pump()
        assert told == [(1, Kind.HELLO, b""), (1, Kind.LETTER, b"a"), (1, Kind.TOOK, struct.pack("!Q", 7))]
        assert sock.recv(100) == pack_frame(Kind.WELCOME, KEY)
        told.relay.write(1, Kind.LETTER, b"back")
        told.relay.write_number(1, Kind.CREDIT, 3)
        told.relay.write(99, Kind.LETTER, b"nobody")
        assert sock.recv(100) == pack_frame(Kind.LETTER, b"back") + pack_number(Kind.CREDIT, 3)


def test_the_key_is_for_its_user_alone(told: Told, tmp_path: Path) -> None:
    assert stat.S_IMODE((tmp_path / "key").stat().st_mode) == 0o600


@pytest.mark.parametrize(
    "first",
    [
        hello(key=b"x" * 32),
        hello(key=b""),
        hello(process=3),
        pack_frame(Kind.LETTER, b"before hello"),
        pack_frame(Kind.HELLO, b"garbage"),
        struct.pack("!BQ", Kind.HELLO, HELLO_BYTES + 1),
        struct.pack("!BQ", Kind.LETTER, 1 << 60),
        b"\0" * 9,
        b"\xff" * 100,
    ],
    ids=["wrong key", "no key", "unknown process", "no hello", "garbage", "long hello", "huge", "kind 0", "kind 255"],
)
def test_who_does_not_prove_himself_is_refused_and_others_are_not_hurt(
    told: Told, tmp_path: Path, first: bytes
) -> None:
    with dial(tmp_path, hello(2)) as good, dial(tmp_path, first) as stranger:
        told.pump()
        assert stranger.recv(1) == b""
        good.sendall(pack_frame(Kind.LETTER, b"still here"))
        told.pump()
    assert told == [(2, Kind.HELLO, b""), (2, Kind.LETTER, b"still here")]


def test_nobody_takes_the_place_of_a_process_that_is_connected(told: Told, tmp_path: Path) -> None:
    with dial(tmp_path, hello()), dial(tmp_path, hello()) as second:
        told.pump()
        assert second.recv(1) == b""
    assert told == [(1, Kind.HELLO, b"")]


@pytest.mark.parametrize("kind", [Kind.HELLO, Kind.CALL, Kind.CREDIT, Kind.WELCOME])
def test_a_process_that_says_what_is_not_its_to_say_is_heard_no_more(told: Told, tmp_path: Path, kind: Kind) -> None:
    with dial(tmp_path, hello(), pack_frame(kind, b""), pack_frame(Kind.LETTER, b"late")):
        told.pump()
    assert told == [(1, Kind.HELLO, b"")]


def test_what_a_process_sent_before_it_ended_is_read_though_it_was_never_seen_alive(told: Told, tmp_path: Path) -> None:
    frames = [pack_frame(Kind.LETTER, bytes([n]) * 1000) for n in range(50)]
    dial(tmp_path, hello(), *frames, frames[0][:50]).close()
    told.relay.drain(1)
    assert [body[0] for _, kind, body in told if kind is Kind.LETTER] == list(range(50))
    told.pump()
    assert len(told) == 51


@given(st.binary(max_size=300), st.integers(1, 40))
def test_any_bytes_are_frames_or_a_protocol_error(data: bytes, step: int) -> None:
    reader = FrameReader(100)
    try:
        for at in range(0, len(data), step):
            reader.feed(data[at : at + step])
            while (frame := reader.next()) is not None:
                assert len(frame[1]) <= 100
    except ProtocolError:
        pass


@given(st.lists(st.tuples(st.sampled_from(Kind), st.binary(max_size=50)), max_size=10), st.integers(1, 30))
def test_frames_come_out_as_they_went_in_however_they_are_cut(frames: list[tuple[Kind, bytes]], step: int) -> None:
    stream = b"".join(pack_frame(kind, body) for kind, body in frames)
    reader, found = FrameReader(50), []
    for at in range(0, len(stream), step):
        reader.feed(stream[at : at + step])
        while (frame := reader.next()) is not None:
            found.append(frame)
    assert found == frames


@given(st.lists(st.binary(max_size=60), max_size=4))
def test_any_message_of_a_peer_is_understood_or_a_protocol_error(frames: list[bytes]) -> None:
    for unpack in (unpack_orders, unpack_reports):
        try:
            unpack(frames)
        except ProtocolError:
            pass


def test_payloads_that_do_not_fit_their_messages_are_a_protocol_error() -> None:
    header = pack_messages([])[0]
    assert unpack_orders([header]) == []
    with pytest.raises(ProtocolError, match="1 payloads came with 0 messages"):
        unpack_orders([header, b"one too many"])
    with pytest.raises(ProtocolError, match="without frames"):
        unpack_reports([])
    with pytest.raises(ProtocolError, match="a number of 3 bytes"):
        number_of(b"abc")
