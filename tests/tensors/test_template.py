"""Calls without their refs, made into code."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import pytest
import torch

from monarch_lab.tensors.ambient import Applied, capture
from monarch_lab.tensors.meta import describe, intern, is_contiguous
from monarch_lab.tensors.template import CallTree, Input, Number, Source

Point = namedtuple("Point", "x y")


def run(tree: CallTree, tensors: list[Any], numbers: list[Any]) -> Any:
    source = Source()
    text = source.call(lambda *a, **k: (a, k), tree)
    names = {f"t{k}": t for k, t in enumerate(tensors)} | {f"n{k}": n for k, n in enumerate(numbers)}
    return eval(text, {**source.names, **names})


@pytest.mark.parametrize(
    "value",
    [
        1,
        -3,
        True,
        None,
        "a'\"\n",
        2.5,
        float("inf"),
        1j,
        (),
        (1,),
        [1, [2]],
        {"a": 1},
        slice(1, None, 2),
        ...,
        torch.int8,
        torch.device("cpu"),
        torch.strided,
        Point(1, 2),
        torch.Size([1, 2]),
        torch.contiguous_format,
        b"x",
        range(3),
    ],
)
def test_a_constant_comes_out_as_it_went_in(value: Any) -> None:
    (args, kwargs) = run(CallTree((value,), {"k": value}), [], [])
    assert args == (value,) and kwargs == {"k": value}
    assert type(args[0]) is type(value) or isinstance(value, torch.Size)


def test_inputs_and_numbers_stand_in_their_places() -> None:
    tree = CallTree((Input(1), [Input(0), (Number(0),)]), {"alpha": Number(1), "at": {"x": Input(0)}, "not-a-name": 1})
    assert run(tree, ["a", "b"], [0.5, 7]) == (("b", ["a", (0.5,)]), {"alpha": 7, "at": {"x": "a"}, "not-a-name": 1})


def test_a_number_with_a_dtype_becomes_a_tensor_of_it() -> None:
    ((number,), _) = run(CallTree((Number(0, torch.float16),), {}), [], [0.5])
    assert number.dtype == torch.float16 and number.shape == () and number.item() == 0.5


def test_a_slice_may_hold_inputs() -> None:
    ((got,), _) = run(CallTree((slice(Input(0), None, None),), {}), [3], [])
    assert got == slice(3, None, None)


def test_equal_metadata_is_one_object() -> None:
    a, b = torch.ones(2, 3), torch.zeros(2, 3)
    assert intern(describe(a)) is intern(describe(b))
    assert intern(describe(a)) is not intern(describe(a.t())) and intern(describe(a)) is not intern(describe(a.int()))
    assert intern(describe(a)) is not intern(describe(torch.ones(2, 3).requires_grad_()))


def test_a_view_that_torch_forbids_to_write_to_can_be_described() -> None:
    weight = torch.nn.Parameter(torch.ones(3, 2))
    with torch.no_grad():
        row = weight[1]
        row.fill_(0)
        assert describe(row).shape == (2,)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(2, 3),
        torch.ones(2, 3).t(),
        torch.ones(2, 3, 4, 4).contiguous(memory_format=torch.channels_last),
        torch.ones(0, 3).t(),
        torch.tensor(1),
        torch.ones(1, 3).expand(4, 3),
    ],
)
@pytest.mark.parametrize("kind", [torch.contiguous_format, torch.channels_last])
def test_contiguity_is_told_from_metadata(tensor: torch.Tensor, kind: torch.memory_format) -> None:
    if kind is torch.channels_last and tensor.dim() != 4:
        return
    assert is_contiguous(intern(describe(tensor)), kind) == tensor.is_contiguous(memory_format=kind)


def test_an_ambient_state_is_applied_and_left_again() -> None:
    applied, before = Applied(), capture()
    w = torch.ones(2).requires_grad_()
    with torch.no_grad(), torch.autocast("cpu", torch.float16):
        inside = capture()
    with torch.inference_mode():
        inference = capture()
    try:
        applied.apply(inside)
        assert not (w * 2).requires_grad and torch.get_autocast_dtype("cpu") == torch.float16
        assert torch.is_autocast_enabled("cpu")
        applied.apply(inference)
        assert (w * 2).is_inference() and not torch.is_autocast_enabled("cpu")
    finally:
        applied.apply(before)
    assert (w * 2).requires_grad and not torch.is_inference_mode_enabled()
