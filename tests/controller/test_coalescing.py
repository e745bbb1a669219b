"""ml.coalescing: what a block issues goes out when the outermost one ends."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

import monarch_lab as ml
from tests.controller.compare import rank_values


def issue(x: Any, count: int = 300) -> Any:
    for _ in range(count):
        x = x + x * 0
    return x


@pytest.fixture
def x(cell: Any) -> Any:
    """Ops on it are known, and nothing is buffered."""
    ones = torch.ones(2)
    issue(ones, 2)
    cell.sync()
    return ones


def test_a_block_is_sent_at_its_end(cell: Any, x: Any) -> None:
    client = cell.client
    with ml.coalescing():
        y = issue(x)
        time.sleep(0.05)  # what has waited is not sent for that
        assert len(client.where) == 600
    assert not client.code
    assert rank_values(y) == [[1.0, 1.0]] * 2


def test_a_block_within_another_changes_nothing(cell: Any, x: Any) -> None:
    client = cell.client
    with ml.coalescing():
        with ml.coalescing():
            issue(x)
        assert len(client.where) == 600
    assert not client.code


def test_without_a_block_full_batches_go_out(cell: Any, x: Any) -> None:
    issue(x)
    assert len(cell.client.where) < 600


def test_an_exception_sends_what_was_issued_before_it(cell: Any, x: Any) -> None:
    with pytest.raises(KeyError), ml.coalescing():
        x.add_(1)
        raise KeyError
    assert not cell.client.code and not cell.client.holds
    assert rank_values(x) == [[2.0, 2.0]] * 2


def test_fetching_inside_is_refused(cell: Any, x: Any) -> None:
    with ml.coalescing():
        y = x + x
        for read in (ml.inspect, lambda t: t.tolist()):
            with pytest.raises(NotImplementedError, match="inside ml.coalescing"):
                read(y)
    assert y.tolist() == [2.0, 2.0]


def test_a_new_kind_of_call_waits_inside_too(cell: Any, x: Any) -> None:
    with ml.coalescing():
        y = torch.full((2, 5, 1), 3.0).cumsum(1) + x
    assert tuple(y.shape) == (2, 5, 2) and rank_values(y[0, 4]) == [[16.0, 16.0]] * 2


def test_recordings_are_made_and_replayed_inside(cell: Any, x: Any) -> None:
    double = ml.compile(lambda t: t * 2)
    for k in range(4):
        with ml.coalescing():
            y = double(double(torch.full((2,), float(k))))
        assert rank_values(y) == [[4.0 * k] * 2] * 2
