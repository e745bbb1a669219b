"""Checkpoints on a mesh (rule 12): values and gradients of eager torch, the memory, and recordings."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import CheckpointError, checkpoint, checkpoint_sequential

import monarch_lab as ml
from tests.controller.compare import assert_known_or_refused, own_number, rank_values, run_on_both


def leaf(*values: float) -> Any:
    return torch.tensor(values).requires_grad_()


def block(width: int = 4) -> Any:
    return nn.Sequential(nn.Linear(width, width), nn.Dropout(0.3), nn.Tanh(), nn.Linear(width, width))


def test_a_checkpoint_draws_the_same_numbers_again(mesh: Any) -> None:
    def run() -> Any:
        model, x = block(), torch.randn(2, 4).requires_grad_()
        for _ in range(3):
            out = checkpoint(model, x, use_reentrant=False)
            (out * out + x).sum().backward()
        checkpoint_sequential(model, 2, x, use_reentrant=False).sum().backward()
        return x.grad, torch.rand(2), [p.grad for p in model.parameters()]

    run_on_both(mesh, run, 1e-5)


def test_checkpoints_in_checkpoints(mesh: Any) -> None:
    def run() -> Any:
        blocks = nn.ModuleList([block() for _ in range(4)])

        def inner(a: Any, b: Any, scale: float) -> Any:
            return blocks[0](a) * scale, blocks[1](b)

        def middle(a: Any) -> Any:
            p, q = checkpoint(inner, a, a * 2, scale=0.5, use_reentrant=False)
            return checkpoint(blocks[2], p + q, use_reentrant=False)

        def outer(a: Any) -> Any:
            return blocks[3](checkpoint(middle, a.sin(), use_reentrant=False)) + a

        x = torch.randn(2, 4).requires_grad_()
        for _ in range(2):
            out = checkpoint(outer, x * 1, use_reentrant=False)
            (out * out).sum().backward()
        return x.grad, [p.grad for p in blocks.parameters()]

    run_on_both(mesh, run, 1e-5)


def test_a_graph_that_is_kept_and_one_of_which_a_part_is_wanted(mesh: Any) -> None:
    def run() -> Any:
        model, x = block(), torch.randn(2, 4).requires_grad_()
        out = checkpoint(model, x, use_reentrant=False)
        other = checkpoint(lambda a: a.exp().sin(), x, use_reentrant=False)
        given = [torch.autograd.grad(out.sum(), x, retain_graph=True)[0] for _ in range(2)]
        (out.pow(2) + other).sum().backward()
        (g,) = torch.autograd.grad(checkpoint(lambda a: a.exp().sin(), x, use_reentrant=False).sum(), x)
        return given, g, x.grad

    run_on_both(mesh, run, 1e-5)


def test_second_derivatives_through_a_checkpoint(mesh: Any) -> None:
    def run() -> Any:
        x = leaf(0.5, 1.0)
        y = checkpoint(lambda a: (a.exp() * a).sin(), x, use_reentrant=False).sum()
        (g,) = torch.autograd.grad(y, x, create_graph=True)
        (g * g).sum().backward()
        return g, x.grad

    run_on_both(mesh, run, 1e-5)


def test_a_gradient_taken_inside_a_checkpoint(mesh: Any) -> None:
    def run() -> Any:
        x = leaf(0.5, 1.0)

        def fn(a: Any) -> Any:
            (g,) = torch.autograd.grad(a.exp().sin().sum(), a, create_graph=True)
            return (g * g).sum()

        checkpoint(fn, x, use_reentrant=False, early_stop=False).backward()
        return x.grad

    run_on_both(mesh, run, 1e-5)


def test_functions_hooks_and_autocast_in_a_checkpoint(mesh: Any) -> None:
    def run() -> Any:
        model, x = block(), torch.randn(2, 4).requires_grad_()
        seen: list[Any] = []

        def fn(a: Any) -> Any:
            h = model(a)
            assert h.dtype is torch.bfloat16
            h.register_hook(lambda g: seen.append(g.dtype))
            return h.float()

        with torch.autocast("cpu", torch.bfloat16):
            out = checkpoint(fn, x, use_reentrant=False)
        out.sum().backward()
        return x.grad, seen

    run_on_both(mesh, run, 1e-2)


def test_a_checkpoint_runs_again_once_a_pass_and_after_the_cell_too(mesh: Any) -> None:
    runs = []
    with mesh.activate():
        x = leaf(1.0, 2.0)

        def fn(a: Any) -> Any:
            runs.append(a.is_mesh_tensor)
            return a.exp().sin().exp()

        out = checkpoint(fn, x, use_reentrant=False)
    checked = checkpoint(fn, out, use_reentrant=False)
    assert len(runs) == 2
    checked.sum().backward()
    assert runs == [True] * 4
    assert x.grad.tolist() == pytest.approx(_plain(), rel=1e-4)


def _plain() -> list[float]:
    with ml.no_mesh.activate():
        x = leaf(1.0, 2.0)
        x.exp().sin().exp().exp().sin().exp().sum().backward()
        assert x.grad is not None
        return x.grad.tolist()


def test_a_checkpoint_knows_which_gradients_differ_by_rank(cell: Any) -> None:
    x = leaf(1.0, 2.0)
    scale = (own_number(cell) + 1).requires_grad_()
    checkpoint(lambda a, s: (a * s).exp(), x, scale, use_reentrant=False).sum().backward()
    one, two = rank_values(x.grad)
    assert one != two
    assert_known_or_refused(x.grad)
    assert_known_or_refused(scale.grad)


def test_a_function_that_does_something_else_when_run_again_is_an_error(cell: Any) -> None:
    x, runs = leaf(1.0, 2.0), []

    def other_shapes(a: Any) -> Any:
        runs.append(1)
        return (a.exp() if len(runs) % 2 else a.repeat(2).exp()).sum()

    def fewer(a: Any) -> Any:
        runs.append(1)
        return a.exp().sin().sum() if len(runs) % 2 else a.exp().sum()

    for fn in (other_shapes, fewer):
        runs.clear()
        out = checkpoint(fn, x, use_reentrant=False)
        with pytest.raises(CheckpointError, match="the same each time"):
            out.backward()
        cell.sync()
    with pytest.raises(ml.UsageError, match="debug"):
        checkpoint(other_shapes, x, use_reentrant=False, debug=True)


def test_what_a_checkpointed_function_raises(cell: Any) -> None:
    x, runs = leaf(1.0, 2.0), []

    def fn(a: Any) -> Any:
        runs.append(1)
        y = a.exp()
        if len(runs) == fails_at:
            raise KeyError("mine")
        return y.sin()

    fails_at = 1
    with pytest.raises(KeyError, match="mine"):
        checkpoint(fn, x, use_reentrant=False)
    fails_at = 3
    out = checkpoint(fn, x, use_reentrant=False)
    with pytest.raises(KeyError, match="mine"):
        out.sum().backward()
    checkpoint(fn, x, use_reentrant=False).sum().backward()
    (x * 2).sum().backward()
    assert x.grad is not None


def test_an_interrupt_in_a_checkpoint_leaves_no_hooks_behind(cell: Any) -> None:
    x = leaf(1.0, 2.0)

    def fn(a: Any) -> Any:
        a.exp()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        checkpoint(fn, x, use_reentrant=False)
    cell.client.stop_cell()
    x.exp().sum().backward()
    assert x.grad.tolist() == pytest.approx([2.71828, 7.38906], rel=1e-4)


# --- memory


@ml.remote
def _note(tensor: Any) -> Any:
    from torch.multiprocessing.reductions import StorageWeakRef

    noted = torch.__dict__.setdefault("_noted_storages", [])
    noted.append(StorageWeakRef(tensor.untyped_storage()))
    return torch.zeros(())


@ml.remote
def _alive() -> Any:
    noted = torch.__dict__.setdefault("_noted_storages", [])
    return torch.tensor(float(sum(not ref.expired() for ref in noted)))


@ml.remote
def _forget() -> Any:
    torch.__dict__.pop("_noted_storages", None)
    return torch.zeros(())


@contextlib.contextmanager
def _counting(mesh: Any) -> Iterator[Any]:
    def alive() -> Any:
        gc.collect()
        mesh.client.settle()  # what has died here goes out
        return rank_values(_alive())

    _forget()
    yield alive
    _forget()


def _chain(a: Any) -> Any:
    for _ in range(10):
        a = torch.tanh(a)
        _note(a.detach())
    return a


def test_a_checkpoint_keeps_its_inputs_and_its_outputs_alone(cell: Any) -> None:
    x = torch.randn(100).requires_grad_()
    with _counting(cell) as alive:
        out = _chain(x)
        assert alive() == [10, 10]
        del out
        assert alive() == [0, 0]
        out = checkpoint(_chain, x, use_reentrant=False)
        assert alive() == [1, 1]  # the output
        out.sum().backward()
        del out
        assert alive() == [0, 0]


def test_the_inner_checkpoints_of_a_checkpoint_keep_nothing(cell: Any) -> None:
    x = torch.randn(100).requires_grad_()

    def outer(a: Any) -> Any:
        for _ in range(5):
            a = checkpoint(_chain, a, use_reentrant=False)
        return a

    with _counting(cell) as alive:
        out = outer(x)
        assert alive() == [5, 5]
        del out
        out = checkpoint(outer, x, use_reentrant=False)
        assert alive() == [1, 1]
        at: list[Any] = []
        x.register_hook(lambda g: at.append(alive()))
        out.sum().backward()
        del out
        assert alive() == [0, 0]
        assert at[0][0] < 20  # of 50 without checkpoints


# --- beside recordings


def test_a_recording_has_no_checkpoint_inside_and_is_right_in_one() -> None:
    # Of its own: a mesh that has hooks somewhere records nothing.
    with ml.local_mesh(gpus_per_host=1, device="cpu", name="recorded") as mesh, mesh.activate():
        w, batch = leaf(0.5, 1.0), torch.ones(2)

        @ml.compile
        def refused(a: Any) -> Any:
            return checkpoint(torch.exp, a * w, use_reentrant=False)

        @ml.compile
        def recorded(a: Any) -> Any:
            return (a * w.exp()).sin()

        with pytest.raises(ml.UsageError, match="a checkpoint or a hook for saved tensors"):
            refused(batch)
        found = []
        for _ in range(3):
            w.grad = None
            checkpoint(lambda a: recorded(a.cos()).tanh(), batch, use_reentrant=False).sum().backward()
            found.append(w.grad.tolist())
        w.grad = None
        (batch.cos() * w.exp()).sin().tanh().sum().backward()
        for gradient in found:
            assert gradient == pytest.approx(w.grad.tolist(), rel=1e-5)


def test_a_recorded_function_calls_the_hooks_around_it(cell: Any) -> None:
    w, batch, packed = leaf(0.5, 1.0), torch.ones(2), []

    @ml.compile
    def recorded(a: Any) -> Any:
        return (a * w.exp()).sin()

    def pack(t: Any) -> Any:
        packed.append(1)
        return t.detach()

    for _ in range(3):
        with torch.no_grad():
            recorded(batch)
    with saved_tensors_hooks(pack, lambda t: t):
        recorded(batch).sum().backward()
    assert len(packed) == 3  # what exp() gave, the batch, what sin() was given
    w2 = leaf(0.5, 1.0)
    (batch * w2.exp()).sin().sum().backward()
    assert w.grad.tolist() == w2.grad.tolist()
