"""A function that may stop in a debugger is not replayed: it runs op by op, and says so once a cell."""

from __future__ import annotations

import pdb
from typing import Any

import pytest
import torch

import monarch_lab as ml
from tests.controller.recorded import counted, values
from tests.fakes.typist import typing

OP_BY_OP = "counted.run runs op by op and not as a recording: "


def _stops(t: Any) -> Any:
    inside = t * 2
    breakpoint()
    return inside


def _by_a_helper(t: Any) -> Any:
    return _stops(t)


def _goes_on(t: Any) -> Any:
    return t * 2


@pytest.mark.parametrize("fn", [_stops, _by_a_helper])
def test_a_breakpoint_in_a_remote_function_keeps_its_caller_from_being_replayed(cell: Any, fn: Any) -> None:
    inner = ml.remote(fn)
    step, runs = counted(lambda t: inner(t + 1) + 1)
    with typing(cell, "c all") as front:
        for _ in range(4):
            assert values(step(torch.ones(2))) == [5, 5]
    assert runs.count == 4 and len(front.asked) >= 4
    [told] = [text for text in front.told if "op by op" in text]
    assert told == f"{OP_BY_OP}there is a breakpoint in {inner.shown}, which it calls"


def test_it_is_replayed_once_the_breakpoint_is_gone(cell: Any) -> None:
    holder = [ml.remote(_stops)]
    step, runs = counted(lambda t: holder[0](t))
    with typing(cell, "c all"):
        assert values(step(torch.ones(2))) == [2, 2]
    holder[0] = ml.remote(_goes_on)
    for _ in range(4):
        assert values(step(torch.ones(2))) == [2, 2]
    assert runs.count == 3  # recorded and verified


def test_breakpoints_of_the_notebook_are_hit_in_a_recorded_function_unrecorded(cell: Any) -> None:
    inner = ml.remote(_goes_on)
    step, runs = counted(lambda t: inner(t))
    for _ in range(4):
        step(torch.ones(2))
    assert runs.count == 2
    with typing(cell, "c all") as front:
        cell.client.breakpoints.add("_goes_on", [], "_goes_on", "", [0, 1])
        for _ in range(2):
            assert values(step(torch.ones(2))) == [2, 2]
    assert runs.count == 4 and front.asked
    assert (
        "counted.run runs op by op and not as a recording: breakpoints are set (%mesh break lists them)" in front.told
    )
    step(torch.ones(2))
    assert runs.count == 4  # they are cleared


def test_a_breakpoint_of_the_recorded_function_itself_is_met_at_each_call(
    cell: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    met: list[int] = []
    monkeypatch.setattr(pdb, "set_trace", lambda: met.append(1))

    @ml.compile
    def step(t: Any) -> Any:
        pdb.set_trace()
        return t + 1

    with typing(cell, "c") as front:
        for _ in range(4):
            assert values(step(torch.ones(2))) == [2, 2]
    assert len(met) == 4
    assert [text.rpartition(": ")[2] for text in front.told] == ["there is a breakpoint in it"]
