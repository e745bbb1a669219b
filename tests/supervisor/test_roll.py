from __future__ import annotations

import logging

import pytest

from monarch_lab.supervisor.roll import AGENT, Entry, Roll, is_hello
from monarch_lab.wire.codec import encode
from monarch_lab.wire.engine import ALL, control_topic, topic
from monarch_lab.wire.supervision import AgentHello, Beat, WorkerHello

KEY = b"k" * 32


@pytest.fixture
def roll() -> Roll:
    roll = Roll(KEY)
    roll.expect(rank=0, process=0)
    roll.expect(rank=1, process=1)
    return roll


def worker_hello(rank: int = 0, process: int = 0, key: bytes = KEY) -> bytes:
    return encode(WorkerHello(key, process, rank, 42, "2.13"))


def test_a_worker_with_the_key_is_let_in_under_its_own_name(roll: Roll) -> None:
    assert roll.rank_of(b"w1") is None
    entry = roll.admit(b"w1", 1, worker_hello(1, 1))
    assert isinstance(entry, Entry) and entry.rank == 1
    assert roll.rank_of(b"w1") == 1
    assert roll.rank_of(b"w0") is None


def test_the_agent_is_let_in_under_its_name_alone(roll: Roll) -> None:
    hello = encode(AgentHello(KEY, "host", 1, "3.11", "0.1.0"))
    assert roll.admit(b"a1", 1, hello) is None
    assert not roll.is_agent(AGENT)
    assert isinstance(roll.admit(AGENT, 1, hello), AgentHello)
    assert roll.is_agent(AGENT)


@pytest.mark.parametrize(
    ("identity", "frames", "first"),
    [
        (b"w0", 1, b""),
        (b"w0", 1, b"\xff" * 100),
        (b"w0", 1, b"GET / HTTP/1.1\r\n"),
        (b"w0", 1, worker_hello(key=b"x" * 32)),
        (b"w0", 1, worker_hello(key=b"")),
        (b"w0", 2, worker_hello()),
        (b"w0", 1, worker_hello() + bytes(5000)),
        (b"w0", 1, encode(Beat(1, []))),
        (b"w0", 1, worker_hello(rank=1, process=1)),
        (b"w0", 1, worker_hello(rank=1, process=0)),
        (b"w7", 1, worker_hello(rank=0, process=7)),
        (b"\x00\x01\x02", 1, worker_hello()),
    ],
)
def test_anything_else_is_refused_and_told_once(
    roll: Roll, identity: bytes, frames: int, first: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(3):
        assert roll.admit(identity, frames, first) is None
    assert roll.rank_of(identity) is None
    assert len(caplog.records) == 1
    assert caplog.records[0].levelno == logging.WARNING


def test_a_flood_of_strangers_does_not_fill_the_log(roll: Roll, caplog: pytest.LogCaptureFixture) -> None:
    for n in range(1000):
        roll.admit(b"stranger %d" % n, 1, b"?")
    assert len(caplog.records) < 100


def test_a_rank_is_greeted_after_hello_and_both_subscriptions_in_any_order(roll: Roll) -> None:
    assert roll.subscribe(ALL) is None
    entry = roll.subscribe(control_topic(0))
    assert entry is not None and not entry.is_greeted()
    roll.admit(b"w0", 1, worker_hello())
    assert not roll.is_greeted(0)
    roll.subscribe(topic(0))
    assert roll.is_greeted(0) and not roll.is_greeted(1)


def test_nothing_is_read_under_the_name_of_a_process_that_has_ended(roll: Roll) -> None:
    roll.admit(b"w0", 1, worker_hello())
    roll.strike(0)
    assert roll.rank_of(b"w0") is None
    assert roll.admit(b"w0", 1, worker_hello()) is None
    assert roll.subscribe(topic(0)) is None


def test_a_hello_is_told_from_a_report() -> None:
    assert is_hello(worker_hello())
    assert is_hello(memoryview(worker_hello(1, 1)))
    assert not is_hello(encode(Beat(1, [])))
    assert not is_hello(b"")
