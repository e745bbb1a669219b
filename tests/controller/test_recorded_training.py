"""Whole training steps as recordings: the losses and parameters of plain torch, however often they are replayed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.optim import lr_scheduler

import monarch_lab as ml
from tests.controller.compare import assert_same, is_mesh, own_number, rank_values

_STEPS = 9
_OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "SGD": lambda p: optim.SGD(p, 0.1),
    "momentum": lambda p: optim.SGD(p, 0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "Adam": lambda p: optim.Adam(p, 0.05),
    "amsgrad": lambda p: optim.Adam(p, 0.05, amsgrad=True, weight_decay=0.01),
    "AdamW": lambda p: optim.AdamW(p, 0.05),
    "NAdam": lambda p: optim.NAdam(p, 0.05),
    "RAdam": lambda p: optim.RAdam(p, 0.05),
    "Adamax": lambda p: optim.Adamax(p, 0.05),
    "Adagrad": lambda p: optim.Adagrad(p, 0.05, lr_decay=0.1),
    "Adadelta": lambda p: optim.Adadelta(p, 0.05),
    "RMSprop": lambda p: optim.RMSprop(p, 0.05, centered=True, momentum=0.5),
    "Rprop": lambda p: optim.Rprop(p, 0.05),
    "groups": lambda p: optim.SGD([{"params": [next(p)], "lr": 0.3}, {"params": list(p)}], lr=0.1),
}


class Training:
    """``python``: how often Python ran the step."""

    def __init__(self, make: Callable[..., Any], zero_first: bool = True, set_to_none: bool = True) -> None:
        torch.manual_seed(1)
        self.model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
        self.optimizer = make(self.model.parameters())
        self.scheduler = lr_scheduler.StepLR(self.optimizer, step_size=3, gamma=0.5)
        self.python = 0
        self.zero_first, self.set_to_none = zero_first, set_to_none

    def step(self, batch: Any) -> Any:
        self.python += 1
        if self.zero_first:
            self.optimizer.zero_grad(set_to_none=self.set_to_none)
        loss = self.model(batch).pow(2).sum()
        loss.backward()
        self.optimizer.step()
        if not self.zero_first:
            self.optimizer.zero_grad(set_to_none=self.set_to_none)
        return loss.detach()

    def run(self, wrap: Callable[..., Any]) -> list[Any]:
        step = wrap(self.step)
        batches = [torch.randn(5, 3) for _ in range(3)]
        losses = []
        for k in range(_STEPS):
            losses.append(step(batches[k % 3]))
            self.scheduler.step()
        return [losses, [p.detach() for p in self.model.parameters()]]


def compared(mesh: Any, make: Callable[..., Any], **options: Any) -> int:
    """How often Python ran the recorded step."""
    local = Training(make, **options).run(lambda fn: fn)
    with mesh.activate():
        training = Training(make, **options)
        far = training.run(ml.compile)
        assert all(is_mesh(x) for x in far[0])
        assert_same(far, local, 1e-5)
    return training.python


_ALWAYS = ("AdamW", "SGD", "groups")  # the others take a few seconds each


@pytest.mark.parametrize("name", [n if n in _ALWAYS else pytest.param(n, marks=pytest.mark.slow) for n in _OPTIMIZERS])
def test_a_recorded_step_trains_as_plain_torch(mesh: Any, name: str) -> None:
    ran = compared(mesh, _OPTIMIZERS[name])
    if name != "RAdam":  # it rectifies from the sixth step on, which is another kind of step
        assert ran <= 4  # one that makes the state, two that agree, and at most one without gradients before


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("zero_first", [True, False])
def test_gradients_are_cleared_where_the_step_clears_them(mesh: Any, zero_first: bool, set_to_none: bool) -> None:
    ran = compared(mesh, _OPTIMIZERS["AdamW"], zero_first=zero_first, set_to_none=set_to_none)
    assert ran <= 4


def test_gradients_add_up_where_nothing_clears_them(cell: Any) -> None:
    w = torch.ones(2, requires_grad=True)

    @ml.compile
    def pass_back(x: Any) -> None:
        (w * x).sum().backward()

    for k in range(1, 7):
        pass_back(torch.full((2,), 2.0))
        assert rank_values(w.grad) == [[2.0 * k] * 2] * 2
    w.grad = None
    pass_back(torch.full((2,), 3.0))
    assert rank_values(w.grad) == [[3.0] * 2] * 2


def test_a_rate_set_by_hand_is_read_at_each_replay(cell: Any) -> None:
    w = torch.ones(1, requires_grad=True)
    optimizer = optim.SGD([w], lr=0.5)

    @ml.compile
    def step() -> None:
        optimizer.zero_grad()
        w.sum().backward()
        optimizer.step()

    at = 1.0
    for rate in (0.5, 0.5, 0.5, 0.25, 0.125, 1.0, 0.0, 0.5):
        optimizer.param_groups[0]["lr"] = rate
        step()
        at -= rate
        assert rank_values(w.detach()) == [[at]] * 2


def test_a_scheduler_inside_is_refused(cell: Any) -> None:
    training, batch = Training(_OPTIMIZERS["SGD"]), torch.randn(5, 3)

    @ml.compile
    def step() -> None:
        training.step(batch)
        training.scheduler.step()

    with pytest.raises(TypeError, match="steps a StepLR, which replays would not: call scheduler.step"):
        for _ in range(3):
            step()


def test_data_parallel_training_keeps_the_model_equal(mesh: Any) -> None:
    batches = [torch.randn(8, 3) for _ in range(3)]

    def train(reduce: bool, wrap: Callable[..., Any], shard: Callable[[Any], Any]) -> list[Any]:
        torch.manual_seed(2)
        model = nn.Linear(3, 2)
        optimizer = optim.AdamW(model.parameters(), 0.05)

        @wrap
        def step(x: Any) -> Any:
            optimizer.zero_grad()
            loss = model(x).pow(2).mean()
            loss.backward()
            if reduce:
                for p in model.parameters():
                    p.grad.reduce_("gpu", "avg")
            optimizer.step()
            return loss.detach().reduce("gpu", "avg") if reduce else loss.detach()

        losses = [step(shard(batches[k % 3])) for k in range(_STEPS)]
        return [losses, [p.detach() for p in model.parameters()]]

    local = train(False, lambda fn: fn, lambda x: x)
    with mesh.activate():
        far = train(True, ml.compile, lambda x: mesh.shard(x, "gpu"))
        assert_same(far, local, 1e-5)
        for p in far[1]:
            assert p.equal_dims == ("host", "gpu")


def test_optimizers_steps_go_on_outside_of_the_recording(mesh: Any) -> None:
    def train(wrap: Callable[..., Any]) -> list[Any]:
        training = Training(_OPTIMIZERS["AdamW"])
        step, batch = wrap(training.step), torch.randn(5, 3)
        losses = []
        for k in range(12):
            losses.append((training.step if k in (5, 8, 9) else step)(batch))
        return losses

    local = train(lambda fn: fn)
    with mesh.activate():
        assert_same(train(ml.compile), local, 1e-5)


def test_batch_norm_and_dropout_train_as_without(mesh: Any) -> None:
    def train(wrap: Callable[..., Any]) -> list[Any]:
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2))
        optimizer = optim.SGD(model.parameters(), 0.001)
        batch = torch.randn(6, 3)

        @wrap
        def step() -> Any:
            optimizer.zero_grad(set_to_none=False)
            loss = model(batch).pow(2).sum()
            loss.backward()
            optimizer.step()
            return loss.detach()

        return [[step() for _ in range(7)], [b * 1 for b in model.buffers()]]

    local = train(lambda fn: fn)
    with mesh.activate():
        assert_same(train(ml.compile), local, 1e-5)


def test_gradients_of_leaves_made_inside(cell: Any) -> None:
    w = torch.ones(2, requires_grad=True)

    @ml.compile
    def slope(x: Any) -> Any:
        at = x.detach().requires_grad_()
        (by,) = torch.autograd.grad((at**3).sum(), [at])
        (w * x).sum().backward()
        w.grad = None
        return by

    for k in range(5):
        assert rank_values(slope(torch.full((2,), float(k)))) == [[3.0 * k * k] * 2] * 2
        assert w.grad is None


def test_leaves_made_inside_get_their_gradient(cell: Any) -> None:
    @ml.compile
    def slope(x: Any) -> Any:
        at = x.detach().requires_grad_()
        (at**3).sum().backward()
        return at.grad * 1

    for k in range(5):
        assert rank_values(slope(torch.full((2,), float(k)))) == [[3.0 * k * k] * 2] * 2


def test_clipping_works_on_gradients_that_differ(cell: Any) -> None:
    w = torch.ones(2, requires_grad=True)

    @ml.compile
    def step(x: Any) -> Any:
        w.grad = None
        (w * x).sum().backward()
        return nn.utils.clip_grad_norm_([w], 1.0)

    for _ in range(4):
        x = torch.tensor([3.0, 4.0]) * (1 + own_number(cell))
        assert rank_values(step(x)) == [5.0, 10.0]
        assert rank_values(w.grad)[0] == pytest.approx([0.6, 0.8], abs=1e-4)


def test_a_graph_that_outlives_the_recording_is_refused(cell: Any) -> None:
    w, kept = torch.ones(2, requires_grad=True), torch.zeros(2)

    @ml.compile
    def grow() -> None:
        kept.add_(w)

    with pytest.raises(TypeError, match="REQUIRES_GRAD: .*writes to a tensor from outside under autograd"):
        grow()


def test_other_memory_for_a_tensor_from_outside_is_refused(cell: Any) -> None:
    w = torch.ones(2)

    @ml.compile
    def swap(x: Any) -> None:
        w.data = x * 2

    with pytest.raises(TypeError, match=r"other memory \(.data = or set_\)"):
        swap(torch.ones(2))


def test_an_optimizer_that_makes_tensors_of_its_counters_is_refused(cell: Any) -> None:
    training, batch = Training(lambda p: optim.ASGD(p, 0.05)), torch.randn(5, 3)
    with pytest.raises(TypeError, match=r"a tensor made of a number that changes at .self.optimizer.step\(\)"):
        ml.compile(training.step)(batch)
    assert type(training.optimizer.param_groups[0]["lr"]) is float


@pytest.mark.parametrize("options", [{"foreach": True}, {"fused": True}])
def test_fused_and_foreach_optimizers_are_refused(cell: Any, options: dict[str, bool]) -> None:
    training, batch = Training(lambda p: optim.AdamW(p, 0.05, **options)), torch.randn(5, 3)
    with pytest.raises(TypeError, match="foreach=True or fused=True"):
        ml.compile(training.step)(batch)
    assert type(training.optimizer.param_groups[0]["lr"]) is float
