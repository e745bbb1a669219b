from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator

import pytest
import zmq

from monarch_lab.errors import UsageValueError
from monarch_lab.transport import frames
from monarch_lab.transport.frames import configure, poll_ms, receive_frames, send_frames, share


class Alarm(Exception):
    pass


@pytest.fixture
def pair() -> Iterator[tuple[zmq.Socket, zmq.Socket]]:
    context = zmq.Context()
    ends = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
    for end in ends:
        configure(end, 0)
    ends[0].bind("inproc://pair")
    ends[1].connect("inproc://pair")
    yield ends
    context.destroy(linger=0)


@pytest.fixture
def alarms() -> Iterator[threading.Event]:
    """A storm of SIGINT. It raises Alarm once each time the event is set."""
    armed, over = threading.Event(), threading.Event()

    def interrupt(*_: object) -> None:
        if armed.is_set():
            armed.clear()
            raise Alarm

    def storm() -> None:
        while not over.wait(0.0001):
            os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(signal.SIGINT, interrupt)
    thread = threading.Thread(target=storm)
    thread.start()
    yield armed
    over.set()
    thread.join()
    signal.signal(signal.SIGINT, before)


def test_a_message_arrives_frame_by_frame(pair: tuple[zmq.Socket, zmq.Socket]) -> None:
    large = bytearray(1 << 20)
    send_frames(pair[0], [b"topic", b"header", share(memoryview(large))])
    assert [frame.bytes for frame in receive_frames(pair[1])] == [b"topic", b"header", bytes(large)]
    with pytest.raises(zmq.Again):
        receive_frames(pair[1], wait=False)


def test_a_frame_above_the_limit_is_refused_before_it_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "MAX_FRAME_BYTES", 10)
    with pytest.raises(UsageValueError, match="11 bytes"):
        share(bytes(11))


def test_an_interrupt_of_the_wait_takes_nothing_from_the_next_message(
    pair: tuple[zmq.Socket, zmq.Socket], alarms: threading.Event
) -> None:
    alarms.set()
    with pytest.raises(Alarm):
        receive_frames(pair[1])
    send_frames(pair[0], [b"1", b"2", b"3"])
    assert [frame.bytes for frame in receive_frames(pair[1])] == [b"1", b"2", b"3"]


def test_no_interrupt_cuts_a_message_in_two_while_it_is_sent(
    pair: tuple[zmq.Socket, zmq.Socket], alarms: threading.Event
) -> None:
    wrong: list[list[bytes]] = []
    received = 0

    def receive() -> None:
        nonlocal received
        while (message := [frame.bytes for frame in receive_frames(pair[1])]) != [b"end"]:
            received += 1
            if len(message) != 4 or len(set(message)) != 1:
                wrong.append(message)

    receiver = threading.Thread(target=receive)
    receiver.start()
    interrupts = 0
    for n in range(3000):
        message = [b"%d" % n] * 4
        try:
            alarms.set()
            send_frames(pair[0], message)
            alarms.clear()
        except Alarm:
            interrupts += 1
    send_frames(pair[0], [b"end"])
    receiver.join()
    assert wrong == []
    assert interrupts > 0 and received > 0


def test_a_wait_of_a_fraction_of_a_millisecond_is_not_spun_at_nor_for_ever() -> None:
    assert [poll_ms(s) for s in (-1.0, 0.0, 0.0001, 1.0)] == [0, 0, 1, 1000]
