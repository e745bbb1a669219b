"""Timers: in one process, and on the workers."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import monarch_lab as ml
from monarch_lab.tensors import timer
from monarch_lab.tensors.timer import ExecutionTimer
from tests.controller.compare import rank_values


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """Seconds, moved by the test."""
    now = [100.0]
    monkeypatch.setattr(timer.time, "perf_counter", lambda: now[0])
    ExecutionTimer.reset()
    yield now
    ExecutionTimer.reset()


def test_a_section_is_timed_in_milliseconds(clock: list[float]) -> None:
    ExecutionTimer.start()
    clock[0] += 0.25
    ExecutionTimer.stop()
    assert ExecutionTimer.latest() == pytest.approx(250)


def test_a_repeated_section_is_summed_up_by_name(clock: list[float]) -> None:
    for seconds in (0.1, 0.3):
        with ExecutionTimer.time("step", use_cpu=True):
            clock[0] += seconds
    with ExecutionTimer.time("other"):
        pass
    table = ExecutionTimer.summary()
    assert table["step"] == pytest.approx({"count": 2, "total": 400, "mean": 200, "min": 100, "max": 300})
    assert table["other"]["count"] == 1


def test_the_latest_of_a_name_is_the_last(clock: list[float]) -> None:
    for seconds in (0.1, 0.3, 0.2):
        with ExecutionTimer.time("a"):
            clock[0] += seconds
    assert ExecutionTimer.latest("a") == pytest.approx(200)
    assert ExecutionTimer.measurements("a") == pytest.approx([100, 300, 200])


def test_a_reset_forgets_one_name_or_all() -> None:
    for name in ("a", "b"):
        with ExecutionTimer.time(name):
            pass
    ExecutionTimer.reset("a")
    assert set(ExecutionTimer.summary()) == {"b"}
    ExecutionTimer.reset()
    assert ExecutionTimer.summary() == {}
    with pytest.raises(KeyError, match="never stopped"):
        ExecutionTimer.latest("a")


def test_a_timer_says_what_is_wrong_with_its_use() -> None:
    with pytest.raises(RuntimeError, match="does not run"):
        ExecutionTimer.stop("a")
    ExecutionTimer.start("a")
    with pytest.raises(RuntimeError, match="runs already"):
        ExecutionTimer.start("a")


def test_on_a_gpu_events_of_its_stream_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Event:
        count = 0

        def __init__(self, *, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            Event.count += 1
            self.at = Event.count

        def synchronize(self) -> None:
            self.waited = True

        def elapsed_time(self, end: Any) -> float:
            assert end.waited
            return 5.0 * (end.at - self.at)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    with ExecutionTimer.time("kernel"):
        pass
    assert ExecutionTimer.latest("kernel") == 5.0


def test_ops_of_the_mesh_are_timed_on_each_process(cell: Any) -> None:
    ml.timer.reset()
    sleep = ml.remote(lambda r: time.sleep(0.02 * (1 + r.item())), propagate="inspect")
    for _ in range(2):
        with ml.timer.time("sleep", use_cpu=True):
            sleep(cell.rank("gpu"))
    first, second = rank_values(ml.timer.latest("sleep"))
    assert first >= 20 and second >= 40
    assert rank_values(ml.timer.mean("sleep"))[1] >= 40
    ml.timer.reset("sleep")
    with pytest.raises(KeyError, match="never stopped"):
        ml.inspect(ml.timer.latest("sleep"))
    cell.client.settle()
