"""autograd.Function with mesh tensors: the values, gradients and errors of eager torch (rules 12 and 13)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.autograd.function import Function, once_differentiable

import monarch_lab as ml
from tests.controller.compare import assert_known_or_refused, own_number, rank_values, run_on_both
from tests.controller.test_hooks import settled


class Scale(Function):
    """x * k, with a gradient that is twice what it should be, so that it is told from autograd's own."""

    @staticmethod
    def forward(ctx: Any, x: Any, k: float) -> Any:
        ctx.k = k
        ctx.save_for_backward(x)
        return x * k

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        (x,) = ctx.saved_tensors
        return grad * ctx.k * 2 + 0 * x, None


class Sign(Function):
    """A straight-through estimator."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x.sign()

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return grad


class Split(Function):
    @staticmethod
    def forward(ctx: Any, x: Any, y: Any) -> Any:
        ctx.save_for_backward(x, y)
        return x * y, x + y, "label"

    @staticmethod
    def backward(ctx: Any, product: Any, total: Any, label: Any) -> Any:
        x, y = ctx.saved_tensors
        assert label is None and ctx.needs_input_grad == (x.requires_grad, y.requires_grad)
        gx = product * y + total if ctx.needs_input_grad[0] else None
        gy = product * x + total if ctx.needs_input_grad[1] else None
        return gx, gy


class Double_(Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return grad * 2


class Sorted(Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        values, index = x.sort()
        ctx.mark_non_differentiable(index)
        ctx.save_for_backward(index)
        return values, index

    @staticmethod
    def backward(ctx: Any, grad: Any, unused: Any) -> Any:
        (index,) = ctx.saved_tensors
        return torch.zeros_like(grad).scatter(0, index, grad)


class Cube(Function):
    """With setup_context, and a backward that is differentiable."""

    @staticmethod
    def forward(x: Any, times: int = 1) -> Any:
        return x**3 * times

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, ctx.times = inputs
        ctx.save_for_backward(x, output)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        x, output = ctx.saved_tensors
        return grad * 3 * x**2 * ctx.times + 0 * output.detach(), None


class OnceCube(Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Any) -> Any:
        (x,) = ctx.saved_tensors
        return grad * 3 * x**2


class Identity(Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return grad * 10


class Lazy(Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        ctx.set_materialize_grads(False)
        return x * 2, x * 3

    @staticmethod
    def backward(ctx: Any, a: Any, b: Any) -> Any:
        assert (a is None) != (b is None)
        return a * 2 if b is None else b * 3


def leaf(*values: float) -> Any:
    return torch.tensor(values).requires_grad_()


def test_a_function_beside_a_skip_connection(mesh: Any) -> None:
    def run() -> Any:
        x = leaf(1.0, 2.0)
        y = Scale.apply(x, 12.0) + 2 * x
        y.sum().backward()
        return y.detach(), x.grad

    run_on_both(mesh, run)


def test_a_straight_through_estimator(mesh: Any) -> None:
    def run() -> Any:
        x = leaf(-0.3, 0.2)
        (Sign.apply(x * 2) * torch.tensor([3.0, 5.0])).sum().backward()
        return x.grad

    run_on_both(mesh, run)


@pytest.mark.parametrize("needed", [(True, True), (True, False), (False, True)])
def test_several_outputs_and_needs_input_grad(mesh: Any, needed: tuple[bool, bool]) -> None:
    def run() -> Any:
        x, y = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])
        x.requires_grad_(needed[0])
        y.requires_grad_(needed[1])
        product, total, label = Split.apply(x, y)
        assert label == "label" and product.requires_grad
        (product * 2 + total).sum().backward()
        return [t.grad for t in (x, y) if t.grad is not None]

    run_on_both(mesh, run)


def test_an_input_that_was_written(mesh: Any) -> None:
    def run() -> Any:
        x = leaf(1.0, 2.0)
        y = x * 3
        z = Double_.apply(y)
        assert z is y and z.requires_grad
        (z * z).sum().backward()
        return z.detach(), x.grad

    run_on_both(mesh, run)


def test_a_leaf_that_was_written_is_refused_as_in_plain_torch(cell: Any) -> None:
    with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
        Double_.apply(leaf(1.0))


def test_an_output_without_a_gradient(mesh: Any) -> None:
    def run() -> Any:
        x = leaf(3.0, 1.0, 2.0)
        values, index = Sorted.apply(x)
        assert values.requires_grad and not index.requires_grad
        (values * torch.tensor([1.0, 10.0, 100.0])).sum().backward()
        return values.detach(), index, x.grad

    run_on_both(mesh, run)


def test_setup_context_defaults_and_double_backward(mesh: Any) -> None:
    def run() -> Any:
        x = leaf(1.0, 2.0)
        (first,) = torch.autograd.grad(Cube.apply(x, times=2).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), x)
        Cube.apply(x).sum().backward()
        return first.detach(), second, x.grad

    run_on_both(mesh, run)


def test_once_differentiable_refuses_a_second_derivative(cell: Any) -> None:
    x = leaf(1.0, 2.0)
    (first,) = torch.autograd.grad(OnceCube.apply(x).sum(), x)
    assert first.tolist() == [3, 12]
    (first,) = torch.autograd.grad(OnceCube.apply(x * 1).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad((OnceCube.apply(x * 1) * x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        second.sum().backward()


def test_an_input_that_is_returned_is_another_tensor(mesh: Any) -> None:
    def run() -> Any:
        x = leaf(1.0, 2.0)
        y = Identity.apply(x)
        assert y is not x and not y.is_leaf
        with torch.no_grad():
            assert Identity.apply(x) is not x
        (y + x).sum().backward()
        return x.grad

    run_on_both(mesh, run)


def test_gradients_that_are_not_made_up(mesh: Any) -> None:
    def run() -> Any:
        x = leaf(1.0, 2.0)
        Lazy.apply(x)[0].sum().backward()
        Lazy.apply(x)[1].sum().backward()
        return x.grad

    run_on_both(mesh, run)


def test_the_bodies_run_in_the_kernel_with_the_mesh_active(cell: Any) -> None:
    seen: list[Any] = []

    class Noted(Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            seen.append(torch.is_grad_enabled())
            return x * 1

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            seen.append((ml.get_active_mesh() is cell, torch.is_grad_enabled(), grad.tolist()))
            return grad * torch.full((2,), 3.0)

    x = leaf(1.0, 2.0)
    for call in (lambda y: y.backward(), lambda y: torch.autograd.backward(y), lambda y: torch.autograd.grad(y, x)):
        seen.clear()
        call(Noted.apply(x).sum())
        assert seen == [False, (True, False, [1, 1])]
    assert x.grad.tolist() == [6, 6]


def test_functions_one_behind_the_other_each_time_anew(mesh: Any) -> None:
    def run() -> Any:
        x = leaf(1.0, -2.0)
        found = []
        for k in range(4):
            x.grad = None
            Scale.apply(Sign.apply(Scale.apply(x, 2.0 + k)) * x, 3.0).sum().backward()
            found.append(x.grad)
        return found

    run_on_both(mesh, run)


def test_an_error_in_backward_is_raised_as_it_is(cell: Any) -> None:
    class Broken(Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return x * 1

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            raise KeyError("mine")

    x, w = leaf(1.0), leaf(1.0)
    with pytest.raises(KeyError, match="mine"):
        Broken.apply(x).backward()
    assert x.grad is None
    (w * 3).backward()
    assert w.grad.tolist() == [3]


def test_what_a_pass_did_before_it_failed_is_kept_as_in_plain_torch(cell: Any) -> None:
    class Broken(Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return x * 1

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            raise KeyError("mine")

    x, w = leaf(1.0), leaf(1.0)
    loss = Broken.apply(x * 1) * 1 + w * 2
    with pytest.raises(KeyError):
        loss.backward()
    before = 0 if w.grad is None else w.grad.item()
    (w * 3).backward()
    assert w.grad.item() == before + 3
    w.grad = None
    (w * 3).backward()
    assert w.grad.item() == 3


def test_a_failing_op_in_backward_is_the_error(cell: Any) -> None:
    class Bad(Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return x * 1

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            return torch.ones(2, 3) @ torch.ones(2, 3)

    x = leaf(1.0, 2.0)
    with pytest.raises(RuntimeError, match="mat1 and mat2|shapes cannot be multiplied"):
        Bad.apply(x).sum().backward()


@pytest.mark.parametrize(("given", "match"), [((), "incorrect number"), ((torch.ones(2),), "LOCAL_TENSOR")])
def test_what_backward_may_not_return(cell: Any, given: Any, match: str) -> None:
    class Odd(Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return x * 1

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            return given

    with pytest.raises((RuntimeError, TypeError), match=match):
        Odd.apply(leaf(1.0, 2.0)).sum().backward()


def test_a_saved_tensor_that_was_written_since_is_an_error(cell: Any) -> None:
    x = leaf(1.0, 2.0)
    y = x * 1
    z = Scale.apply(y, 2.0)
    with torch.no_grad():
        y.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.sum().backward()


def test_a_graph_serves_once_unless_it_is_retained(mesh: Any) -> None:
    def run() -> Any:
        x = leaf(1.0, 2.0)
        loss = Scale.apply(x, 2.0).sum()
        loss.backward(retain_graph=True)
        loss.backward()
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()
        return x.grad

    run_on_both(mesh, run)


def test_the_node_is_called_as_the_class(cell: Any) -> None:
    y = Scale.apply(leaf(1.0), 2.0)
    assert y.grad_fn.name() == "ScaleBackward"


def test_a_function_is_let_go_with_its_graph(cell: Any) -> None:
    before = settled(cell)
    x = leaf(1.0, 2.0)
    for _ in range(3):
        Scale.apply(x, 2.0).sum().backward()
        Cube.apply(x)  # a saved output makes no circle
    with torch.no_grad():
        Scale.apply(x, 2.0)
    assert settled(cell) == before


def test_unequal_data_in_a_backward_makes_the_gradient_unequal(cell: Any) -> None:
    own = own_number(cell)

    class ByRank(Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            return grad * own

    for _ in range(2):
        x = leaf(1.0, 2.0)
        y = ByRank.apply(x)
        assert y.tolist() == [2, 4]
        y.sum().backward()
        assert rank_values(x.grad) == [[0, 0], [1, 1]]
        assert_known_or_refused(x.grad)
        (grad,) = torch.autograd.grad(ByRank.apply(x).sum(), x)
        assert_known_or_refused(grad)


def test_a_local_tensor_that_wants_a_gradient_is_refused(cell: Any) -> None:
    with ml.no_mesh.activate():
        local = torch.ones(2, requires_grad=True)
    with pytest.raises(TypeError, match="LOCAL_TENSOR"):
        Split.apply(local, leaf(1.0, 2.0))


def test_local_tensors_alone_stay_local(cell: Any) -> None:
    with ml.no_mesh.activate():
        local = torch.ones(2, requires_grad=True)
    Scale.apply(local, 2.0).sum().backward()
    assert type(local.grad) is torch.Tensor and local.grad.tolist() == [4, 4]
