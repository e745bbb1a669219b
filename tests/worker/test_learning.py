"""A first run, described: results, aliases, writes, and whether it may be believed again. In one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from monarch_lab.worker.learning import learn, structure


def answer_of(function: Callable[..., Any], *inputs: Any) -> Any:
    return learn(1, lambda tensors, numbers: function(*tensors), list(inputs), [])[0]


def test_a_result_is_a_new_value_an_input_or_an_earlier_result() -> None:
    x = torch.ones(2)
    y = x * 2
    assert answer_of(lambda t: t * 2, x).keeps == [-1]
    assert answer_of(lambda t: (t, t * 2), x).keeps == [0, -1]
    assert answer_of(lambda t: (y, y), x).keeps == [-1, -2]


def test_views_are_told_from_values_of_their_own() -> None:
    x = torch.ones(2, 2)
    assert answer_of(lambda t: t[0], x).aliases == [0] and answer_of(lambda t: t.clone(), x).aliases == [-1]
    assert answer_of(lambda t: t.detach(), x).aliases == [0]
    both = answer_of(lambda t: (lambda y: (y, y[0]))(t * 2), x)
    assert both.aliases == [-1, -2]


_WRITES: dict[str, Callable[[Any, Any], Any]] = {
    "add_": lambda x, y: x.add_(y),
    "data": lambda x, y: x.data.add_(y),
    "detach": lambda x, y: x.detach().add_(y),
    "view": lambda x, y: x[0].add_(1),
    "out": lambda x, y: torch.add(y, y, out=x),
    "foreach": lambda x, y: torch._foreach_add_([x], 1.0),
    "setitem": lambda x, y: x.__setitem__(0, 5.0),
    "batch_norm": lambda x, y: F.batch_norm(y.view(2, 1), x[:1], x[1:], training=True),
    "copy_": lambda x, y: x.copy_(y),
}


@pytest.mark.parametrize("name", list(_WRITES))
@pytest.mark.parametrize("inference", [False, True])
def test_a_write_to_an_input_is_seen(name: str, inference: bool) -> None:
    with torch.inference_mode(inference):
        x, y = torch.ones(2), torch.full((2,), 3.0)
        assert 0 in answer_of(_WRITES[name], x, y).mutated
        assert 1 not in answer_of(_WRITES[name], torch.ones(2), y).mutated


_READS: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda x, y: x + y,
    "batch_norm in evaluation": lambda x, y: F.batch_norm(y.view(2, 1), x[:1], x[1:], training=False),
    "clone written": lambda x, y: x.clone().add_(y),
    "views": lambda x, y: (x.t(), x.view(-1)),
}


@pytest.mark.parametrize("name", list(_READS))
@pytest.mark.parametrize("inference", [False, True])
def test_a_read_is_no_write(name: str, inference: bool) -> None:
    with torch.inference_mode(inference):
        assert answer_of(_READS[name], torch.ones(2), torch.full((2,), 3.0)).mutated == []


_DYNAMIC: dict[str, Callable[[Any], Any]] = {
    "nonzero": lambda x: x.nonzero(),
    "mask": lambda x: x[x > 0],
    "masked_select": lambda x: x.masked_select(x > 0),
    "unique": lambda x: torch.unique(x),
    "item": lambda x: torch.zeros(int(x.sum().item())),
    "bincount": lambda x: torch.bincount(x.long()),
    "repeat_interleave": lambda x: torch.repeat_interleave(x, x.long()),
    "one_hot": lambda x: F.one_hot(x.long()),
    "to_sparse": lambda x: x.to_sparse(),
    "python": lambda x: 3,
    "where": lambda x: torch.where(x > 0),
    "tolist": lambda x: torch.tensor(x.tolist()),
}
_STATIC: dict[str, Callable[[Any], Any]] = {
    "add": lambda x: x + 1,
    "index": lambda x: x[torch.tensor([0, 0])],
    "where": lambda x: torch.where(x > 0, x, 0.0),
    "masked_fill": lambda x: x.masked_fill(x > 0, 1.0),
    "sort": lambda x: x.sort(),
    "rand": lambda x: torch.rand_like(x),
    "svd": lambda x: torch.linalg.svd(x.view(1, 2)),
}


@pytest.mark.parametrize("name", list(_DYNAMIC))
def test_what_hangs_on_values_is_never_believed_again(name: str) -> None:
    assert answer_of(_DYNAMIC[name], torch.tensor([1.0, 2.0])).dynamic


@pytest.mark.parametrize("name", list(_STATIC))
def test_what_hangs_on_metadata_alone_is_believed(name: str) -> None:
    assert not answer_of(_STATIC[name], torch.tensor([1.0, 2.0])).dynamic


@pytest.mark.parametrize(
    ("function", "random"),
    [
        (lambda x: torch.rand_like(x), True),
        (lambda x: F.dropout(x), True),
        (lambda x: F.dropout(x, 0.0), False),
        (lambda x: F.dropout(x, training=False), False),
        (lambda x: x.normal_(), True),
        (lambda x: torch.multinomial(x, 1), True),
        (lambda x: x + 1, False),
    ],
)
def test_drawing_random_numbers_is_seen(function: Any, random: bool) -> None:
    assert answer_of(function, torch.ones(2)).random == random


def test_changed_metadata_of_inputs_is_told() -> None:
    x = torch.ones(2, 3)
    assert answer_of(lambda t: t.t_(), x).after[0][1].shape == (3, 2)
    assert answer_of(lambda t: t.requires_grad_(), torch.ones(1)).after[0][1].requires_grad
    assert answer_of(lambda t: t + 1, torch.ones(1)).after == []


def test_the_structure_of_a_result_is_kept() -> None:
    tensors: list[Any] = []
    values: list[Any] = []
    x = torch.ones(2, 2)
    tree = structure({"a": (x, None), "b": [3, x.max(0)]}, tensors, values)
    assert tree == [
        "d",
        ["a", "b"],
        [
            ["s", "tuple", [["t", 0], ["n"]]],
            ["s", "list", [["p", 0], ["s", "torch.return_types.max", [["t", 1], ["t", 2]]]]],
        ],
    ]
    assert values == [3] and len(tensors) == 3
