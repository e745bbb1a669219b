"""ml.compile of functions that use streams, lend tensors between them, or move values between meshes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import monarch_lab as ml
from tests.controller.compare import own_number, rank_values
from tests.controller.test_recordings import counted


@pytest.fixture
def side() -> ml.Stream:
    return ml.Stream("side")


def test_a_loan_that_begins_and_ends_inside(cell: Any, side: ml.Stream) -> None:
    a = torch.zeros(2)

    def step() -> Any:
        view, loan = side.borrow(a, mutable=True)
        with side.activate():
            view += torch.ones(2)
        loan.drop()
        return a * 2

    step, runs = counted(step)
    loans = len(cell.client.lent)
    for k in range(5):
        assert rank_values(step()) == [[2.0 * (k + 1)] * 2] * 2
        row = a[:1]  # a view that was not there when it was recorded
    assert runs.count == 2 and rank_values(a) == [[5, 5]] * 2 and rank_values(row) == [[5]] * 2
    cell.sync()
    assert len(cell.client.lent) == loans
    with side.borrow(a)[1], pytest.raises(TypeError, match="MUTATING_BORROW|Cannot borrow"):
        step()
    a.add_(1)
    assert rank_values(step()) == [[14, 14]] * 2


def test_streams_work_beside_one_another_in_a_replay(cell: Any, side: ml.Stream) -> None:
    other = ml.Stream("other")

    @ml.compile
    def step(x: Any) -> Any:
        y = x + 1
        with side.borrow(y)[1] as _:
            pass
        view, first = side.borrow(y)
        again, second = other.borrow(y)
        with side.activate():
            z = view * 10
        with other.activate():
            w = again * 100
        back, third = ml.get_active_stream().borrow(z)
        out = back + y
        for loan in (third, second, first):
            loan.drop()
        return out, z, w

    own = own_number(cell)
    for k in range(4):
        out, z, w = step(torch.full((1,), float(k)) + own)
        assert [t.stream for t in (out, z, w)] == [ml.get_active_stream(), side, other]
        assert rank_values(out) == [[11 * (k + 1)], [11 * (k + 2)]] and out.equal_dims == ("host",)
        assert rank_values(z) == [[10 * (k + 1)], [10 * (k + 2)]] and rank_values(w) == [
            [100 * (k + 1)],
            [100 * (k + 2)],
        ]


def test_values_move_between_meshes_in_a_replay(cell: Any) -> None:
    first, second = cell.slice(gpu=0), cell.slice(gpu=1)
    weight = torch.full((2,), 3.0)

    @ml.compile
    def step(x: Any) -> Any:
        there = (x.slice_mesh(gpu=0) * 2).to_mesh(second)
        both = there + weight.slice_mesh(gpu=1)
        return both.to_mesh(first), both.to_mesh(cell.slice(gpu=1)), x.reduce("gpu", mesh=first)

    for k in range(4):
        back, there, summed = step(torch.full((2,), float(k)))
        assert back.mesh is first and there.mesh is second
        assert ml.inspect(back).tolist() == ml.inspect(there).tolist() == [2 * k + 3] * 2
        assert ml.inspect(summed).tolist() == [2 * k] * 2
        weight_before = weight.tolist()
    assert weight_before == [3.0, 3.0]


def test_a_failure_of_the_borrower_reaches_the_owner_in_a_replay(cell: Any, side: ml.Stream) -> None:
    a = torch.zeros(2)
    limit = torch.zeros(2, dtype=torch.int64)

    @ml.compile
    def step(index: Any) -> Any:
        view, loan = side.borrow(a, mutable=True)
        reading, second = side.borrow(index)
        with side.activate():
            view.copy_(torch.ones(2)[reading])
        second.drop()
        loan.drop()
        return a + 1

    for _ in range(3):
        out = step(limit)
    assert rank_values(out) == [[2, 2]] * 2
    out = step(limit + 7 * own_number(cell).long())  # out of range on rank 1
    with pytest.raises(ml.RemoteException, match="out of bounds") as told:
        cell.sync()
    assert told.value.issued[0].source == "view.copy_(torch.ones(2)[reading])"
    with pytest.raises(ml.RemoteException, match="out of bounds"):
        ml.inspect(a)


def test_loans_across_the_border_of_a_recording(cell: Any, side: ml.Stream) -> None:
    a = torch.zeros(2)
    kept: list[Any] = []

    def leaves_it_open() -> None:
        kept[:] = side.borrow(a)

    with pytest.raises(RuntimeError, match=r"without ending the loan.*drop\(\) inside"):
        ml.compile(leaves_it_open)()
    kept[1].drop()
    view, loan = side.borrow(a)

    @ml.compile
    def uses_it() -> Any:
        with side.activate():
            return view + 1

    for _ in range(4):
        assert rank_values(uses_it()) == [[1, 1]] * 2
    with pytest.raises(TypeError, match="loan that began before"):
        ml.compile(lambda: loan.drop())()
    loan.drop()
    with pytest.raises(TypeError, match="DROPPED"):
        uses_it()
    with pytest.raises(TypeError, match="lends or moves a literal"):
        ml.compile(lambda: torch.tensor([1.0, 2.0]).to_mesh(cell))()
    leaf = torch.ones(2, requires_grad=True)
    with pytest.raises(TypeError, match="requires grad at .* cannot be part"):
        ml.compile(lambda: (leaf * 2).to_mesh(cell).detach())()
