"""Ops that can fail on values, inside the user's ``try`` (rule 8)."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import monarch_lab as ml
from monarch_lab.controller.tries import can_fail, except_blocks
from tests.controller.compare import run_on_both


def index(*values: int) -> Any:
    return torch.tensor(values)


CASES = {
    "index": lambda bad: torch.arange(5.0)[index(1, 9 if bad else 2)],
    "embedding": lambda bad: F.embedding(index(0, 7 if bad else 1), torch.ones(3, 2)),
    "gather": lambda bad: torch.arange(5.0).gather(0, index(1, 9 if bad else 2)),
    "scatter_": lambda bad: torch.zeros(5).scatter_(0, index(1, 9 if bad else 2), 1.0),
    "cross_entropy": lambda bad: F.cross_entropy(torch.zeros(2, 3), index(0, 5 if bad else 1)),
    "cholesky": lambda bad: torch.linalg.cholesky(torch.eye(2) * torch.tensor([-1.0 if bad else 2.0, 1.0])),
    "inv": lambda bad: torch.linalg.inv(torch.eye(2) * torch.tensor([0.0 if bad else 2.0, 1.0])),
    "multinomial": lambda bad: torch.multinomial(torch.tensor([-1.0 if bad else 1.0, 2.0]), 1),
    "floor_divide": lambda bad: index(4, 6) // index(2, 0 if bad else 3),
}


@pytest.mark.parametrize("name", CASES)
def test_an_error_in_a_try_comes_to_its_except(cell: Any, name: str) -> None:
    case = CASES[name]
    for _ in range(2):  # the first is waited for in any case
        case(False)
    after, caught = [], None
    try:
        case(True)
        after.append("not reached")
    except (RuntimeError, IndexError) as e:
        caught = e
    assert isinstance(caught, ml.RemoteException)
    assert after == []
    cell.sync()  # and is not raised again
    case(False)


def test_the_try_of_a_caller_counts_and_so_does_the_one_around_a_user_s_function(cell: Any) -> None:
    x = torch.arange(5.0)

    @ml.remote
    def check(t: Any) -> Any:
        if t.sum() > 100:
            raise ZeroDivisionError("mine")
        return t * 1

    def inner(i: Any) -> Any:
        return x[i].sum()

    inner(index(1, 2))
    check(x)
    try:
        inner(index(1, 9))
    except IndexError:
        pass
    else:
        raise AssertionError("not caught")
    try:
        check(x * 100)
    except ZeroDivisionError:
        pass
    else:
        raise AssertionError("not caught")


def test_without_a_try_nothing_waits_and_the_error_comes_at_the_end(cell: Any) -> None:
    x = torch.arange(5.0)
    x[index(1, 2)]
    y = x[index(1, 9)]
    with contextlib.suppress(IndexError):  # a ``with`` is no try
        y = x[index(1, 8)]
    with pytest.raises(IndexError):
        cell.sync()
    assert y.shape == (2,)


def test_an_error_from_before_the_try_is_not_caught_there(cell: Any) -> None:
    x = torch.arange(5.0)
    x[index(1, 2)]
    x[index(1, 9)]
    caught = []
    try:
        x[index(0, 1)]
    except IndexError as e:
        caught.append(e)
    assert caught == []
    with pytest.raises(IndexError):
        cell.sync()


def test_the_target_of_an_op_that_failed_is_as_in_eager_torch(mesh: Any) -> None:
    def run() -> Any:
        x = torch.zeros(3)
        x[index(0, 1)] = 1.0
        try:
            x[index(7, 0)] = 5.0
        except IndexError:
            x += 1
        return x

    run_on_both(mesh, run)


def test_a_loop_that_goes_on_after_errors(cell: Any) -> None:
    x, good, bad = torch.arange(5.0), [], 0
    for k in (1, 9, 2, 8, 3):
        try:
            good.append(x[index(0, k)].sum())
        except IndexError:
            bad += 1
    assert [g.item() for g in good] == [1, 2, 3] and bad == 2


def test_a_backward_pass_in_a_try(cell: Any) -> None:
    w = torch.ones(2).requires_grad_()

    def step(scale: float) -> None:
        loss = (w * scale).sqrt().sum()
        loss.backward()

    with torch.autograd.set_detect_anomaly(True):
        for _ in range(3):
            step(1.0)
        try:
            step(-1.0)
        except RuntimeError as e:
            assert "nan" in str(e)
        else:
            raise AssertionError("not caught")


def _blocks(source: str) -> list[str]:
    """Lines of calls in the source that are in a block with an ``except``."""
    import dis

    code = compile(source, "<test>", "exec")
    blocks = except_blocks(code)
    lines = {
        i.argval
        for i in dis.get_instructions(code)
        if i.opname == "LOAD_NAME" and any(a <= i.offset < b for a, b in blocks)
    }
    return sorted(lines - {"ValueError", "KeyError", "cm", "x"})


def test_what_is_a_try() -> None:
    assert _blocks("try:\n a()\nexcept ValueError:\n b()\nelse:\n c()") == ["a"]
    assert _blocks("try:\n a()\nexcept:\n b()") == ["a"]
    assert _blocks("try:\n a()\nexcept (ValueError, KeyError) as e:\n b()\nfinally:\n c()") == ["a"]
    assert _blocks("try:\n a()\nexcept* ValueError:\n b()") == ["a"]
    assert _blocks("try:\n a()\nfinally:\n b()") == []
    assert _blocks("with cm:\n a()") == []
    assert _blocks("with cm as x:\n a()\nb()") == []
    assert _blocks("try:\n a()\nfinally:\n try:\n  b()\n except ValueError:\n  c()") == ["b"]
    assert _blocks("for x in y:\n a()") == []


def test_which_functions_can_fail(cell: Any) -> None:
    x, i = torch.zeros(2), index(0, 1)
    for func in (torch.linalg.inv, F.embedding, torch.Tensor.scatter_, torch.multinomial):
        assert can_fail(func, [x]), func
    for func in (torch.add, torch.matmul, torch.Tensor.__mul__, F.gelu, torch.Tensor.view, torch.Tensor.__getitem__):
        assert not can_fail(func, [x]), func
    assert can_fail(torch.Tensor.__getitem__, [x, i]) and can_fail(torch.remainder, [i, i])
    assert not can_fail(torch.Tensor.__floordiv__, [x, i])
