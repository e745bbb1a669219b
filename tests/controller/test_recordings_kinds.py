"""ml.compile: what a recording hangs on beside its arguments, and what goes with it."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch

import monarch_lab as ml
from tests.controller.compare import by_rank, own_number, rank_values
from tests.controller.recorded import values

# --- what hangs on more than the arguments


def test_random_numbers_are_drawn_anew_as_without(mesh: Any) -> None:
    def draws(fn: Any) -> list[Any]:
        torch.manual_seed(3)
        return [by_rank(fn(torch.ones(3)))[0].tolist() for _ in range(5)]

    def noisy(x: Any) -> Any:
        return torch.nn.functional.dropout(x, 0.5) + torch.rand(3)

    with mesh.activate():
        plain, recorded = draws(noisy), draws(ml.compile(noisy))
    assert plain == recorded and len({str(d) for d in plain}) == 5


def test_numbers_that_vary_by_rank_are_another_recording(cell: Any) -> None:
    @ml.compile
    def draw(x: Any) -> Any:
        return torch.rand(3) + x

    zero = torch.zeros(3)
    for _ in range(3):
        assert draw(zero).equal_dims == ("host", "gpu")
    with ml.random.vary("gpu"):
        for _ in range(3):
            found = draw(zero)
            assert "gpu" not in found.equal_dims
            first, second = rank_values(found)
            assert first != second
    assert draw(zero).equal_dims == ("host", "gpu")


def test_what_is_known_equal_is_so_after_a_replay(cell: Any) -> None:
    @ml.compile
    def step(x: Any) -> Any:
        return x + 1, x.reduce("gpu", "sum")

    for _ in range(3):
        same, total = step(torch.ones(2))
        assert same.equal_dims == total.equal_dims == ("host", "gpu")
        differ, total = step(torch.ones(2) + own_number(cell))
        assert "gpu" not in differ.equal_dims and "gpu" in total.equal_dims
        assert total.tolist() == [3.0, 3.0]
        with pytest.raises(TypeError):
            differ.tolist()


def test_an_unequal_write_to_a_captured_tensor_ends_what_was_known(cell: Any) -> None:
    total = torch.zeros(2)

    @ml.compile
    def add(x: Any) -> None:
        total.add_(x)

    for _ in range(4):
        add(torch.ones(2))
        assert "gpu" in total.equal_dims
    for _ in range(4):
        add(torch.ones(2) * own_number(cell))
        assert "gpu" not in total.equal_dims
    assert rank_values(total) == [[4.0, 4.0], [8.0, 8.0]]


def test_ambient_state_is_part_of_the_kind_and_of_the_recording(cell: Any) -> None:
    w = torch.ones(2, requires_grad=True)

    @ml.compile
    def step(x: Any) -> Any:
        with torch.no_grad():
            y = w * x
        return y, (w * x).detach()

    for _ in range(3):
        y, _ = step(torch.ones(2))
        assert not y.requires_grad
    with torch.autocast("cpu", dtype=torch.bfloat16):
        m = ml.compile(lambda a: a @ a)
        for _ in range(3):
            assert m(torch.ones(2, 2)).dtype == torch.bfloat16
    for _ in range(3):
        assert m(torch.ones(2, 2)).dtype == torch.float32


def test_a_module_in_evaluation_is_another_recording(cell: Any) -> None:
    layer = torch.nn.Dropout(0.5)

    @ml.compile
    def run(x: Any) -> Any:
        return layer(x) + 0

    for _ in range(3):
        run(torch.ones(50))
    layer.eval()
    for _ in range(3):
        assert values(run(torch.ones(50))) == [1.0] * 50
    layer.train()
    layer.p = 0.25
    kept = [v for v in values(run(torch.ones(50))) if v]
    assert kept[0] == pytest.approx(1 / 0.75)


def test_a_remote_function_that_prints_and_one_defined_again(cell: Any, capfd: Any) -> None:
    @ml.remote
    def shift(x: Any) -> Any:
        return x + 1

    @ml.compile
    def run(x: Any) -> Any:
        return shift(x)

    for _ in range(3):
        assert values(run(torch.zeros(2))) == [1.0] * 2

    @ml.remote
    def again(x: Any) -> Any:
        return x + 100

    shift = again  # noqa: F811
    assert values(run(torch.zeros(2))) == [100.0] * 2


def test_a_recording_that_is_gone_is_gone_on_the_workers(cell: Any) -> None:
    client = cell.client
    gc.collect()
    before = set(client.recordings)

    @ml.compile
    def double(x: Any) -> Any:
        return x * 2

    for _ in range(3):
        double(torch.ones(2))
    made = set(client.recordings) - before
    assert len(made) == 1
    held = weakref.ref(double)
    del double
    gc.collect()
    assert held() is None
    assert set(client.recordings) == before


def count_tensors() -> int:
    import gc

    import torch

    return sum(isinstance(x, torch.Tensor) for x in gc.get_objects())


def test_a_loop_of_calls_keeps_no_values(cell: Any) -> None:
    x = torch.ones(4)
    left, right = cell.slice(gpu=0), cell.slice(gpu=1)

    @ml.compile
    def step(x: Any) -> Any:
        with left.activate():
            u = torch.rand(2) + 1
        with right.activate():
            torch.rand(2)
        with left.activate():
            u = u * 2
        y = x + 1
        return y * 2, y.sum(), u

    def held() -> int:
        step(x)
        cell.sync()
        torch.ones(1)
        return ml.call_on_shard_and_fetch(count_tensors, shard={"host": 0, "gpu": 0}).result()

    for _ in range(4):
        before = held()
    for _ in range(50):
        step(x)
    assert held() <= before + 3
