"""Ops that fail on the workers: told once with the user's line, what hangs on them fails too, the rest is whole."""

from __future__ import annotations

import inspect
import threading
from typing import Any

import pytest
import torch

import monarch_lab as ml
from tests.controller.compare import by_rank, own_number, rank_values


def line() -> int:
    return inspect.currentframe().f_back.f_lineno  # type: ignore[union-attr]


@pytest.fixture
def table(cell: Any) -> Any:
    """Rows to look up; looking up was done before, so that the next time nobody waits for it."""
    table = torch.arange(4.0)
    at = torch.zeros(2, dtype=torch.int64)
    for _ in range(2):
        ((table[at] + 1).sum().reduce("gpu") * 2 + 1, (table + 1) * 2)
        torch.zeros(2).add_(table[at])
    cell.sync()
    return table


def bad_index(everywhere: bool = False) -> Any:
    mesh = ml.get_active_mesh()
    return torch.zeros(2, dtype=torch.int64) + 100 * (1 if everywhere else mesh.rank("gpu"))


def test_a_failure_that_was_reported_before_anyone_waited_is_every_rank_s(cell: Any, table: Any) -> None:
    bad = (table[bad_index()] + 1).sum().reduce("gpu")
    cell.client.flush()
    reported = threading.Event()
    cell.client.after_all(reported.set)
    assert reported.wait(30)
    with pytest.raises(IndexError):
        cell.sync()
    with pytest.raises(IndexError, match="out of bounds"):
        ml.inspect(bad, gpu=0)


@pytest.mark.parametrize("everywhere", [True, False])
def test_a_failure_is_reported_once_with_the_users_line(cell: Any, table: Any, everywhere: bool) -> None:
    at = bad_index(everywhere)
    bad, number = table[at], line()
    with pytest.raises(IndexError, match="out of bounds") as raised:
        cell.sync()
    error = raised.value
    assert isinstance(error, ml.RemoteException)
    assert error.issued[0].line == error.line == number and error.issued[0].filename == error.cell == __file__
    assert "table[at]" in error.issued[0].source
    assert error.ranks == ((0, 1) if everywhere else (1,)) and set(error.by_rank) == set(error.ranks)
    assert isinstance(error.exception, IndexError)
    cell.sync()
    del bad


def test_what_hangs_on_a_failure_fails_on_every_rank_and_the_rest_is_whole(cell: Any, table: Any) -> None:
    at = bad_index()
    good = table + 1
    bad = table[at]
    after = bad + 1
    reduced = after.sum().reduce("gpu")
    further = reduced * 2
    other = good * 2
    with pytest.raises(IndexError):
        cell.sync()
    for value in (bad, after, reduced, further):
        for gpu in range(2):
            with pytest.raises(IndexError, match="out of bounds"):
                ml.inspect(value, gpu=gpu)
        with pytest.raises(IndexError):
            ml.fetch_all(value)
        assert "out of bounds" in repr(value), "printing never raises"
    assert ml.inspect(good, gpu=1).tolist() == [1, 2, 3, 4] and other.tolist() == [2, 4, 6, 8]
    with pytest.raises(IndexError):
        further + 1  # noqa: B018
        cell.sync()
        ml.inspect(further + 1)


def test_a_later_cell_works(cell: Any, table: Any) -> None:
    bad = table[bad_index()]
    with pytest.raises(IndexError):
        cell.sync()
    assert (table[torch.tensor([1, 2])] + 1).tolist() == [2, 3]
    assert rank_values((own_number(cell) + table).reduce("gpu"))[0] == [1, 3, 5, 7]
    del bad


def test_fetching_a_value_that_hangs_on_a_failure_raises_the_cause(cell: Any, table: Any) -> None:
    at = bad_index(True)
    wrong, number = table[at], line()
    value = (wrong + 1).sum()
    with pytest.raises(IndexError, match="out of bounds") as raised:
        value.item() if value.equal_dims == ("host", "gpu") else ml.inspect(value)
    assert raised.value.issued[0].line == number
    cell.sync()


def test_a_reduced_value_is_never_told_with_zeros_for_a_failed_rank(cell: Any, table: Any) -> None:
    reads = [
        lambda z: f"{z}",
        lambda z: z.item(),
        lambda z: float(z),
        lambda z: torch.equal(z, z),
        lambda z: torch.allclose(z, z),
        lambda z: z.numpy(),
        lambda z: ml.inspect(z),
        lambda z: ml.fetch_all(z),
        lambda z: ml.call_on_shard_and_fetch(lambda t: t.item(), z, shard={"host": 0, "gpu": 0}).result(),
    ]
    for read in reads:
        at = bad_index()
        reduced = (table[at] + 1).sum().reduce("gpu")
        with pytest.raises(IndexError):
            read(reduced)
        del reduced
        try:
            cell.sync()
        except IndexError:
            pass


def test_a_tensor_that_was_written_from_a_failed_one_is_not_told_as_good(cell: Any, table: Any) -> None:
    total = torch.zeros(2)
    total.add_(table[bad_index()])
    with pytest.raises(IndexError):
        cell.sync()
    outcomes = []
    for gpu in range(2):
        try:
            outcomes.append(ml.inspect(total, gpu=gpu).tolist())
        except IndexError:
            outcomes.append("failed")
    assert outcomes == ["failed"] * 2 or outcomes[0] == outcomes[1]


def test_several_failures_are_told_as_one_and_nothing_is_left(cell: Any, table: Any) -> None:
    at = bad_index(True)
    first, number = table[at], line()
    second = table[at]
    with pytest.raises(IndexError) as raised:
        cell.sync()
    assert raised.value.issued[0].line == number
    cell.sync()
    for value in (first, second):
        with pytest.raises(IndexError):
            ml.inspect(value)


def test_a_failed_backward_is_told_and_leaves_the_weights(cell: Any) -> None:
    @ml.remote
    def careful(x: Any, limit: Any) -> Any:
        y = x * 2
        y.register_hook(lambda g: g if limit.item() < 1 else _stop())
        return y

    def _stop() -> Any:
        raise ValueError("in the backward pass")

    w = torch.ones(2).requires_grad_()
    for _ in range(3):
        w.grad = None
        careful(w, torch.zeros(1)).sum().backward()
    cell.sync()
    w.grad = None
    with pytest.raises(ValueError, match="in the backward pass"):
        careful(w, own_number(cell).reshape(1)).sum().backward()
        cell.sync()
    assert rank_values(w) == [[1, 1], [1, 1]]
    w.grad = None
    (w * 3).sum().backward()
    assert rank_values(w.grad) == [[3, 3], [3, 3]]


def test_a_remote_function_that_raises_on_one_rank_names_it(cell: Any) -> None:
    @ml.remote
    def picky(r: Any) -> Any:
        if r.item() == 1:
            raise RuntimeError("not on this rank")
        return r

    with pytest.raises(RuntimeError, match="not on this rank.*rank 1") as raised:
        picky(cell.rank("gpu"))
    assert raised.value.ranks == (1,) and raised.value.by_rank[1].type_name == "RuntimeError"
    assert "picky" in raised.value.worker_traceback and 'raise RuntimeError("not on this rank")' in (
        raised.value.worker_traceback
    )
    assert picky(torch.zeros(())).shape == ()


def test_a_learned_remote_function_that_raises_later_names_the_line(cell: Any) -> None:
    @ml.remote
    def picky(x: Any) -> Any:
        return torch.arange(4.0)[x]

    for _ in range(2):
        picky(torch.ones(2, dtype=torch.int64))
    bad, number = picky(cell.rank("gpu").expand(2).contiguous() * 9), line()
    with pytest.raises(LookupError, match="out of bounds") as raised:
        cell.sync()
    assert raised.value.issued[0].line == number and raised.value.ranks == (1,)
    for gpu in range(2):
        with pytest.raises(LookupError):
            ml.inspect(bad, gpu=gpu)


def test_an_exception_that_cannot_be_unpickled_comes_with_its_name_and_text(cell: Any) -> None:
    @ml.remote
    def fail(x: Any) -> Any:
        class Local(Exception):
            def __init__(self, a: int, b: int) -> None:
                super().__init__(f"{a} and {b}")

        raise Local(1, 2)

    with pytest.raises(ml.RemoteException, match="Local: 1 and 2") as raised:
        fail(torch.ones(1))
    assert raised.value.exception == "Local: 1 and 2" or str(raised.value.exception) == "1 and 2"
    assert raised.value.first.type_name == "Local"


def test_an_exception_with_a_lock_inside_comes_with_its_name_and_text(cell: Any) -> None:
    @ml.remote
    def fail(x: Any) -> Any:
        import threading

        error = ValueError("holds a lock")
        error.lock = threading.Lock()  # type: ignore[attr-defined]
        raise error

    with pytest.raises(ml.RemoteException, match="holds a lock"):
        fail(torch.ones(1))


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, GeneratorExit])
def test_a_function_that_tries_to_end_its_worker_ends_itself_alone(mesh: Any, kind: type[BaseException]) -> None:
    @ml.remote
    def leave(x: Any) -> Any:
        raise kind("leaving")

    with mesh.activate():
        with pytest.raises((ml.RemoteException, KeyboardInterrupt)):
            leave(torch.ones(1))
        assert torch.ones(1).reduce("gpu").item() == 2
    assert mesh.state == "live"


def test_a_failed_collective_takes_nobody_out_of_step(cell: Any, table: Any) -> None:
    for _ in range(3):
        bad = (table[bad_index()] + 1).sum().reduce("gpu")
        good = own_number(cell).reduce("gpu")
        with pytest.raises(IndexError):
            cell.sync()
        assert good.item() == 1
        del bad


def test_a_failed_optimizer_step_can_be_done_again(cell: Any, table: Any) -> None:
    w = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([w], 0.5)
    for at in (torch.zeros(2, dtype=torch.int64), torch.ones(2, dtype=torch.int64)):
        optimizer.zero_grad()
        (w * table[at]).sum().backward()
        optimizer.step()
    assert w.tolist() == [0.5, 0.5]
    optimizer.zero_grad()
    with pytest.raises(IndexError):
        (w * table[bad_index(True)]).sum().backward()
        cell.sync()
    assert w.tolist() == [0.5, 0.5]
    optimizer.zero_grad()
    (w * table[torch.ones(2, dtype=torch.int64)]).sum().backward()
    optimizer.step()
    assert w.tolist() == [0, 0]
    assert all(torch.equal(*by_rank(p)) for p in [w])
