"""backward, .grad and torch.autograd on mesh tensors (rules 7 and 20)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import monarch_lab as ml
from tests.controller.compare import (
    assert_known_or_refused,
    assert_metadata_is_true,
    own_number,
    rank_values,
    run_on_both,
)


def leaf(*values: float) -> Any:
    return torch.tensor(values).requires_grad_()


def test_backward_fills_the_gradients_of_the_leaves_it_reached(cell: Any) -> None:
    a, b, c = leaf(1.0, 2.0), leaf(3.0, 4.0), leaf(5.0)
    (a * b).sum().backward()
    assert a.grad.tolist() == [3, 4] and b.grad.tolist() == [1, 2] and c.grad is None


def test_the_same_ops_with_another_graph_touch_other_leaves(cell: Any) -> None:
    for use_b in (True, False, True, False):
        a, b = leaf(1.0, 2.0), leaf(3.0, 4.0)
        other = b if use_b else b.detach()
        (a * other).sum().backward()
        assert a.grad.tolist() == [3, 4]
        assert (b.grad is None) == (not use_b)


def test_leaves_of_one_kind_are_told_apart(cell: Any) -> None:
    a, b = leaf(1.0, 1.0), leaf(1.0, 1.0)
    for _ in range(2):
        a.grad = b.grad = None
        (a * 2).sum().backward()
        assert a.grad.tolist() == [2, 2] and b.grad is None
        (b * 2).sum().backward()
        assert b.grad.tolist() == [2, 2]


def test_a_gradient_is_one_object_until_it_is_replaced(cell: Any) -> None:
    w = leaf(1.0, 2.0)
    (w * 2).sum().backward()
    gradient = w.grad
    gradient.note = "mine"
    assert w.grad is gradient
    (w * 2).sum().backward()
    assert w.grad is gradient and w.grad.note == "mine" and gradient.tolist() == [4, 4]
    w.grad = None
    (w * 2).sum().backward()
    assert w.grad is not gradient and w.grad.tolist() == [2, 2]


def test_gradients_of_repeated_passes_come_without_a_wait(cell: Any) -> None:
    w = leaf(1.0, 2.0)

    def step() -> None:
        w.grad = None
        (w * 2).tanh().sum().backward()

    for _ in range(3):
        step()
    misses = cell.client.cache.misses
    for _ in range(5):
        step()
    assert cell.client.cache.misses == misses
    assert_metadata_is_true(w.grad)


@pytest.mark.parametrize("given", [None, "tensor"])
def test_backward_takes_the_gradient_of_a_root(mesh: Any, given: str | None) -> None:
    def run() -> Any:
        w = torch.arange(3.0).requires_grad_()
        y = w * w
        y.backward(torch.tensor([1.0, 2.0, 3.0])) if given else y.sum().backward()
        return w.grad

    run_on_both(mesh, run)


def test_a_vector_without_a_gradient_is_refused_as_in_plain_torch(cell: Any) -> None:
    y = leaf(1.0, 2.0) * 2
    with pytest.raises(RuntimeError, match="scalar outputs"):
        y.backward()


def test_a_second_backward_through_a_freed_graph_fails_as_in_plain_torch(cell: Any) -> None:
    w = leaf(1.0, 2.0)
    loss = (w**2).sum()
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()
        cell.sync()


def test_a_leaf_that_nobody_holds_any_more_is_passed_by(cell: Any) -> None:
    w = leaf(1.0, 2.0)
    for _ in range(3):
        w.grad = None
        loss = (leaf(3.0, 4.0) * w).sum()
        loss.backward()
        assert w.grad.tolist() == [3, 4]


def test_a_leaf_frozen_between_forward_and_backward_gets_no_gradient(cell: Any) -> None:
    for _ in range(3):
        w, v = leaf(1.0, 2.0), leaf(3.0, 4.0)
        loss = (w * v).sum()
        w.requires_grad_(False)
        loss.backward()
        assert w.grad is None and v.grad.tolist() == [1, 2]


def test_a_view_that_torch_forbids_to_write_to_does_not_stop_other_backward_passes(cell: Any) -> None:
    w = leaf(1.0, 2.0, 3.0)
    with torch.no_grad():
        view = w.view(-1)[:2]
        view.add_(1)
    for _ in range(2):
        w.grad = None
        (w * 2).sum().backward()
        assert w.grad.tolist() == [2, 2, 2]
    assert view.tolist() == [2, 3]


def test_a_retained_graph_serves_again(mesh: Any) -> None:
    def run() -> Any:
        w = torch.arange(3.0).requires_grad_()
        loss = (w**3).sum()
        loss.backward(retain_graph=True)
        loss.backward()
        return w.grad

    run_on_both(mesh, run)


def test_several_roots_go_back_at_once(mesh: Any) -> None:
    def run() -> Any:
        w = torch.arange(3.0).requires_grad_()
        torch.autograd.backward([(w * 2).sum(), w**2], [None, torch.ones(3)])
        return w.grad

    run_on_both(mesh, run)


def test_backward_to_some_inputs_leaves_the_others_alone(cell: Any) -> None:
    a, b = leaf(1.0, 2.0), leaf(3.0, 4.0)
    (a * b).sum().backward(inputs=[a])
    assert a.grad.tolist() == [3, 4] and b.grad is None
    (a * b).sum().backward(inputs=[b])
    assert a.grad.tolist() == [3, 4] and b.grad.tolist() == [1, 2]


def test_autograd_grad_gives_none_for_what_was_not_used(cell: Any) -> None:
    for used in (True, False, True):
        a, b = leaf(1.0, 2.0), leaf(3.0, 4.0)
        loss = (a * (b if used else b.detach())).sum()
        ga, gb = torch.autograd.grad(loss, (a, b), allow_unused=True)
        assert ga.tolist() == [3, 4]
        assert gb.tolist() == [1, 2] if used else gb is None
        assert a.grad is None and b.grad is None


def test_autograd_grad_refuses_an_unused_input_that_is_not_allowed(cell: Any) -> None:
    a, b = leaf(1.0), leaf(2.0)
    with pytest.raises(RuntimeError, match="not have been used"):
        torch.autograd.grad((a * 2).sum(), (a, b))


def test_autograd_grad_makes_zeros_where_asked(cell: Any) -> None:
    a, b = leaf(1.0), leaf(2.0)
    ga, gb = torch.autograd.grad((a * 2).sum(), (a, b), materialize_grads=True)
    assert (ga.tolist(), gb.tolist()) == ([2], [0])


def test_double_backward_gives_the_second_derivative(mesh: Any) -> None:
    def run() -> Any:
        w = torch.arange(1.0, 4.0).requires_grad_()
        (first,) = torch.autograd.grad((w**4).sum(), w, create_graph=True)
        assert first.requires_grad
        (second,) = torch.autograd.grad(first.sum(), w)
        w2 = torch.arange(1.0, 4.0).requires_grad_()
        (w2**3).sum().backward(create_graph=True)
        (w2.grad**2).sum().backward()
        return first.detach(), second, w2.grad.detach()

    run_on_both(mesh, run)


def test_a_gradient_penalty_trains(mesh: Any) -> None:
    def run() -> Any:
        model, x = nn.Linear(3, 1), torch.randn(4, 3).requires_grad_()
        losses = []
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(3):
            optimizer.zero_grad()
            (slope,) = torch.autograd.grad(model(x).tanh().sum(), x, create_graph=True)
            loss = (slope.norm(dim=1) - 1).pow(2).mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    run_on_both(mesh, run, 1e-5)


def test_retain_grad_keeps_the_gradient_of_a_value_between(cell: Any) -> None:
    for _ in range(2):
        w = leaf(1.0, 2.0)
        y = w * 3
        y.retain_grad()
        y.retain_grad()
        assert y.retains_grad and not (w * 2).retains_grad
        (y * y).sum().backward()
        assert y.grad.tolist() == [6, 12] and w.grad.tolist() == [18, 36]


def test_ops_under_no_grad_make_no_graph(cell: Any) -> None:
    w = leaf(1.0, 2.0)
    for _ in range(2):
        with torch.no_grad():
            y = w * 2
        z = w * 2
        assert not y.requires_grad and y.is_leaf and z.requires_grad and not z.is_leaf
        assert_metadata_is_true(y, z)
    with torch.no_grad(), torch.enable_grad():
        assert (w * 2).requires_grad
    with torch.set_grad_enabled(False):
        assert not (w * 2).requires_grad


def test_inference_mode_makes_inference_tensors(cell: Any) -> None:
    w = leaf(1.0, 2.0)
    for _ in range(2):
        with torch.inference_mode():
            y = w * 2
        assert y.is_inference() and not y.requires_grad
        assert not (w * 2).is_inference()
    with pytest.raises(RuntimeError, match="[Ii]nference"):
        y.requires_grad_()


def test_a_write_in_inference_mode_is_seen(cell: Any) -> None:
    with torch.inference_mode():
        x = torch.zeros(2)
        for _ in range(2):
            x.add_(own_number(cell))
            assert_known_or_refused(x)


def test_a_custom_loop_that_writes_gradients_by_hand_works(mesh: Any) -> None:
    def run() -> Any:
        w = torch.arange(3.0).requires_grad_()
        w.grad = torch.ones(3)
        (w * 2).sum().backward()
        first = w.grad.clone()
        w.grad.zero_()
        (w * 2).sum().backward()
        w.grad += 1
        w.grad.data.mul_(2)
        del_me = w.grad.clone()
        del w.grad
        assert w.grad is None
        return first, del_me

    run_on_both(mesh, run)


def test_a_gradient_of_another_shape_is_refused(cell: Any) -> None:
    w = leaf(1.0, 2.0)
    with pytest.raises(RuntimeError, match="size"):
        w.grad = torch.ones(3)
    with pytest.raises(TypeError, match="mesh"):
        with ml.no_mesh.activate():
            w.grad = torch.ones(2)


def test_leaves_reached_in_another_order_on_another_rank_keep_their_own_gradients(cell: Any) -> None:
    @ml.remote
    def combined(a: Any, b: Any, rank: Any) -> Any:
        if rank.item() == 0:
            first = a * 2
            return first + b * 3
        first = b * 3
        return first + a * 2

    a, b = leaf(1.0, 1.0), leaf(1.0, 1.0)
    for _ in range(2):
        a.grad = b.grad = None
        combined(a, b, cell.rank("gpu")).sum().backward()
        assert rank_values(a.grad) == [[2, 2], [2, 2]]
        assert rank_values(b.grad) == [[3, 3], [3, 3]]


def test_a_backward_pass_inside_a_remote_function_is_seen_by_the_controller(cell: Any) -> None:
    @ml.remote
    def loss_and_backward(w: Any) -> Any:
        loss = (w * 3).sum()
        loss.backward()
        return loss.detach()

    w = leaf(1.0, 1.0)
    loss_and_backward(w)
    assert w.grad is not None and rank_values(w.grad) == [[3, 3], [3, 3]]
    (w * 2).sum().backward()
    assert rank_values(w.grad) == [[5, 5], [5, 5]]


def test_different_leaves_on_the_ranks_are_an_error_that_says_so(cell: Any) -> None:
    @ml.remote
    def one_of(a: Any, b: Any, rank: Any) -> Any:
        return (a if rank.item() == 0 else b) * 2

    a, b = leaf(1.0), leaf(1.0)
    with pytest.raises(TypeError, match="rank 0.*rank 1|different leaves"):
        one_of(a, b, cell.rank("gpu")).sum().backward()


def test_unequal_data_gives_gradients_known_unequal(cell: Any) -> None:
    w = leaf(1.0, 2.0)
    (w * own_number(cell)).sum().backward()
    assert rank_values(w.grad) == [[0, 0], [1, 1]]
    with pytest.raises(TypeError, match="fetch_all"):
        w.grad.tolist()


def test_a_reduced_loss_of_unequal_data_gives_gradients_known_unequal(cell: Any) -> None:
    w = leaf(1.0, 2.0)
    loss = (w * own_number(cell)).sum().reduce("gpu", "sum")
    assert loss.item() == 3
    loss.backward()
    assert rank_values(w.grad) == [[0, 0], [1, 1]]
    with pytest.raises(TypeError, match="fetch_all"):
        w.grad.tolist()


def test_detach_and_requires_grad_make_leaves(mesh: Any) -> None:
    def run() -> Any:
        w = torch.arange(3.0).requires_grad_()
        y = (w * 2).detach().requires_grad_()
        (y * 3).sum().backward()
        assert w.grad is None and y.is_leaf
        w.requires_grad_(False)
        assert not (w * 2).requires_grad
        w.requires_grad = True
        (w * 5).sum().backward()
        z = w * 2
        z.detach_()
        assert z.is_leaf and not z.requires_grad
        return y.grad, w.grad

    run_on_both(mesh, run)


def test_a_jacobian_and_a_hessian_come_out_as_in_plain_torch(mesh: Any) -> None:
    def run() -> Any:
        x = torch.arange(1.0, 3.0)
        return torch.autograd.functional.jacobian(lambda v: v**2, x), torch.autograd.functional.hessian(
            lambda v: (v**3).sum(), x
        )

    run_on_both(mesh, run)


def test_anomaly_mode_names_the_failing_backward(cell: Any, capfd: Any) -> None:
    """The line of the forward pass, of a call that was learned, one that was known, one in a recording."""

    def root(x: Any) -> Any:
        return x.sqrt()

    @ml.compile
    def step(x: Any) -> Any:
        w.grad = None
        (x * w).sqrt().sum().backward()
        return w.grad * 1

    w = leaf(-1.0)
    with torch.autograd.detect_anomaly(check_nan=True):
        for told in ("learned", "known"):
            loss = w.sqrt().sum()  # told
            with pytest.raises(RuntimeError, match="nan"):
                loss.backward()
                cell.sync()
            seen = capfd.readouterr().err
            assert "Error detected in SqrtBackward0" in seen and "\x1e" not in seen, told
            assert "loss = w.sqrt().sum()  # told" in seen and "test_gradients.py" in seen
            assert "monarch_lab/worker" not in seen.partition("(Triggered")[0].partition("Traceback of forward")[2]
        with pytest.raises(RuntimeError, match="nan"):
            ml.remote(root)(w).sum().backward()
            cell.sync()
        seen = capfd.readouterr().err
        assert "ml.remote(root)(w).sum().backward()" in seen and "in root" in seen
        for k in (1.0, 2.0, 3.0):
            step(torch.full((1,), -k))
        with pytest.raises(RuntimeError, match="nan"):
            step(torch.ones(1))
            cell.sync()
        assert "(x * w).sqrt().sum().backward()" in capfd.readouterr().err
    with torch.autograd.detect_anomaly(check_nan=False):
        w.sqrt().sum().backward()
        cell.sync()
    w.grad = None


def test_grad_fn_stands_for_the_node_on_the_workers(cell: Any) -> None:
    w = leaf(1.0)
    assert w.grad_fn is None
    assert "MulBackward" in (w * 2).grad_fn.name()
