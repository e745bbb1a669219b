"""ml.compile: what diverges, what a replay could not do, and failures inside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import monarch_lab as ml
from monarch_lab.errors import RemoteException, UsageTypeError
from tests.controller.recorded import values

# --- divergence


def test_a_function_that_does_something_else_diverges_at_a_line(cell: Any) -> None:
    turns: list[int] = []

    def other(x: Any) -> Any:
        turns.append(1)
        y = x + 1
        return y * 2 if len(turns) % 2 else y - 2

    hidden = ml.compile(_Hidden(other))
    hidden(torch.ones(2))
    with pytest.raises(RuntimeError, match=r"diverges at operation 1: .*return y \* 2 if len"):
        hidden(torch.ones(2))


def test_a_number_that_changes_diverges_and_is_named(cell: Any) -> None:
    state = iter((0.25, 0.5))
    hidden = ml.compile(_Hidden(lambda x: x * next(state)))
    hidden(torch.ones(2))
    with pytest.raises(RuntimeError, match=r"diverges at operation 0: .* with 0.25, .* with 0.5"):
        hidden(torch.ones(2))


def test_another_result_diverges(cell: Any) -> None:
    state = iter((1, 2))
    hidden = ml.compile(_Hidden(lambda x: [x + 1] * next(state)))
    hidden(torch.ones(2))
    with pytest.raises(RuntimeError, match="diverges in its result"):
        hidden(torch.ones(2))


class _Hidden:
    """A function whose outer variables are not looked at: its recording stands or falls by what it does."""

    __slots__ = ("fn",)

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.fn = fn

    def __call__(self, *args: Any) -> Any:
        return self.fn(*args)


# --- what a replay could not do


@pytest.mark.parametrize(
    ("fn", "told"),
    [
        (lambda x: x.item() if x.dim() == 0 else x.sum().item(), "fetching a value"),
        (lambda x: x.tolist(), "fetching a value"),
        (lambda x: bool(x.sum() > 0), "fetching a value"),
        (lambda x: ml.inspect(x), "fetching a value"),
        (lambda x: x.nonzero(), "nonzero, whose result hangs on the values"),
        (lambda x: x[x > 0], "whose result hangs on the values"),
        (lambda x: ml.get_active_mesh().replicate(torch.ones(2)), "a local value put on the mesh"),
        (lambda x: torch.manual_seed(3), "a seed"),
    ],
)
def test_what_a_replay_could_not_do_is_refused_at_its_line(cell: Any, fn: Any, told: str) -> None:
    def function(x: Any) -> Any:
        y = x + 1
        return fn(y)

    compiled = ml.compile(function)
    for _ in range(2):
        with pytest.raises(TypeError, match=rf"{told}.* cannot be part of the recording of .*function") as caught:
            compiled(torch.ones(2))
        assert any(entry.name == "function" for entry in caught.traceback)
    assert cell.client.recorder is None
    assert values(torch.ones(2) + 1) == [2.0] * 2


def test_after_an_exception_nothing_is_half_recorded(cell: Any) -> None:
    broken = True

    @ml.compile
    def step(x: Any) -> Any:
        y = x + 1
        if broken:
            raise KeyError("mine")
        return y * 2

    for _ in range(2):
        with pytest.raises(KeyError, match="mine"):
            step(torch.ones(2))
    broken = False
    for _ in range(4):
        assert values(step(torch.ones(2))) == [4.0] * 2
    assert cell.client.recorder is None


def test_only_plain_functions_are_compiled(cell: Any) -> None:
    async def later() -> None: ...

    with pytest.raises(UsageTypeError, match="plain function"):
        ml.compile(later)
    with pytest.raises(UsageTypeError, match="takes a function"):
        ml.compile(3)
    double = ml.compile(lambda x: x)
    assert ml.compile(double) is double and "compiled" in repr(double)


def test_another_mesh_cannot_be_part_of_a_recording(cell: Any) -> None:
    with ml.local_mesh(gpus_per_host=1, device="cpu", name="other") as other:
        with other.activate():
            far = torch.ones(2)

        @ml.compile
        def both(x: Any) -> Any:
            far.add_(1)
            return x + 1

        with pytest.raises(TypeError, match="an op on another mesh"):
            both(torch.ones(2))
        assert values(torch.ones(2) + 1) == [2.0] * 2


# --- failures inside


_OUT = "index out of range"


def look_up(index: Any, table: Any) -> Any:
    """Fails on a rank whose index is above 2, with IndexError."""
    return torch.nn.functional.embedding(index, table)


def test_a_failure_inside_names_its_own_line_and_spreads_as_without(cell: Any) -> None:
    counter, table = torch.zeros(2), torch.arange(3.0).reshape(3, 1)

    @ml.compile
    def step(x: Any) -> Any:
        counter.add_(1)
        fine = x * 2
        wrong = torch.nn.functional.embedding(x, table)  # this line
        counter.add_(1)
        return fine, wrong * 2

    good, bad = torch.tensor([1]), torch.tensor([7])
    for _ in range(3):
        step(good)
    fine, wrong = step(bad)
    with pytest.raises(IndexError, match=_OUT) as caught:
        cell.sync()
    assert isinstance(caught.value, RemoteException) and caught.value.ranks == (0, 1)
    assert "# this line" in caught.value.issued[0].source
    assert values(fine) == [14]
    with pytest.raises(RemoteException, match=_OUT):
        ml.inspect(wrong)
    assert values(counter) == [8.0] * 2
    assert values(step(good)[1]) == [[2.0]]


def test_one_rank_fails_and_the_others_do_not_wait_for_it(cell: Any) -> None:
    table = torch.arange(3.0).reshape(3, 1)

    @ml.compile
    def step(index: Any) -> Any:
        return (torch.nn.functional.embedding(index, table) + 0).reduce("gpu", "sum")

    good, bad = torch.tensor([1]) * cell.rank("gpu"), torch.tensor([7]) * cell.rank("gpu")
    for _ in range(3):
        assert values(step(good)) == [[1.0]]
    total = step(bad)
    with pytest.raises(RemoteException, match=_OUT) as caught:
        cell.sync()
    assert caught.value.ranks == (1,)
    with pytest.raises(RemoteException, match=_OUT):
        ml.inspect(total, host=0, gpu=0)
    assert values(step(good)) == [[1.0]]


def test_a_failed_input_fails_what_reads_it_alone(cell: Any) -> None:
    table = torch.arange(3.0).reshape(3, 1)

    @ml.compile
    def step(x: Any, y: Any) -> Any:
        return x + 1, y + 1

    for k in (0, 1, 2):
        step(look_up(torch.tensor([k]), table), torch.ones(2))
    a, b = step(look_up(torch.tensor([7]), table), torch.ones(2))
    with pytest.raises(RemoteException, match=_OUT):
        cell.sync()
    assert values(b) == [2.0] * 2
    with pytest.raises(RemoteException, match=_OUT):
        ml.inspect(a)
