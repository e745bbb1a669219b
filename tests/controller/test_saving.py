"""Hooks for saved tensors on a mesh (rule 12): values and gradients of eager torch."""

from __future__ import annotations

import gc
import time
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

import monarch_lab as ml
from tests.controller.compare import assert_known_or_refused, own_number, rank_values, run_on_both


def leaf(*values: float) -> Any:
    return torch.tensor(values).requires_grad_()


def test_hooks_are_called_as_in_eager_torch(mesh: Any) -> None:
    def run() -> Any:
        log: list[Any] = []

        def pack(t: Any) -> Any:
            log.append(("pack", tuple(t.shape), torch.is_grad_enabled()))
            return len(log), t.detach() * 1

        def unpack(packed: Any) -> Any:
            log.append(("unpack", packed[0]))
            return packed[1]

        w, x = torch.randn(3, 3).requires_grad_(), torch.randn(2, 3)
        for _ in range(2):
            with saved_tensors_hooks(pack, unpack):
                h = torch.tanh(x @ w)
                with torch.no_grad():
                    h * h
                loss = (h * h).exp().sum()
            (loss * loss).backward()  # saved outside, and not packed
        return w.grad, log

    run_on_both(mesh, run, 1e-5)


def test_what_unpack_gives_takes_the_place_of_what_was_saved(mesh: Any) -> None:
    def run() -> Any:
        a, b = leaf(1.0, 2.0), leaf(3.0, 4.0)
        with saved_tensors_hooks(lambda t: t.detach() * 10, lambda t: t + 1):
            y = a * b
        y.sum().backward()
        return a.grad, b.grad

    run_on_both(mesh, run)


def test_only_the_innermost_hooks_are_called_and_the_outer_again_after_them(mesh: Any) -> None:
    def run() -> Any:
        log: list[str] = []

        def hooks(name: str) -> Any:
            def pack(t: Any) -> Any:
                log.append(name)
                return t.detach()

            return saved_tensors_hooks(pack, lambda t: t)

        x = leaf(1.0, 2.0)
        with hooks("outer"):
            y = x.exp()
            with hooks("inner"):
                y = y.exp()
            y = y.sin()
        (y.cos()).sum().backward()
        return x.grad, log

    run_on_both(mesh, run)


def test_hooks_over_functions_and_second_derivatives(mesh: Any) -> None:
    class Cube(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            ctx.save_for_backward(x)
            return x**3

        @staticmethod
        def backward(ctx: Any, g: Any) -> Any:
            (x,) = ctx.saved_tensors
            return g * 3 * x * x

    def run() -> Any:
        packed: list[int] = []

        def pack(t: Any) -> Any:
            packed.append(t.numel())
            return t.clone() if t.requires_grad else t * 1

        x = leaf(1.0, 2.0)
        with saved_tensors_hooks(pack, lambda t: t):
            (g,) = torch.autograd.grad(Cube.apply(x.sin()).sum(), x, create_graph=True)
        (g * g).sum().backward()
        return g, x.grad, len(packed) > 0

    run_on_both(mesh, run, 1e-5)


def test_hooks_go_with_the_graph_also_where_no_pass_came_to_an_end(cell: Any) -> None:
    def fail(t: Any) -> Any:
        raise ZeroDivisionError("mine")

    def run() -> None:
        with saved_tensors_hooks(lambda t: t.detach(), fail):
            y = leaf(1.0, 2.0).exp()
        with pytest.raises(ZeroDivisionError, match="mine"):
            y.sum().backward()
        with saved_tensors_hooks(lambda t: t.detach(), lambda t: t):
            leaf(1.0, 2.0).exp()

    gc.collect()
    cell.sync()
    before = len(cell.client.callbacks)
    run()
    for _ in range(100):
        gc.collect()
        torch.ones(1) + 1  # deletes ride with it
        cell.sync()
        if len(cell.client.callbacks) == before:
            break
        time.sleep(0.05)
    assert len(cell.client.callbacks) == before


def test_what_the_hooks_raise_is_raised_at_the_line_that_came_to_them(cell: Any) -> None:
    def fail(t: Any) -> Any:
        raise ZeroDivisionError("mine")

    x = leaf(1.0, 2.0)
    with pytest.raises(ZeroDivisionError, match="mine"), saved_tensors_hooks(fail, lambda t: t):
        x.exp()
    with saved_tensors_hooks(lambda t: t.detach(), fail):
        y = x.exp()
    with pytest.raises(ZeroDivisionError, match="mine"):
        y.sum().backward()
    with saved_tensors_hooks(lambda t: t.detach(), lambda t: None):  # type: ignore[arg-type, return-value]
        y = x.exp()
    with pytest.raises((TypeError, RuntimeError)):
        y.sum().backward()
    x.exp().sum().backward()
    assert rank_values(x.grad)[0] == pytest.approx([2.71828, 7.38906], rel=1e-4)


def test_what_was_packed_goes_with_the_graph(cell: Any) -> None:
    class Box:
        def __init__(self, value: Any) -> None:
            self.value = value

    boxes: list[Any] = []

    def pack(t: Any) -> Any:
        box = Box(t.detach())
        boxes.append(weakref.ref(box))
        return box

    x = leaf(1.0, 2.0)
    with saved_tensors_hooks(pack, lambda box: box.value):
        y = x.exp()
        z = x.sin()
    y.sum().backward()
    del y, z
    gc.collect()
    cell.sync()
    _ = (x + 123.0).tolist()  # the workers tell with an answer what they let go
    cell.sync()
    assert len(boxes) == 2 and [b() for b in boxes] == [None, None]


def test_what_was_unpacked_says_what_is_known_equal(cell: Any) -> None:
    x = leaf(1.0, 2.0)
    with saved_tensors_hooks(lambda t: t.detach(), lambda t: t + own_number(cell)):
        y = x * x
    y.sum().backward()
    assert rank_values(x.grad) == [[2, 4], [4, 6]]
    assert_known_or_refused(x.grad)


def test_saving_on_the_cpu(mesh: Any) -> None:
    def run() -> Any:
        model = nn.Sequential(nn.Linear(3, 4), nn.GELU(), nn.LayerNorm(4), nn.Linear(4, 1))
        x = torch.randn(5, 3)
        with save_on_cpu():
            loss = model(x).pow(2).sum()
        loss.backward()
        return loss, [p.grad for p in model.parameters()]

    run_on_both(mesh, run, 1e-5)


def test_hooks_set_with_no_mesh_active_are_refused_for_mesh_tensors(cell: Any) -> None:
    x = leaf(1.0, 2.0)
    with ml.no_mesh.activate(), saved_tensors_hooks(lambda t: t, lambda t: t):
        with pytest.raises(ml.UsageError, match="entered with no mesh active"):
            x * x
        assert rank_values(x.detach() * 2) == [[2, 4]] * 2


def test_hooks_of_a_cell_are_for_its_local_tensors_too(cell: Any) -> None:
    shapes = []

    def pack(t: Any) -> Any:
        shapes.append(tuple(t.shape))
        return t.detach()

    with ml.no_mesh.activate():
        local = torch.ones(3, requires_grad=True)
    with saved_tensors_hooks(pack, lambda t: t):
        local.exp()
        leaf(1.0, 2.0).exp()
    assert shapes == [(3,), (2,)]
