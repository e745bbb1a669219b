from __future__ import annotations

import asyncio
import os
import pickle
import signal
import threading
from types import FrameType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch_lab.errors import ClosedError, UsageTypeError
from monarch_lab.supervisor import inbox as inbox_module
from monarch_lab.supervisor.inbox import Entry, Inbox, View
from monarch_lab.supervisor.letters import UnreadableMessage


def make(*messages: object) -> tuple[Inbox, View]:
    inbox = Inbox("the test", lambda *_: None)
    inbox.put([Entry("someone", message) for message in messages])
    return inbox, View(inbox)


def messages(letters: object) -> list[object]:
    return [letter.message for letter in letters]  # type: ignore[attr-defined]


def test_a_filtered_read_leaves_the_rest_in_order() -> None:
    _, view = make(1, "a", 2, "b", 3)
    numbers, texts = view.messagefilter(int), view.messagefilter(str)
    assert numbers.recv().message == 1
    assert texts.recv().message == "a"
    assert numbers.recv().message == 2
    assert messages(view.recvready()) == ["b", 3]
    assert numbers.recvready() == texts.recvready() == []


def test_a_filter_takes_types_and_functions_of_a_letter() -> None:
    _, view = make(1, "a", 2.0, b"x")
    assert messages(view.messagefilter((int, float)).recvready()) == [1, 2.0]
    assert messages(view.messagefilter(lambda letter: letter.message == b"x").recvready()) == [b"x"]
    assert view.recv() == ("someone", "a")


def test_a_filter_of_a_filter_lets_through_what_passes_both() -> None:
    _, view = make(1, 2, "a", 3, 4)
    even = view.messagefilter(int).messagefilter(lambda letter: letter.message % 2 == 0)
    assert messages(even.recvready()) == [2, 4]
    assert messages(view.recvready()) == [1, "a", 3]


def test_what_is_no_filter_is_refused_with_what_is() -> None:
    with pytest.raises(UsageTypeError, match="a type, types, or a function"):
        make()[1].messagefilter("int")  # type: ignore[arg-type]


def test_a_filter_looks_at_nothing_twice() -> None:
    inbox, view = make(*range(100))
    looked: list[object] = []

    def is_none(letter: object) -> bool:
        looked.append(letter)
        return False

    nothing = view.messagefilter(is_none)
    assert nothing.recvready() == [] == nothing.recvready()
    inbox.put([Entry(None, "new")])
    assert nothing.recvready() == []
    assert len(looked) == 101


@given(st.lists(st.sampled_from(["put", "any", "int", "str"]), max_size=60))
def test_every_letter_is_taken_once_and_in_order_by_whoever_may(steps: list[str]) -> None:
    inbox, view = make()
    views = {"any": view, "int": view.messagefilter(int), "str": view.messagefilter(str)}
    here: list[object] = []
    count = 0
    for step in steps:
        if step == "put":
            message = count if count % 3 else str(count)
            count += 1
            here.append(message)
            inbox.put([Entry(None, message)])
            continue
        kind = {"any": object, "int": int, "str": str}[step]
        expected = next((message for message in here if isinstance(message, kind)), None)
        letter = inbox.look(views[step])
        assert (None if letter is None else letter.message) == expected
        if letter is not None:
            here.remove(letter.message)
    assert messages(view.recvready()) == here


def test_a_wait_ends_with_a_time_out_or_the_end_of_the_inbox() -> None:
    inbox, view = make("last")
    inbox.close("it was closed")
    assert view.recv().message == "last"
    with pytest.raises(ClosedError, match="it was closed"):
        view.recv()
    with pytest.raises(TimeoutError, match="no letter came to the test"):
        make()[1].recv(0)


def test_a_thread_that_waits_is_woken_by_a_letter_and_by_the_end() -> None:
    inbox, view = make()
    found: list[object] = []

    def wait() -> None:
        for letter in view.recvloop(30):
            found.append(letter.message)

    def wait_to_the_end() -> None:
        with pytest.raises(ClosedError):
            wait()

    thread = threading.Thread(target=wait_to_the_end)
    thread.start()
    inbox.put([Entry(None, 1), Entry(None, 2)])
    inbox.close("over")
    thread.join(30)
    assert found == [1, 2]


def test_an_asynchronous_wait_is_woken_from_another_thread() -> None:
    inbox, view = make()

    async def wait() -> list[object]:
        first = asyncio.ensure_future(view.messagefilter(int).recv_async(30))
        second = asyncio.ensure_future(view.messagefilter(str).recv_async())
        await asyncio.to_thread(inbox.put, [Entry(None, "a"), Entry(None, 1)])
        with pytest.raises(TimeoutError):
            await view.messagefilter(bytes).recv_async(0)
        return messages([await first, await second])

    assert asyncio.run(wait()) == [1, "a"]


def test_a_letter_that_cannot_be_opened_arrives_as_one_that_says_so() -> None:
    inbox, view = make()
    data = pickle.dumps(1)[:-1]
    inbox.put([Entry("p", data=data), Entry("p", data=pickle.dumps("next"))])
    found = view.recv().message
    assert isinstance(found, UnreadableMessage)
    assert (found.type_name, found.size_bytes) == ("EOFError", len(data)) or found.type_name == "UnpicklingError"
    assert view.recv().message == "next"


def test_who_sent_is_told_once_of_what_was_taken_and_not_of_what_was_only_looked_at() -> None:
    taken: list[tuple[object, int]] = []
    inbox = Inbox("the test", lambda sender, size: taken.append((sender, size)))
    data = pickle.dumps(5)
    inbox.put([Entry("p", data=data), Entry("host", "ours")])
    view = View(inbox)
    assert view.messagefilter(bytes).recvready() == []
    assert taken == []
    view.recvready()
    assert taken == [("p", len(data))]


def test_an_interrupt_while_waiting_leaves_everything_usable() -> None:
    inbox, view = make()
    timer = threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        view.recv(30)
    timer.join()
    inbox.put([Entry(None, 1)])
    assert view.recv(0).message == 1


def test_an_interrupt_between_the_choice_and_the_taking_loses_no_letter() -> None:
    """Interrupts sent while letters are taken as fast as can be: each comes out exactly once."""
    inbox, view = make(*range(20_000))
    found: list[object] = []
    stop = threading.Event()

    def interrupt() -> None:
        while not stop.wait(0.002):
            os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    before = signal.getsignal(signal.SIGINT)
    interrupts = 0

    def raise_inside(_: int, frame: FrameType | None) -> None:
        if frame is not None and frame.f_code.co_filename == inbox_module.__file__:
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, raise_inside)
    thread.start()
    try:
        while len(found) < 20_000:
            try:
                found.append(inbox.look(view).message)  # type: ignore[union-attr]
            except KeyboardInterrupt:
                interrupts += 1
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        stop.set()
        thread.join()
        signal.signal(signal.SIGINT, before)
    assert found == list(range(20_000))
    assert interrupts
