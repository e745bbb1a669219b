"""ml.grad_generator, ml.grad_function, ml.remote_autograd_function."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import monarch_lab as ml
from tests.controller.compare import assert_known_or_refused, by_rank, own_number, rank_values, run_on_both


def leaf(*values: float) -> Any:
    return torch.tensor(values).requires_grad_()


def test_two_outputs_of_one_node(mesh: Any) -> None:
    def run() -> Any:
        x = leaf(1.0, 2.0, 4.0)
        std, mean = torch.std_mean(x)
        expected = torch.autograd.grad([std, mean], [x], retain_graph=True)
        found = list(ml.grad_generator([std, mean], [x]))
        assert torch.allclose(found[0], expected[0])
        return found

    run_on_both(mesh, run)


def test_a_pipeline_with_an_input_that_is_not_used(mesh: Any) -> None:
    def run() -> Any:
        weights = [torch.randn(3, 3).requires_grad_() for _ in range(5)]
        unused = leaf(1.0)
        h = x = torch.randn(3).requires_grad_()
        for w in weights:
            h = torch.tanh(w @ h)
        loss = h.pow(2).sum()
        wrt = [*weights[::-1], unused, x]
        expected = torch.autograd.grad(loss, wrt, retain_graph=True, allow_unused=True)
        found = list(ml.grad_generator(loss, wrt))
        assert found[5] is None and expected[5] is None
        for a, b in zip(found, expected, strict=True):
            assert (a is None and b is None) or torch.allclose(a, b)
        return [g for g in found if g is not None]

    run_on_both(mesh, run)


def test_shared_parts_broadcasts_and_gradients_of_the_roots(mesh: Any) -> None:
    def run() -> Any:
        a, b, c = leaf(1.0, 2.0), leaf(3.0), leaf(5.0, 6.0)
        shared = a * b
        roots = [shared * shared + c, shared.exp() * 1e-3, b]
        given = [torch.tensor([1.0, 2.0]), torch.tensor([0.5, 0.25])]
        return list(ml.grad_generator(roots, [c, shared, a, b], given))

    run_on_both(mesh, run)


def test_gradients_come_in_the_order_asked_for_and_free_what_was_saved(mesh: Any) -> None:
    def run() -> Any:
        a, b = leaf(1.0, 2.0), leaf(3.0, 4.0)
        first, second = a * b, leaf(2.0, 2.0)
        loss = (first * second).sum()
        walk = ml.grad_generator(loss, [second, b, a])
        found = [next(walk)]
        found += list(walk)
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()
            loss.mesh.sync()
        return found

    run_on_both(mesh, run)


def test_gradients_are_asked_for_under_no_mesh(cell: Any) -> None:
    x = leaf(1.0, 2.0)
    walk = ml.grad_generator((x * x * own_number(cell)).sum(), [x])
    with ml.no_mesh.activate():
        (found,) = walk
        assert [v.tolist() for v in by_rank(found)] == [[0, 0], [2, 4]]
        assert_known_or_refused(found)


def test_a_walk_comes_to_functions_of_the_kernel(cell: Any) -> None:
    @ml.grad_function
    def tripled(x: Any) -> Any:
        return x * 1, lambda g: g * 3

    x = leaf(1.0, 2.0)
    (found,) = ml.grad_generator(tripled(x).sum(), [x])
    assert found.tolist() == [3, 3]


def test_the_order_in_which_gradients_are_there_is_that_of_a_backward_pass(mesh: Any) -> None:
    def run() -> Any:
        a, b, c, d, unused = (leaf(float(k + 1)) for k in range(5))
        first = a * 2
        second = first * c
        loss = (second + b * 3).exp() * d
        assert ml.gradient_execution_order([loss], [a, b, c, d]) == [3, 1, 2, 0]
        assert ml.gradient_execution_order(loss, [unused, first, second, b, d]) == [4, 3, 2, 1, 0]
        wrt = [a, b, c, d]
        came: list[int] = []
        for k, t in enumerate(wrt):
            t.register_hook(lambda g, k=k: came.append(k))
        order = ml.gradient_execution_order([loss, second.sum()], wrt)
        (loss + second.sum()).backward()
        assert came == order
        return a.grad

    run_on_both(mesh, run)


def test_the_order_of_the_acceptance_list(mesh: Any) -> None:
    def run() -> Any:
        x, y, z, w = leaf(1.0), leaf(2.0), leaf(3.0), leaf(4.0)
        h = x * z
        loss = ((h + y) * w).sum()
        order = ml.gradient_execution_order([loss], [h, y, x, w])
        assert order == [3, 1, 0, 2]
        return list(ml.grad_generator(loss, [[h, y, x, w][k] for k in order]))

    run_on_both(mesh, run)


def test_gradients_of_trees_come_in_reverse_order_of_their_registration(mesh: Any) -> None:
    def run() -> Any:
        w, v, unused = leaf(2.0), leaf(3.0), leaf(4.0)
        walk = ml.GradGenerator()
        h = w * 5
        walk.grad({"w": [w, unused], "k": 7})
        out = h * v
        walk.grad((h, v))
        walk.root(out * 2, torch.tensor([10.0]))
        walk.root(out.sum())
        (dh, dv), first = walk
        assert first["w"][1] is None and first["k"] is None
        with pytest.raises(ValueError, match="no root"):
            list(ml.GradGenerator())
        return dh, dv, first["w"][0]

    _, plain = run_on_both(mesh, run)
    assert [t.item() for t in plain] == [63.0, 210.0, 315.0]


def test_a_walk_whose_graph_comes_back_over_another_mesh_is_refused(grid: Any) -> None:
    with grid.slice(host=0).activate():
        x = leaf(2.0)
        back = (x * 2).to_mesh(grid.slice(host=1)).to_mesh(grid.slice(host=0))
        loss = (back * x).sum()
        for ask in (ml.grad_generator, ml.gradient_execution_order):
            with pytest.raises(TypeError, match="comes back"):
                ask(loss, [x])


def test_what_a_walk_refuses(cell: Any) -> None:
    x = leaf(1.0, 2.0)
    with pytest.raises(RuntimeError, match="scalar outputs"):
        list(ml.grad_generator(x * 2, [x]))
    with pytest.raises(RuntimeError, match="does not require|requires grad|require gradients"):
        list(ml.grad_generator(torch.ones(()) * 2, [x]))
    with pytest.raises(ValueError, match="2 gradients for 1"):
        ml.grad_generator(x.sum(), [x], [None, None])
    with x.register_hook(lambda g: g), pytest.raises(ml.UsageError, match="hooks"):
        ml.grad_generator(x.sum(), [x])
    (found,) = ml.grad_generator(x.sum(), [x])
    assert found.tolist() == [1, 1]


def test_a_gradient_written_as_a_closure(mesh: Any) -> None:
    @ml.grad_function
    def multiplied(x: Any, k: float, y: Any) -> Any:
        parts = {"x": x, "y": [y]}

        def backward(g: Any) -> Any:
            return g * parts["y"][0] * k, None, g * parts["x"] * k * 2

        return x * y * k, backward

    @ml.grad_function
    def both(x: Any, k: int) -> Any:
        return (x + k, x * k), lambda a, b: a + b * k

    def run() -> Any:
        x, y = leaf(1.0, 2.0), leaf(3.0, 4.0)
        multiplied(x * 1, 3.0, y).sum().backward()
        a, b = both(x, 5)
        (a + b * 2).sum().backward()
        return x.grad, y.grad

    run_on_both(mesh, run)


def test_a_function_that_returns_no_pair_is_refused(cell: Any) -> None:
    with pytest.raises(TypeError, match="must return"):
        ml.grad_function(lambda x: x * 2)(leaf(1.0))


def test_a_function_that_runs_on_the_workers(cell: Any) -> None:
    @ml.remote_autograd_function
    class Ones(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any, y: Any, k: int) -> Any:
            assert type(x) is torch.Tensor
            ctx.save_for_backward(x)
            ctx.k = k
            return x * y * 0 + 1, y * 1, x.detach() * 0 + 1, k

        @staticmethod
        def backward(ctx: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
            assert torch.distributed.is_available() and ctx.saved_tensors[0].shape == a.shape
            return torch.ones_like(a), b if ctx.needs_input_grad[1] else None, None

    x, y = leaf(1.0, 2.0), leaf(3.0, 4.0)
    for _ in range(2):
        x.grad = y.grad = None
        *outs, four = Ones.apply(x, y, 4)
        assert four == 4 and rank_values(outs[0]) == [[1, 1]] * 2
        (outs[0] + outs[1]).sum().backward()
        assert rank_values(x.grad) == rank_values(y.grad) == [[1, 1]] * 2
        assert not ml.inspect(outs[0]).requires_grad
    with pytest.raises(TypeError, match="autograd.Function"):
        ml.remote_autograd_function(print)


def test_a_function_on_the_workers_gives_no_gradient_where_none_is_wanted(cell: Any) -> None:
    @ml.remote_autograd_function
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any, y: Any) -> Any:
            return x * 2 + 0 * y

        @staticmethod
        def backward(ctx: Any, g: Any) -> Any:
            return g * 2, g * 0

    for _ in range(3):
        x, y = leaf(1.0), leaf(1.0)
        out = Twice.apply(x.detach(), y)
        out.backward(torch.ones(1))
        assert rank_values(out.detach()) == [[2], [2]]
        assert x.grad is None and rank_values(y.grad) == [[0], [0]]
