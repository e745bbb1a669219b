"""Integers that change from call to call: the value is that of plain torch, and calls of one kind do not wait."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.controller.compare import assert_metadata_is_true, run_on_both
from tests.controller.recorded import Runs, counted, values

_TURNS = 7


def table() -> Any:
    return torch.arange(96.0).view(12, 8)


_INDEXED: dict[str, Callable[[Any, int], Any]] = {
    "row": lambda x, i: x[i],
    "row from the end": lambda x, i: x[-i - 1],
    "element": lambda x, i: x[i, 7 - i],
    "column": lambda x, i: x[:, i],
    "last dim": lambda x, i: x[..., i],
    "minibatch": lambda x, i: x[i : i + 4],
    "step": lambda x, i: x[i : i + 5 : 2],
    "two dims": lambda x, i: x[i : i + 2, 1 : 3 + i % 2],
    "new dim": lambda x, i: x[None, i, ..., None],
    "select": lambda x, i: x.select(0, i) + torch.select(x, -2, -i - 1),
    "narrow": lambda x, i: x.narrow(0, i, 3) * torch.narrow(x, 1, i % 3, 5).sum(),
    "view of a view": lambda x, i: x[i : i + 4][1, i:],
    "of a transpose": lambda x, i: x.t()[i % 8, i : i + 2],
}


@pytest.mark.parametrize("name", list(_INDEXED))
def test_a_basic_index_gives_the_same_view_wherever_it_is(mesh: Any, name: str) -> None:
    def run() -> Any:
        x = table()
        found = [_INDEXED[name](x, i) for i in range(_TURNS)]
        x += 1  # the results that are views see it
        return [*found, *[f.storage_offset() for f in found], *[f.is_contiguous() for f in found]]

    far, _ = run_on_both(mesh, run)
    for view in far[:_TURNS]:
        assert_metadata_is_true(view)


@pytest.mark.parametrize("name", list(_INDEXED))
def test_a_basic_index_that_moves_waits_a_bounded_number_of_times(cell: Any, name: str) -> None:
    misses = cell.client.cache
    x = table()
    for i in range(3):
        _INDEXED[name](x, i)
    learned = misses.misses
    for i in range(3, _TURNS):
        _INDEXED[name](x, i)
    new_lengths = name == "view of a view"  # x[i:] is shorter each time
    assert misses.misses == learned or new_lengths


def test_writes_through_an_index_that_moves(mesh: Any) -> None:
    def run() -> Any:
        x = table()
        whole = torch.zeros(12, dtype=torch.int64)
        for i in range(_TURNS):
            x[i] = 1.5 * i
            x[i, i] = i
            x[i : i + 2, 7] = i + 100
            x[-1 - i] += x[i]
            whole[i] = i * 1_000_000
            x[2 * i % 12 : 2 * i % 12 + 1] = table()[i]
        return x, whole

    run_on_both(mesh, run)


def test_what_is_out_of_range_is_an_error_of_the_line(cell: Any) -> None:
    x = table()
    for i in (0, 5, 11):
        x[i]
    for wrong in (lambda: x[12], lambda: x[-13], lambda: x[0, 8], lambda: x.select(0, 12), lambda: x[0, 0, 0]):
        with pytest.raises(IndexError):
            wrong()
    with pytest.raises(RuntimeError, match="exceeds dimension"):
        x.narrow(0, 10, 3)
    with pytest.raises(ValueError, match="step must be greater than zero"):
        x[5:0:-1]
    with pytest.raises(IndexError):
        x[12] = 0.0


def test_slices_that_reach_beyond_the_end_are_cut(mesh: Any) -> None:
    def run() -> Any:
        x = table()
        return [x[i : i + 5] for i in range(6, 14)] + [x[-100:3], x[5:2], x[3:3], x[:], x[0:12], x[-3:], x[:-10]]

    far, _ = run_on_both(mesh, run)
    for view in far:
        assert_metadata_is_true(view)


def test_gradients_go_through_an_index_that_moves(mesh: Any) -> None:
    def run() -> Any:
        w = table().requires_grad_()
        for i in range(_TURNS):
            (w[i].sum() * i + (w[i : i + 2] ** 2).sum()).backward()
        y = table().requires_grad_()
        z = y * 1
        for i in range(3):
            z[i] = z[i + 1] * 2
        z.sum().backward()
        return w.grad, y.grad, z.detach()

    run_on_both(mesh, run)


_DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
)
_ARITHMETIC: dict[str, Callable[[Any, int], Any]] = {
    "x + n": lambda x, n: x + n,
    "n + x": lambda x, n: n + x,
    "x - n": lambda x, n: x - n,
    "n - x": lambda x, n: n - x,
    "x * n": lambda x, n: x * n,
    "x / n": lambda x, n: x / n,
    "n / x": lambda x, n: n / (x + 1),
    "x == n": lambda x, n: x == n,
    "x < n": lambda x, n: x < n,
    "clamp": lambda x, n: x.clamp(0, n),
    "fill": lambda x, n: x.clone().fill_(n),
    "full_like": lambda x, n: torch.full_like(x, n),
    "masked": lambda x, n: x.masked_fill(x == 0, n),
    "where": lambda x, n: torch.where(x == 0, x, n),
    "floor": lambda x, n: _or_error(lambda: x // n) if n else 0,
    "mod": lambda x, n: _or_error(lambda: x % n) if n else 0,
    "alpha": lambda x, n: torch.add(x, x, alpha=n),
    "value": lambda x, n: x.addcmul(x, x, value=n),
    "limits": lambda x, n: x.clamp(min=-n, max=n),
    "in place": lambda x, n: x.clone().mul_(n),
}


def _or_error(fn: Callable[[], Any]) -> Any:
    try:
        return fn()
    except (RuntimeError, TypeError):  # of a worker: a RemoteException
        return "error"


@pytest.mark.parametrize("dtype", _DTYPES, ids=str)
@pytest.mark.parametrize("name", list(_ARITHMETIC))
def test_an_int_beside_a_tensor_means_what_it_means_in_torch(mesh: Any, name: str, dtype: torch.dtype) -> None:
    def run() -> Any:
        x = torch.tensor([0, 1, 3, 7]).to(dtype)
        return [_or_error(lambda n=n: _ARITHMETIC[name](x, n)) for n in (0, 1, 2, 5, 100, -3, 127, 300, 70_000)]

    far, _ = run_on_both(mesh, run, 2e-2 if dtype is torch.bfloat16 else 1e-6)
    for made in far:
        if isinstance(made, torch.Tensor):
            assert_metadata_is_true(made)


def test_ints_beyond_what_a_message_holds_are_right(mesh: Any) -> None:
    def run() -> Any:
        x = torch.tensor([1, 2])
        return [x + n for n in (2**31, 2**53 - 1, 2**53 + 1, 2**62, -(2**62), 2**63 - 1)]

    run_on_both(mesh, run)


def test_a_count_beside_a_tensor_waits_for_nothing(cell: Any) -> None:
    x = torch.ones(3)
    total = torch.zeros(3)
    for n in range(4):
        total += x * n / (n + 2) - n
    misses = cell.client.cache.misses
    for n in range(4, 50):
        total += x * n / (n + 2) - n
        torch.full_like(x, n)
        torch.add(x, n)
    assert cell.client.cache.misses - misses <= 2  # full_like and torch.add, once


def test_a_recording_serves_every_minibatch(mesh: Any) -> None:
    counts: list[Runs] = []

    def run() -> Any:
        data, target = torch.rand(40, 4), torch.rand(40, 2)
        net = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)

        def step(x: Any, y: Any) -> Any:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(net(x), y)
            loss.backward()
            optimizer.step()
            return loss.detach()

        recorded, runs = counted(step)
        counts.append(runs)
        losses = [recorded(data[n : n + 8], target[n : n + 8]) for n in range(0, 32, 2)]
        return losses, [p.detach() for p in net.parameters()]

    run_on_both(mesh, run)
    assert [runs.count for runs in counts] in ([16, 2], [16, 3])  # in plain torch each time


def test_ints_within_a_recording_are_those_of_its_run(cell: Any) -> None:
    x = torch.arange(10.0)

    def part(n: int) -> Any:
        return x[n : n + 2] * n + x[n + 2]

    recorded, runs = counted(part)
    for _ in range(3):
        for n in (2, 3, 5):
            assert values(recorded(n)) == [n * n + n + 2, (n + 1) * n + n + 2]
    assert runs.count == 6
