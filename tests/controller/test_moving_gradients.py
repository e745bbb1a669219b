"""Gradients over to_mesh and slice_mesh (rule 11)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import monarch_lab as ml
from tests.controller.compare import rank_values
from tests.controller.moved import all_of, numbered


def test_the_gradient_of_a_move_goes_back_where_the_value_came_from(grid: Any) -> None:
    first, second = grid.slice(host=0), grid.slice(host=1)
    for _ in range(3):
        x = numbered(first, grad=True)
        (x.to_mesh(second) * (numbered(second) * 10)).backward()
        assert rank_values(x.grad) == [20, 30] and x.grad.mesh is first


def test_the_gradient_of_a_broadcast_is_summed(grid: Any) -> None:
    for _ in range(3):
        one = grid.slice(host=0, gpu=0)
        x = one.replicate(torch.tensor(3.0, requires_grad=True))
        (x.to_mesh(grid) * (numbered(grid) + 1)).backward()
        assert x.grad.item() == 1 + 2 + 3 + 4
        x = one.replicate(torch.tensor(3.0, requires_grad=True))
        pair = grid.slice(host=1)
        (x.to_mesh(pair) * (pair.rank("gpu") * 9 + 1)).backward()
        assert x.grad.item() == 11


def test_the_gradient_of_a_part_is_zero_elsewhere(grid: Any) -> None:
    for _ in range(3):
        x = grid.replicate(torch.tensor(2.0, requires_grad=True))
        x.slice_mesh(gpu=1).backward()
        assert all_of(x.grad) == [[0, 1], [0, 1]] and x.grad.equal_dims == ("host",)


def test_the_gradient_is_that_of_the_value_when_it_left(grid: Any) -> None:
    first, second = grid.slice(host=0), grid.slice(host=1)
    x = first.replicate(torch.tensor(2.0, requires_grad=True))
    y = x * 3
    there = y.to_mesh(second)
    y.mul_(100)
    (there * 5).backward()
    assert x.grad.item() == 15


def test_a_graph_that_comes_back_gives_the_whole_gradient(grid: Any) -> None:
    first, second = grid.slice(host=0), grid.slice(host=1)
    for _ in range(3):
        x = first.replicate(torch.tensor(2.0, requires_grad=True))
        a = x * 3
        b = (a.to_mesh(second) ** 2).to_mesh(first)
        (b * a).backward()  # a^3: 3 a^2 * 3
        assert x.grad.item() == 3 * 36 * 3


def test_several_ways_between_two_meshes_add_up(grid: Any) -> None:
    first, second = grid.slice(host=0), grid.slice(host=1)
    for _ in range(3):
        x = first.replicate(torch.tensor(2.0, requires_grad=True))
        h = x * x
        w = second.replicate(torch.tensor(10.0, requires_grad=True))
        (h.to_mesh(second) * w + x.to_mesh(second) * 7 + (h + x).to_mesh(second)).backward()
        assert x.grad.item() == 40 + 7 + 4 + 1 and w.grad.item() == 4


def test_a_chain_over_three_processes(grid: Any) -> None:
    line = grid.flatten("r")
    stages = [line.slice(r=k) for k in range(4)]
    for _ in range(3):
        weights = [s.replicate(torch.tensor(float(k + 2), requires_grad=True)) for k, s in enumerate(stages)]
        value = weights[0] * 1
        for stage, weight in zip(stages[1:], weights[1:], strict=True):
            value = value.to_mesh(stage) * weight
        value.backward()
        assert value.item() == 120
        assert [w.grad.item() for w in weights] == [60, 40, 30, 24]


def test_gradients_add_up_over_passes_and_a_kept_graph_serves_again(grid: Any) -> None:
    first, second = grid.slice(host=0), grid.slice(host=1)
    x = first.replicate(torch.tensor(2.0, requires_grad=True))
    y = (x * x).to_mesh(second) * 3
    y.backward(retain_graph=True)
    y.backward()
    assert x.grad.item() == 24
    with pytest.raises(RuntimeError, match="second time"):
        y.backward()
        grid.sync()


def test_no_gradient_crosses_under_no_grad_or_from_a_detached_value(grid: Any) -> None:
    first, second = grid.slice(host=0), grid.slice(host=1)
    x = numbered(first, grad=True)
    with torch.no_grad():
        assert not x.to_mesh(second).requires_grad
    with torch.inference_mode():
        moved = x.to_mesh(second)
        assert not moved.requires_grad and moved.is_inference()
    assert not x.detach().to_mesh(second).requires_grad
    there = x.to_mesh(second)
    assert there.requires_grad and not there.is_leaf and there.grad is None
    with pytest.raises(TypeError, match="create_graph.*detach"):
        (there * 2).backward(create_graph=True)


def test_what_asks_for_one_meshs_gradients_says_so_where_the_graph_comes_back(grid: Any) -> None:
    first, second = grid.slice(host=0), grid.slice(host=1)
    x = first.replicate(torch.tensor(2.0, requires_grad=True))
    w = second.replicate(torch.tensor(3.0, requires_grad=True))
    there = x.to_mesh(second) * w
    (grad,) = torch.autograd.grad(there, [w], retain_graph=True)
    assert grad.item() == 2
    back = there.to_mesh(first) * x
    with pytest.raises(TypeError, match="autograd.grad does not go across meshes"):
        torch.autograd.grad(back, [x])
    with pytest.raises(TypeError, match="inputs=.*does not go across"):
        back.backward(inputs=[x])


def test_a_backward_pass_inside_a_function_does_not_cross_silently(grid: Any) -> None:
    first, second = grid.slice(host=0), grid.slice(host=1)
    there = numbered(first, grad=True).to_mesh(second)

    def inner(t: torch.Tensor) -> torch.Tensor:
        (t * 2).sum().backward()
        return t.detach()

    with pytest.raises(RuntimeError, match="call backward\\(\\) in the cell"):
        ml.remote(inner)(there)


def test_hooks_and_functions_of_the_kernel_on_the_way_back_over_meshes(grid: Any) -> None:
    class Tripled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return x * 1

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            return grad * 3

    first, second = grid.slice(host=0), grid.slice(host=1)
    seen = []
    with first.activate():
        w = torch.ones(2).requires_grad_()
        y = Tripled.apply(w * 2)
    moved = y.to_mesh(second)
    moved.register_hook(lambda g: seen.append(g.mesh) or g * 5)
    out = Tripled.apply(moved)
    for k in (1, 2):
        out.sum().backward(retain_graph=True)
        assert ml.inspect(w.grad, gpu=1).tolist() == [90 * k, 90 * k]
    assert seen == [second, second]
