"""Results of remote functions told by ``propagate=``."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import monarch_lab as ml
from tests.controller.compare import assert_metadata_is_true, own_number, rank_values


def _waits(mesh: Any) -> int:
    return mesh.client.cache.misses


def test_a_told_result_waits_for_nothing(cell: Any) -> None:
    x = torch.ones(2, 3)

    @ml.remote(propagate=lambda x: (torch.empty(x.shape[1]), {"twice": torch.empty_like(x)}, "a word", None))
    def parts(x: Any) -> Any:
        return x.sum(0), {"twice": x * 2}, "another word", None

    before = _waits(cell)
    for _ in range(2):
        total, named, word, nothing = parts(x)
        assert word == "a word" and nothing is None
    assert _waits(cell) == before
    assert_metadata_is_true(total, named["twice"])
    assert rank_values(total) == [[2, 2, 2]] * 2 and rank_values(named["twice"])[0] == [[2, 2, 2]] * 2


def test_a_told_single_result_is_that_tensor(cell: Any) -> None:
    double = ml.remote(lambda x: x * 2, propagate=torch.empty_like)
    for _ in range(2):
        assert rank_values(double(own_number(cell))) == [0, 2]
    w = torch.ones(2).requires_grad_()
    cube = ml.remote(lambda x: x**3, propagate=lambda x: x.clone())
    cube(w).sum().backward()
    assert rank_values(w.grad) == [[3, 3]] * 2


def test_writes_and_aliases_of_the_propagator_count(cell: Any) -> None:
    fill = ml.remote(lambda x, k: (x.add_(k), x[0])[1], propagate=lambda x, k: (x.add_(k), x[0])[1])
    x = torch.zeros(2, 2)
    first = fill(x, own_number(cell))
    assert x.equal_dims == () and rank_values(x)[1] == [[1, 1], [1, 1]]
    first.zero_()
    assert rank_values(x)[1] == [[0, 0], [1, 1]]
    same = ml.remote(lambda x: x.mul_(2), propagate=lambda x: x.mul_(2))
    assert same(x) is x


def test_a_run_unlike_what_was_told_is_an_error_that_names_both(cell: Any) -> None:
    wrong = ml.remote(lambda x: torch.cat([x, x]), propagate=torch.empty_like)
    y = wrong(torch.ones(2))
    with pytest.raises(ml.RemoteException, match=r"gave \(4,\).*\(2,\)"):
        ml.inspect(y)
    cell.client.settle()
    assert rank_values(wrong(torch.ones(2))) == [[1] * 4] * 2, "learned from now on"


def test_a_leaf_told_where_there_is_none_is_an_error(cell: Any) -> None:
    w = torch.ones(2).requires_grad_()
    wrong = ml.remote(lambda w: w * 2, propagate=lambda w: torch.empty(2, requires_grad=True))
    with pytest.raises(ml.RemoteException, match="a leaf that requires grad"):
        ml.inspect(wrong(w))
    cell.client.settle()


def test_inspect_is_for_side_effects_and_gives_none(cell: Any, capsys: pytest.CaptureFixture[str]) -> None:
    @ml.remote(propagate="inspect")
    def add(x: Any, k: Any) -> Any:
        x.add_(k)
        return {"not": "sent"}

    x, own = torch.zeros(2), own_number(cell)
    before = _waits(cell)
    assert add(x, own) is None
    assert _waits(cell) == before
    assert rank_values(x) == [[0, 0], [1, 1]] and x.equal_dims == ()


def test_cached_is_what_is_done_without_a_word(cell: Any) -> None:
    twice = ml.remote(propagate="cached")(lambda x: x * 2)
    x = torch.ones(7, 3)
    before = _waits(cell)
    twice(x), twice(x)
    assert _waits(cell) == before + 1


def test_a_module_given_to_a_propagator_holds_stand_ins(cell: Any) -> None:
    net = torch.nn.Linear(2, 3)
    apply = ml.remote(lambda m, x: m(x), propagate=lambda m, x: m(x))
    out = apply(net, torch.ones(4, 2))
    assert out.shape == (4, 3) and out.requires_grad
    assert_metadata_is_true(out.detach())
    assert rank_values(out)[0] == rank_values(net(torch.ones(4, 2)))[0]


def test_wrong_propagators_are_refused(cell: Any) -> None:
    with pytest.raises(ValueError, match="propagate is"):
        ml.remote(lambda x: x, propagate="mocked")
    with pytest.raises(TypeError, match="propagate is"):
        ml.remote(lambda x: x, propagate=3)  # type: ignore[arg-type]
    y = torch.ones(2)
    with pytest.raises(TypeError, match="empty_like"):
        ml.remote(lambda x: x, propagate=lambda x: y)(torch.ones(2))


def test_a_write_that_was_not_seen_before_loses_the_argument_loudly(cell: Any) -> None:
    hidden = ml.remote(lambda x, k: (x.add_(k), x + k)[1], propagate=lambda x, k: torch.empty_like(x))
    x = torch.zeros(2)
    hidden(x, own_number(cell))
    with pytest.raises(ml.RemoteException, match="wrote to an argument"):
        ml.inspect(x)
    cell.client.settle()
