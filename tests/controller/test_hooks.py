"""Gradient hooks on mesh tensors run in the kernel, as eager torch runs them (rule 13)."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import nn

import monarch_lab as ml
from tests.controller.compare import assert_known_or_refused, own_number, rank_values, run_on_both


def leaf(*values: float) -> Any:
    return torch.tensor(values).requires_grad_()


def test_a_hook_on_a_leaf_and_one_between(mesh: Any) -> None:
    def run() -> Any:
        seen = []
        x = leaf(1.0, 2.0)
        y = x * 3
        x.register_hook(lambda g: seen.append(g.clone()))
        y.register_hook(lambda g: g * 10)
        y.register_hook(lambda g: seen.append(g.clone()))
        (y * y).sum().backward(retain_graph=True)
        (gx,) = torch.autograd.grad((y * 2).sum(), x)
        return seen, x.grad, gx

    run_on_both(mesh, run)


def test_hooks_are_called_in_every_later_pass_until_they_are_removed(mesh: Any) -> None:
    def run() -> Any:
        seen = []
        w = leaf(1.0, 2.0)
        for k in range(4):
            if k == 1:
                handle = w.register_hook(lambda g: g * 2)
            if k == 3:
                handle.remove()
            w.grad = None
            (w * 3).sum().backward()
            seen.append(w.grad)
        with w.register_hook(lambda g: g * 5):
            (w * 3).sum().backward()
        return seen, w.grad

    run_on_both(mesh, run)


def test_a_hook_registered_after_the_graph_was_learned(mesh: Any) -> None:
    def run() -> Any:
        seen = []
        w = leaf(1.0, 2.0)
        for k in range(4):
            y = w * 3
            loss = (y * y).sum()
            if k > 1:
                y.register_hook(lambda g: g * 10)
            seen.append(torch.autograd.grad(loss, w)[0])
        return seen

    run_on_both(mesh, run)


def test_a_hook_sees_the_gradients_that_are_there_so_far(cell: Any) -> None:
    seen = []
    x, late = leaf(1.0, 2.0), leaf(1.0, 1.0)
    y = x * late
    x.register_post_accumulate_grad_hook(lambda p: seen.append((p is x, p.grad.tolist())))
    y.sum().backward()
    assert seen == [(True, [1, 1])]
    first = x.grad
    (x * 2).sum().backward()
    assert x.grad is first and seen[1] == (True, [3, 3])


def test_an_optimizer_step_inside_backward(mesh: Any) -> None:
    def run() -> Any:
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
        optimizers = {p: torch.optim.AdamW([p], lr=0.1) for p in model.parameters()}

        def step(p: Any) -> None:
            optimizers[p].step()
            optimizers[p].zero_grad()

        for p in model.parameters():
            p.register_post_accumulate_grad_hook(step)
        batch, losses = torch.randn(5, 3), []
        for _ in range(3):
            loss = model(batch).pow(2).sum()
            loss.backward()
            losses.append(loss.item())
        assert all(p.grad is None for p in model.parameters())
        return losses, [p.detach() for p in model.parameters()]

    run_on_both(mesh, run, 1e-5)


def test_full_backward_hooks_of_modules(mesh: Any) -> None:
    def run() -> Any:
        seen: list[Any] = []
        model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
        model[1].register_full_backward_hook(lambda m, gi, go: seen.extend([gi[0].clone(), go[0].clone()]))
        model[2].register_full_backward_hook(lambda m, gi, go: (gi[0] * 2,))
        model[2].register_full_backward_pre_hook(lambda m, go: (go[0] * 3,))
        x = torch.randn(2, 3).requires_grad_()
        for _ in range(2):
            model(x).pow(2).sum().backward()
        return seen, x.grad, [p.grad for p in model.parameters()]

    run_on_both(mesh, run, 1e-5)


def test_forward_hooks_of_modules_change_what_they_return(mesh: Any) -> None:
    def run() -> Any:
        model = nn.Linear(3, 2)
        model.register_forward_pre_hook(lambda m, args: (args[0] * 2,))
        model.register_forward_hook(lambda m, args, out: out + 1)
        return model(torch.ones(1, 3)).detach()

    run_on_both(mesh, run)


def test_hooks_of_a_graph_node(mesh: Any) -> None:
    def run() -> Any:
        x = leaf(1.0, 2.0)
        y = x * 3
        y.grad_fn.register_hook(lambda inputs, outputs: tuple(None if g is None else g + outputs[0] for g in inputs))
        y.grad_fn.register_prehook(lambda outputs: tuple(g * 2 for g in outputs))
        y.sum().backward()
        return x.grad

    run_on_both(mesh, run)


def test_a_hook_with_create_graph(mesh: Any) -> None:
    def run() -> Any:
        x = leaf(1.0, 2.0)
        y = x**2
        y.register_hook(lambda g: g * x)
        (first,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), x)
        return first.detach(), second

    run_on_both(mesh, run)


def test_a_backward_pass_inside_a_hook(mesh: Any) -> None:
    def run() -> Any:
        x, w = leaf(1.0, 2.0), leaf(3.0, 4.0)

        def hook(g: Any) -> Any:
            with torch.enable_grad():
                (w * g.detach()).sum().backward()
            return g * w.grad

        y = x * w
        y.register_hook(hook)
        y.sum().backward()
        return x.grad, w.grad

    run_on_both(mesh, run)


def test_what_a_hook_raises_is_raised_and_the_mesh_goes_on(cell: Any) -> None:
    x = leaf(1.0, 2.0)

    def broken(g: Any) -> None:
        raise LookupError("mine")

    handle = x.register_hook(broken)
    with pytest.raises(LookupError, match="mine"):
        (x * 2).sum().backward()
    with pytest.raises(LookupError, match="mine"):
        torch.autograd.grad((x * 2).sum(), x)
    handle.remove()
    (x * 2).sum().backward()
    assert x.grad.tolist() == [2, 2]


def test_an_interrupt_in_a_hook_ends_the_pass(cell: Any) -> None:
    x = leaf(1.0, 2.0)

    def stopped(g: Any) -> None:
        raise KeyboardInterrupt

    handle = x.register_hook(stopped)
    with pytest.raises(KeyboardInterrupt):
        (x * 2).sum().backward()
    handle.remove()
    (x * 2).sum().backward()
    assert x.grad.tolist() == [2, 2]


def test_ranks_that_come_to_different_hooks_are_an_error(cell: Any) -> None:
    @ml.remote
    def one_of(a: Any, b: Any, rank: Any) -> Any:
        return (a if rank.item() == 0 else b) * 2

    a, b = leaf(1.0), leaf(1.0)
    for t in (a, b):
        t.register_hook(lambda g: None)
    with pytest.raises(ml.UsageError, match="different gradient hooks"):
        one_of(a, b, cell.rank("gpu")).sum().backward()


def test_one_rank_that_comes_to_no_hook_is_an_error_and_no_hang(cell: Any) -> None:
    @ml.remote
    def one_of(a: Any, b: Any, rank: Any) -> Any:
        return (a if rank.item() == 0 else b) * 2

    a, b = leaf(1.0), leaf(1.0)
    a.register_hook(lambda g: None)
    with pytest.raises(ml.UsageError, match="different gradient hooks"):
        one_of(a, b, cell.rank("gpu")).sum().backward()
    (b * 2).sum().backward()


def test_a_hook_that_makes_gradients_unequal_is_known(cell: Any) -> None:
    own = own_number(cell)
    x = leaf(1.0, 2.0)
    x.register_hook(lambda g: g * own)
    (x * 2).sum().backward()
    assert rank_values(x.grad) == [[0, 0], [2, 2]]
    assert_known_or_refused(x.grad)


def test_hooks_that_cannot_be(cell: Any) -> None:
    with pytest.raises(RuntimeError, match="doesn't require grad"):
        torch.ones(2).register_hook(print)
    with pytest.raises(RuntimeError, match="non-leaf"):
        (leaf(1.0) * 2).register_post_accumulate_grad_hook(print)
    with pytest.raises(TypeError, match="next_functions.*ml.remote"):
        _ = (leaf(1.0) * 2).grad_fn.next_functions


def settled(mesh: Any) -> int:
    """The number of functions here that the workers may still call."""
    for _ in range(2):
        gc.collect()
        torch.zeros(1) + 1
        mesh.sync()
    return len(mesh.client.callbacks)


def test_a_hook_is_let_go_with_its_graph(cell: Any) -> None:
    before = settled(cell)
    y = leaf(1.0, 2.0) * 2
    y.register_hook(lambda g: None)
    y.sum().backward()
    assert len(cell.client.callbacks) == before + 1
    del y
    assert settled(cell) == before


def test_a_hook_that_refers_to_its_model_does_not_keep_it(cell: Any) -> None:
    before = settled(cell)
    model: Any = nn.Linear(2, 2)
    model.weight.register_hook(lambda g: g * model.weight.detach())
    model.bias.register_post_accumulate_grad_hook(lambda p: model.zero_grad())
    model.register_full_backward_hook(lambda m, gi, go: (model.weight.detach().sum() * gi[0],))
    model(torch.ones(1, 2).requires_grad_()).sum().backward()
    model = None
    assert settled(cell) == before


def test_a_hook_on_many_gradients(mesh: Any) -> None:
    from torch.autograd.graph import register_multi_grad_hook

    def run() -> Any:
        seen: list[Any] = []
        a, b = leaf(1.0, 2.0), leaf(3.0, 4.0)
        c, d = a * b, a * b
        with register_multi_grad_hook((a, b, c, d), lambda grads: seen.append([g is not None for g in grads])):
            c.sum().backward(retain_graph=True)
            c.sum().backward(inputs=(a,), retain_graph=True)
        c.sum().backward(retain_graph=True)
        handle = register_multi_grad_hook([c, a], lambda grad: seen.append(grad.clone()), mode="any")
        (c * 3).sum().backward(retain_graph=True)
        handle.remove()
        (c * 5).sum().backward()
        return seen, a.grad, b.grad

    run_on_both(mesh, run)


def test_hooks_on_many_gradients_that_are_refused(cell: Any) -> None:
    from torch.autograd.graph import register_multi_grad_hook

    x = leaf(1.0, 2.0)
    with pytest.raises(ValueError, match="mode"):
        register_multi_grad_hook([x], print, mode="some")  # type: ignore[call-overload]
    with pytest.raises(RuntimeError, match="require grad"):
        register_multi_grad_hook([x, x.detach()], print)
    with ml.no_mesh.activate():
        local = torch.ones(2, requires_grad=True)
    with pytest.raises(ml.UsageError, match="LOCAL_TENSOR"):
        register_multi_grad_hook([x, local], print)


def test_reentrant_and_other_checkpoints(mesh: Any) -> None:
    from torch.utils.checkpoint import checkpoint, checkpoint_sequential

    def run() -> Any:
        model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Tanh(), nn.Linear(4, 3))
        x = torch.randn(2, 3).requires_grad_()
        for reentrant in (True, False):
            out = checkpoint(model, x, use_reentrant=reentrant)
            (out * out + x).sum().backward()
            checkpoint_sequential(model, 2, x, use_reentrant=reentrant).sum().backward()
        return x.grad, [p.grad for p in model.parameters()]

    run_on_both(mesh, run, 1e-5)


def test_a_backward_pass_of_a_remote_function_with_a_hook_inside(cell: Any) -> None:
    @ml.remote
    def loss_and_backward(w: Any) -> Any:
        loss = (w * 3).sum()
        loss.backward()
        return loss.detach()

    w = leaf(1.0, 1.0)
    w.register_hook(lambda g: g * 2)
    for k in (1, 2):
        loss_and_backward(w)
        assert rank_values(w.grad) == [[6 * k, 6 * k]] * 2


def test_hooks_and_functions_are_of_the_default_stream() -> None:
    with ml.local_mesh(gpus_per_host=1, device="cpu", name="streams") as mesh, mesh.activate():
        with ml.Stream("side").activate():
            x = torch.ones(2, requires_grad=True)
        with pytest.raises(ml.MeshError, match='runs on the default stream alone, and this value is on stream "side"'):
            x.register_hook(print)
