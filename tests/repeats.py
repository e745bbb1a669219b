"""Faults are tried three times in every test run and twenty more in ``make soak``."""

from __future__ import annotations

import pytest

FEW, MANY = 3, 20


def repeated(few: int = FEW, many: int = MANY) -> pytest.MarkDecorator:
    """The test takes ``turn``; turns from ``few`` on carry the soak mark."""
    turns = [*range(few), *(pytest.param(turn, marks=pytest.mark.soak) for turn in range(few, few + many))]
    return pytest.mark.parametrize("turn", turns)
