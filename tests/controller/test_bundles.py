"""``reduce_`` of many small tensors in a row is one collective, and means what one by one means."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import monarch_lab as ml
from tests.controller.compare import rank_values
from tests.controller.recorded import counted

_FACTORS = {"sum": 2.0, "avg": 1.0}


@ml.remote(propagate=lambda: None)
def count_collectives() -> None:
    """From now on ``monarch_collectives`` counts them, on each worker."""
    import builtins

    from monarch_lab.worker import collectives

    plain = getattr(collectives, "_plain_add_up", collectives.add_up)
    collectives._plain_add_up = plain  # type: ignore[attr-defined]
    builtins.monarch_collectives = 0  # type: ignore[attr-defined]

    def counting(*args: Any) -> None:
        builtins.monarch_collectives += 1  # type: ignore[attr-defined]
        plain(*args)

    collectives.add_up = counting


@ml.remote(propagate=lambda: torch.empty((), dtype=torch.int64))
def collectives_so_far() -> Any:
    import builtins

    return torch.tensor(builtins.monarch_collectives)  # type: ignore[attr-defined]


def so_far() -> int:
    return int(ml.fetch_shard(collectives_so_far(), host=0, gpu=0).result())


def various(mesh: Any) -> list[Any]:
    """Unequal on the two ranks: what rank 1 has is that of rank 0 plus 2."""
    step = mesh.rank("gpu") * 2.0
    shapes: list[tuple[int, ...]] = [(3, 4), (5,), (), (0, 2), (2, 3, 2)]
    made = [torch.arange(float(torch.Size(s).numel())).reshape(s) + step for s in shapes]
    made.append((torch.arange(6.0).view(2, 3) + step).t())  # not contiguous
    made += [torch.ones(4, dtype=torch.float64) + step, torch.ones(3, dtype=torch.bfloat16) + step.bfloat16()]
    return made


@pytest.mark.parametrize("reduction", ["sum", "avg"])
@pytest.mark.parametrize("recorded", [False, True])
def test_each_tensor_is_reduced_as_by_itself(cell: Any, reduction: str, recorded: bool) -> None:
    def all_of_them(tensors: list[Any]) -> None:
        for t in tensors:
            t.reduce_("gpu", reduction)

    act, runs = counted(all_of_them) if recorded else (all_of_them, None)
    for _ in range(4):
        tensors = various(cell)
        want = [(t[0] + t[1]) / 2 * _FACTORS[reduction] for t in (torch.tensor(rank_values(x)) for x in tensors)]
        act(tensors)
        for got, x in zip(tensors, want, strict=True):
            first, second = rank_values(got)
            assert first == second
            assert torch.allclose(torch.tensor(first), x, atol=1e-2 if got.dtype is torch.bfloat16 else 1e-6)
    assert runs is None or runs.count == 2


def test_a_row_of_gradients_is_one_collective(cell: Any) -> None:
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    x = torch.rand(6, 8)

    def step() -> None:
        net.zero_grad()
        net(x).sum().backward()
        for p in net.parameters():
            p.grad.reduce_("gpu", "avg")

    act, _ = counted(step)
    for run in (step, act):
        for _ in range(3):
            run()
        count_collectives()
        with ml.coalescing():  # nothing leaves in between
            run()
        assert so_far() == 1
    for p in net.parameters():
        first, second = rank_values(p.grad)
        assert first == second


@pytest.mark.parametrize("recorded", [False, True])
def test_tensors_that_share_memory_are_reduced_one_after_another(cell: Any, recorded: bool) -> None:
    def twice(x: Any) -> None:
        part, same = x[1:], x.data
        x.reduce_("gpu")
        part.reduce_("gpu")
        same.reduce_("gpu")
        x.reduce_("gpu")

    act, _ = counted(twice) if recorded else (twice, None)
    for _ in range(4):
        x = torch.ones(3) + cell.rank("gpu")  # 1 and 2
        act(x)
        assert rank_values(x) == [[12.0, 24.0, 24.0]] * 2


def test_a_value_that_failed_on_one_rank_takes_no_other_with_it(cell: Any) -> None:
    table = torch.arange(4.0)
    at = torch.zeros(2, dtype=torch.int64)

    def reduced(at: Any) -> tuple[Any, Any, Any]:
        a, b, c = torch.ones(3) + cell.rank("gpu"), table[at] + 1, torch.ones(2) + cell.rank("gpu")
        for t in (a, b, c):
            t.reduce_("gpu")
        return a, b, c

    act, _ = counted(reduced)
    for run in (reduced, act):
        for _ in range(3):
            a, b, c = run(at)
            assert (rank_values(a), rank_values(b), rank_values(c)) == ([[3] * 3] * 2, [[2, 2]] * 2, [[3, 3]] * 2)
        a, b, c = run(at + 100 * cell.rank("gpu"))
        with pytest.raises(IndexError, match="out of bounds"):
            cell.sync()
        with pytest.raises(IndexError, match="out of bounds"):
            ml.inspect(b, gpu=0)
        assert rank_values(a) == [[3] * 3] * 2 and rank_values(c) == [[3, 3]] * 2
        assert rank_values(run(at)[1]) == [[2, 2]] * 2


def test_large_tensors_go_alone(cell: Any) -> None:
    tensors = [torch.ones(300_000) + cell.rank("gpu") for _ in range(3)]
    small = [torch.ones(2) for _ in range(3)]
    for _ in range(2):
        for t in (*tensors, *small):
            t.reduce_("gpu", "avg")
    count_collectives()
    with ml.coalescing():
        for t in (*tensors, *small):
            t.reduce_("gpu", "avg")
    assert so_far() == 4
    assert all(set(rank_values(t)[0]) == {1.5} for t in tensors)
