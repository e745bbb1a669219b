"""Random programs of views, writes, detaching and backward passes: on the mesh as in plain torch."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

import monarch_lab as ml
from tests.controller.compare import rank_values

_STEPS = 14
_PROGRAMS = 40


class _Stopped(Exception):
    """The program came to a step that torch refuses."""


class _Run:
    """The values a program has so far; ``a``, ``b`` and ``c`` choose among them."""

    def __init__(self) -> None:
        self.values: list[Any] = [torch.arange(1.0, 7.0).view(2, 3), torch.ones(2, 3).requires_grad_()]
        self.leaves = [self.values[1]]
        self.gradients: list[Any] = []

    def alike(self, x: Any, u: float) -> Any:
        fitting = [t for t in self.values if t.shape == x.shape]
        return fitting[int(u * len(fitting))]

    def step(self, name: str, a: float, b: float, c: float) -> None:
        x = self.values[int(a * len(self.values))]
        try:
            self.values.append(_MOVES[name](self, x, b, c))
        except Exception as e:
            raise _Stopped from e

    def leaf(self, b: float) -> Any:
        self.leaves.append((torch.ones(2, 3) * round(b * 4 + 1)).requires_grad_())
        return self.leaves[-1]

    def set_item(self, x: Any, b: float) -> Any:
        x[0] = b
        return x

    def backward(self, x: Any, b: float, c: float) -> Any:
        x.sum().backward(retain_graph=b > 0.5, create_graph=c > 0.8)
        return x

    def grad(self, x: Any, b: float) -> Any:
        self.gradients += torch.autograd.grad(x.sum(), self.leaves, allow_unused=True, retain_graph=b > 0.5)
        return x

    def zero(self, x: Any) -> Any:
        for w in self.leaves:
            w.grad = None
        return x

    def without_grad(self, x: Any, *, view: bool) -> Any:
        with torch.no_grad():
            return x.reshape(-1)[:2] if view else x.add_(1)


_MOVES: dict[str, Callable[[_Run, Any, float, float], Any]] = {
    "leaf": lambda r, x, b, c: r.leaf(b),
    "plain": lambda r, x, b, c: torch.full((2, 3), float(round(b * 4) + 1)),
    "mul": lambda r, x, b, c: x * r.alike(x, b),
    "add": lambda r, x, b, c: x + r.alike(x, b),
    "view": lambda r, x, b, c: x[0] if x.dim() > 1 else x[:2],
    "t": lambda r, x, b, c: x.t() if x.dim() == 2 else x * 1,
    "add_": lambda r, x, b, c: x.add_(r.alike(x, b)),
    "mul_": lambda r, x, b, c: x.mul_(r.alike(x, b)),
    "scale_": lambda r, x, b, c: x.mul_(0.5),
    "copy_": lambda r, x, b, c: x.copy_(r.alike(x, b)),
    "set item": lambda r, x, b, c: r.set_item(x, b),
    "detach": lambda r, x, b, c: x.detach(),
    "data": lambda r, x, b, c: x.data,
    "view without grad": lambda r, x, b, c: r.without_grad(x, view=True),
    "write without grad": lambda r, x, b, c: r.without_grad(x, view=False),
    "sum": lambda r, x, b, c: x.sum(),
    "clone": lambda r, x, b, c: x.clone(),
    "chunk": lambda r, x, b, c: x.chunk(2, -1)[0] if x.dim() else x * 1,
    "stack": lambda r, x, b, c: torch.stack([x, r.alike(x, b)]).sum(0),
    "backward": lambda r, x, b, c: r.backward(x, b, c),
    "grad": lambda r, x, b, c: r.grad(x, b),
    "zero": lambda r, x, b, c: r.zero(x),
    "requires_grad_": lambda r, x, b, c: x.requires_grad_(b > 0.3),
}


def told(x: Any) -> Any:
    """Value and metadata; None where torch itself refuses to say."""
    if x is None:
        return None
    try:
        is_leaf = x.is_leaf
    except RuntimeError:  # a view that torch forbids to write to
        is_leaf = None
    values = rank_values(x) if getattr(x, "is_mesh_tensor", False) else [x.detach().tolist()] * 2
    return values, x.stride(), x.storage_offset(), x.requires_grad, is_leaf


def outcome(steps: list[Any]) -> Any:
    run = _Run()
    try:
        for step in steps:
            run.step(*step)
    except _Stopped:
        return None
    return [told(x) for x in run.values], [told(w.grad) for w in run.leaves], [told(g) for g in run.gradients]


def where_told(got: Any, want: Any) -> Any:
    """``got`` without what plain torch refuses to say."""
    if isinstance(want, (list, tuple)) and isinstance(got, (list, tuple)) and len(got) == len(want):
        return type(want)(where_told(g, w) for g, w in zip(got, want, strict=True))
    return None if want is None and isinstance(got, bool) else got


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("block", range(4))
def test_a_random_program_ends_as_in_plain_torch(mesh: Any, block: int) -> None:
    compared = 0
    for seed in range(block * 1000, block * 1000 + _PROGRAMS):
        chance = random.Random(seed)
        steps = [
            (chance.choice(list(_MOVES)), chance.random(), chance.random(), chance.random()) for _ in range(_STEPS)
        ]
        with ml.no_mesh.activate():
            want = outcome(steps)
        if want is None:
            continue
        for _ in range(2):  # learned, then believed
            with mesh.activate():
                got = outcome(steps)
            assert got is not None and where_told(got, want) == want, f"seed {seed}: {[s[0] for s in steps]}"
        compared += 1
    assert compared >= 3
