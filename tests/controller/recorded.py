"""What the tests of recordings share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import monarch_lab as ml
from tests.controller.compare import rank_values


def values(t: Any) -> list[Any]:
    """Equal on both processes."""
    first, second = rank_values(t)
    assert first == second
    return first


class Runs:
    """How often Python ran a function."""

    def __init__(self) -> None:
        self.count = 0


def counted(fn: Callable[..., Any]) -> tuple[Any, Runs]:
    runs = Runs()

    def run(*args: Any) -> Any:
        runs.count += 1
        return fn(*args)

    return ml.compile(run), runs
