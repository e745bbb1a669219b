from __future__ import annotations

import math
import threading

import pytest

from monarch_lab.errors import DeviceException, UsageTypeError, UsageValueError
from monarch_lab.supervisor.backlog import LETTER_COST_BYTES, Backlog
from monarch_lab.supervisor.function_call import FunctionCall, find_function
from monarch_lab.supervisor.letters import open_letter, pack_letter
from monarch_lab.supervisor.ttl import TTL

LARGEST = 1 << 20


def test_a_message_travels_as_it_is() -> None:
    message = {"a": [1, 2.5, None], "b": (b"x", {3})}
    assert open_letter(pack_letter(message, LARGEST)) == message


def test_what_cannot_be_pickled_is_the_senders_error_and_names_its_type() -> None:
    with pytest.raises(UsageTypeError, match="a message of type lock cannot be pickled.*nothing was sent"):
        pack_letter(threading.Lock(), LARGEST)


def test_a_message_that_is_too_large_is_refused_with_what_to_do() -> None:
    with pytest.raises(UsageValueError, match="put it into a file"):
        pack_letter(b"x" * LARGEST, LARGEST)


@pytest.mark.parametrize("target", ["nothing", "a b.c", "file.py:not a name", ".py:", ""])
def test_a_target_that_is_none_is_refused_when_the_call_is_made(target: str) -> None:
    with pytest.raises(UsageValueError, match="is no target: write"):
        FunctionCall(target)


def test_a_call_of_no_function_is_refused() -> None:
    with pytest.raises(UsageTypeError, match="a function or the name of one, not 3"):
        FunctionCall(3)  # type: ignore[arg-type]


def test_a_function_is_found_by_module_and_in_a_file(tmp_path: object) -> None:
    assert find_function("math.floor") is math.floor
    path = tmp_path / "some.py"  # type: ignore[operator]
    path.write_text("def f(): return __name__")
    assert find_function(f"{path}:f")() == "__entry__"
    with pytest.raises(UsageValueError, match="math has no function 'nope'"):
        find_function("math.nope")
    with pytest.raises(UsageValueError, match="there is no file"):
        find_function(f"{path}x.py:f")


def test_a_call_says_what_it_is() -> None:
    assert FunctionCall(math.floor, 1).name == "floor"
    assert "math.floor" in repr(FunctionCall("math.floor", 1, x=2))


def test_what_is_left_of_a_time_is_never_below_zero() -> None:
    now = 10.0
    left = TTL(5, lambda: now)
    assert left() == 5
    now = 16.0
    assert left() == 0
    assert TTL(None)() == math.inf


def test_a_process_that_does_not_read_stops_its_senders() -> None:
    backlog = Backlog(window_bytes=1000)
    backlog.open(1)
    backlog.open(2)
    assert backlog.reserve([1, 2], 500, 0) == [1, 2]
    with pytest.raises(DeviceException, match="1 of 1 processes do not read.*nothing was sent"):
        backlog.reserve([1], 500, 0)
    assert backlog.unread_bytes(1) == 500 + LETTER_COST_BYTES
    backlog.release(1, 500 + LETTER_COST_BYTES)
    assert backlog.reserve([1], 500, 0) == [1]


def test_a_letter_above_the_window_passes_alone() -> None:
    backlog = Backlog(window_bytes=10)
    backlog.open(1)
    assert backlog.reserve([1], 100, 0) == [1]


def test_a_sender_that_waits_goes_on_when_there_is_room_or_nobody_left() -> None:
    backlog = Backlog(window_bytes=10)
    backlog.open(1)
    backlog.reserve([1], 100, 0)
    found: list[list[int]] = []
    sender = threading.Thread(target=lambda: found.append(backlog.reserve([1], 100, 30)))
    sender.start()
    backlog.close(1)
    sender.join(30)
    assert found == [[]]
    assert backlog.reserve([1], 5, 0) == []
