"""A 0-dim constant beside a mesh tensor, before and after the call is known."""

from __future__ import annotations

from typing import Any

import pytest
import torch


@pytest.mark.parametrize("operator", ["__sub__", "__mul__", "__truediv__", "__pow__", "__add__"])
@pytest.mark.parametrize("constant_first", [True, False])
def test_a_constant_is_an_operand_on_either_side_each_time(cell: Any, operator: str, constant_first: bool) -> None:
    for value in (2.0, 3.0, 4.0):
        vector = torch.full((2,), 1.5)
        constant = torch.tensor(value)
        a, b = (constant, vector) if constant_first else (vector, constant)
        x, y = (value, 1.5) if constant_first else (1.5, value)
        expected = getattr(float, operator)(x, y)
        assert getattr(a, operator)(b).tolist() == pytest.approx([expected] * 2)
        assert constant.item() == value


def test_a_constant_that_was_sent_does_not_stand_for_one_that_was_not(cell: Any) -> None:
    vector = torch.ones(2)
    sent = torch.tensor(2.0)
    sent.view(1)
    assert (sent - vector).tolist() == [1, 1]
    for value in (5.0, 6.0):
        assert (torch.tensor(value) - vector).tolist() == [value - 1] * 2
