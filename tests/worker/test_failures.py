"""Exceptions as data: whatever a user raises arrives, and nothing that describes it fails or changes it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NoReturn

import pytest

from monarch_lab.controller import failures as kernel
from monarch_lab.errors import RemoteException
from monarch_lab.wire.engine import Failure
from monarch_lab.worker.failures import describe


def caught(fn: Callable[[], Any]) -> BaseException:
    try:
        fn()
    except BaseException as error:
        return error
    raise AssertionError("nothing was raised")


def told(fn: Callable[[], Any]) -> tuple[Failure, RemoteException]:
    failure = describe(caught(fn))
    return failure, kernel.build({1: failure}, None, "a cell")


class Unprintable(ValueError):
    def __str__(self) -> str:
        raise RuntimeError("no text")


class LeavesPython(Exception):
    def __reduce__(self) -> NoReturn:
        sys.exit("from pickling")


class Comes(Exception):
    """Pickles, and does not come back."""

    def __init__(self, a: int, b: int) -> None:
        super().__init__(f"{a} {b}")


def raised(error: BaseException) -> Callable[[], NoReturn]:
    def fn() -> NoReturn:
        raise error

    return fn


@pytest.mark.parametrize(
    ("error", "name", "text"),
    [
        (Unprintable(), "Unprintable", "<its text cannot be had: __str__ raised RuntimeError>"),
        (LeavesPython("why"), "LeavesPython", "why"),
        (Comes(1, 2), "Comes", "1 2"),
        (type("Locked", (Exception,), {"held": property(lambda self: (i for i in ()))})("text"), "Locked", "text"),
        (SystemExit(3), "SystemExit", "3"),
        (StopIteration(4), "StopIteration", "4"),
    ],
)
def test_any_exception_arrives_by_name_and_text(error: BaseException, name: str, text: str) -> None:
    failure, built = told(raised(error))
    assert (failure.type_name, failure.text) == (name, text)
    assert str(built).startswith(f"{name}: {text} (on rank 1)")
    assert built.first.frames[-1].function.endswith("fn") and f"{name}: {text}" in built.worker_traceback
    assert ("the cell on this rank" in built.worker_traceback) == (name == "SystemExit")


def test_what_it_was_raised_from_is_told_oldest_first_and_left_as_it_was() -> None:
    def fail() -> None:
        try:
            try:
                [][0]
            except IndexError as e:
                raise KeyError("k") from e
        except KeyError:
            error = ValueError("last")
            error.add_note("and a note")
            raise error  # noqa: B904  its context is what is tested

    error = caught(fail)
    failure = describe(error)
    assert [(r.relation, r.type_name) for r in failure.related] == [("cause", "IndexError"), ("context", "KeyError")]
    assert isinstance(error.__context__, KeyError) and isinstance(error.__context__.__cause__, IndexError)
    assert not error.__suppress_context__
    built = kernel.build({0: failure}, None, None)
    order = ["IndexError: list index", "direct cause", "KeyError: 'k'", "During handling", "ValueError: last", "a note"]
    places = [built.worker_traceback.index(text) for text in order]
    assert places == sorted(places) and isinstance(built, ValueError)
    try:
        raise ValueError("alone") from None
    except ValueError as e:
        assert describe(e).related == []
    loop = ValueError("round")
    loop.__context__ = other = KeyError("trip")
    other.__context__ = loop
    assert [r.text for r in describe(loop).related] == ["'trip'"]


def test_parts_of_a_group_are_told() -> None:
    group = ExceptionGroup("outer", [KeyError("one"), ExceptionGroup("inner", [OSError("two")])])
    failure, built = told(raised(group))
    assert failure.type_name == "ExceptionGroup"
    parts = [r.type_name for r in failure.related if r.relation == "part"]
    assert parts == ["KeyError", "ExceptionGroup", "OSError"]
    assert "One of its parts:" in built.worker_traceback and "OSError: two" in built.worker_traceback


def test_a_syntax_error_names_its_own_line_and_a_long_recursion_is_cut() -> None:
    failure, _ = told(lambda: exec(compile("a = 1\nb = = 2\n", "made.py", "exec")))
    assert failure.frames[-1] == ("made.py", 2, "<module>", "b = = 2")

    def deep(n: int) -> None:
        deep(n + 1)

    failure, built = told(lambda: deep(0))
    assert failure.type_name == "RecursionError" and len(failure.frames) == 101
    assert "frames left out]" in built.worker_traceback


def test_equal_failures_are_one_group_and_the_first_cause_comes_first() -> None:
    same, other = (describe(caught(raised(error))) for error in (ValueError("same"), KeyError("other")))
    built = kernel.build({2: other, 0: same, 1: same, 3: same}, None, None)
    assert [(ranks, f.type_name) for ranks, f in built.groups] == [((2,), "KeyError"), ((0, 1, 3), "ValueError")]
    assert str(built) == "KeyError: 'other' (on rank 2); ValueError on ranks 0, 1, 3"
    assert built.ranks == (0, 1, 2, 3) and built.first.rank == 2 and isinstance(built, KeyError)
    assert [note.splitlines()[0] for note in built.__notes__] == ["On rank 2:", "On ranks 0, 1, 3:"]
