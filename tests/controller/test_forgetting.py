"""What was learned is let go, here and on the workers: nothing grows with the number of calls (F8)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import monarch_lab as ml
from tests.controller.compare import rank_values


def _known_there() -> list[int]:
    import gc

    kinds = [d for d in gc.get_objects() if type(d).__name__ == "Definitions"]
    return [max(len(getattr(d, name)) for d in kinds) for name in ("templates", "entries", "plans")]


def known_there(mesh: Any) -> list[int]:
    return ml.call_on_shard_and_fetch(_known_there, shard={"host": 0, "gpu": 1}).result()


class Changing:
    """An argument whose value may change: calls with it are asked or told each time, and never believed."""

    def __init__(self, step: int) -> None:
        self.step = step


def add_step(x: Any, by: Changing) -> Any:
    return x + by.step


def test_calls_with_changing_arguments_leave_nothing(cell: Any) -> None:
    learned = ml.remote(add_step)
    told = ml.remote(add_step, propagate=add_step)
    x = torch.zeros(2)

    def run(count: int) -> tuple[int, ...]:
        for k in range(count):
            assert learned(x, Changing(k)).shape == (2,)
            y = told(x, Changing(k))
            ml.call_on_shard_and_fetch(add_step, x, Changing(k)).result()
        assert rank_values(y) == [[count - 1] * 2] * 2
        client = cell.client
        sizes = len(client.defined), len(client.cache.layouts), len(client.cache.kinds), len(client.cache.templates)
        return (*sizes, *known_there(cell))

    run(1)
    before = run(2)
    assert run(6) == before


def test_a_full_cache_is_emptied_here_and_there_but_for_what_recordings_use(
    cell: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, cache = cell.client, cell.client.cache
    kept, other = torch.ones(2), torch.ones(2)

    @ml.compile
    def step(x: Any) -> Any:
        return (x * 3).cos() + kept

    @ml.compile
    def once(x: Any) -> Any:
        return x.sin() + other

    want = rank_values(step(torch.zeros(2)))
    for _ in range(2):
        step(torch.zeros(2))
    once(torch.zeros(2))  # recorded, and to be verified by the next call
    fill = torch.ones(3)
    monkeypatch.setattr(cache, "_limit", 60)
    highest = 0
    for k in range(50):
        w = fill.reshape(1, 1, 3).expand(k + 1, 2, 3).clone().requires_grad_()
        w.sum().backward()
        if not k:  # what other recordings use stays
            defined, layouts, there = len(client.defined), len(cache.layouts), known_there(cell)
        highest = max(highest, len(cache.entries), len(cache.templates), len(cache.plans) * 10)
    assert cache.generation > 3 and highest <= 80
    assert len(client.defined) - defined <= 160 and len(cache.layouts) - layouts <= 80
    assert max(a - b for a, b in zip(known_there(cell), there, strict=True)) <= 80
    assert rank_values(step(torch.zeros(2))) == want, "a recording is replayed as before"
    for _ in range(3):
        assert rank_values(once(torch.zeros(2))) == [[1, 1]] * 2
    with ml.Stream("late").activate():  # hears of all there is at once
        assert rank_values(torch.ones(2) + 1) == [[2, 2]] * 2


def test_loans_that_ended_are_forgotten(cell: Any) -> None:
    client, side = cell.client, ml.Stream("side")
    x = torch.zeros(2)
    before = len(client.lent)
    for k in range(20):
        _, loan = side.borrow(x, mutable=k % 2 == 0)
        loan.drop()
    moved = x.to_mesh(cell, stream=side)
    cell.sync()
    assert len(client.lent) == before and not client.ended_loans
    assert moved.stream is side


def _payloads_and_moves() -> list[int]:
    import gc

    kinds = [d for d in gc.get_objects() if type(d).__name__ == "Definitions"]
    return [max(len(d._payloads) for d in kinds), max(len(d.moves) for d in kinds)]


def test_functions_sent_by_value_are_forgotten_and_sent_afresh(cell: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = cell.client.cache
    asked = ml.remote(_payloads_and_moves)

    def function(step: int) -> Any:
        return ml.remote(lambda x: x + step)

    kept = function(1000)

    @ml.compile
    def recorded(x: Any) -> Any:
        return kept(x) * 2

    x = torch.zeros(2)
    for _ in range(3):
        recorded(x)
    monkeypatch.setattr(cache, "_limit", 100)  # 10 functions
    first = function(0)
    for k in range(40):
        assert rank_values(function(k)(x)) == [[k, k]] * 2
        assert ml.call_on_shard_and_fetch(lambda k=k: k).result() == k
        assert rank_values(first(x)) == [[0, 0]] * 2, "known again, whatever was forgotten"
    assert cache.generation > 3 and len(cache.functions) <= 12
    assert asked.call_on_shard_and_fetch(shard={"host": 0, "gpu": 1}).result()[0] <= 16
    assert rank_values(recorded(x)) == [[2000, 2000]] * 2, "a recording is replayed as before"
    with ml.Stream("later").activate():
        assert rank_values(kept(torch.zeros(2))) == [[1000, 1000]] * 2


def test_moves_are_forgotten_but_for_those_still_to_come_back_over(cell: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = cell.client.cache
    asked = ml.remote(_payloads_and_moves)
    left, right = cell.slice(gpu=0), cell.slice(gpu=1)
    with left.activate():
        leaf = torch.ones(3, requires_grad=True)
        small = torch.ones(2)

    @ml.compile
    def over(x: Any) -> Any:
        return (x + 1).to_mesh(right) * 2

    for _ in range(3):
        over(small)
    crossed = (leaf * 2).to_mesh(right)
    monkeypatch.setattr(cache, "_limit", 60)  # 6 moves
    for k in range(30):
        with left.activate():
            moved = torch.full((k + 4,), k).to_mesh(right)
        assert ml.fetch_shard(moved.sum()).result() == k * (k + 4)
    assert len(cache.moves) <= 10
    there = asked.call_on_shard_and_fetch(shard={"host": 0, "gpu": 1}).result()
    assert there[1] <= 12
    with right.activate():
        loss = (crossed * crossed).sum()
    loss.backward()
    assert ml.fetch_shard(leaf.grad).result().tolist() == [8, 8, 8]
    assert ml.fetch_shard(over(small)).result().tolist() == [4, 4]
