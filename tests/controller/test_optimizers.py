"""torch.optim, unmodified: the losses and parameters of plain torch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.optim import lr_scheduler

from tests.controller.compare import assert_same, run_on_both

_STEPS = 4
_PLAIN = sorted(
    name
    for name, kind in vars(optim).items()
    if isinstance(kind, type)
    and issubclass(kind, optim.Optimizer)
    and name not in ("Optimizer", "LBFGS", "SparseAdam", "Muon")
)


@pytest.fixture
def double() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def train(make: Callable[..., Any], steps: int = _STEPS) -> list[Any]:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    batch = torch.randn(5, 3)
    optimizer = make(model.parameters())
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(batch).pow(2).sum()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return [losses, [p.detach() for p in model.parameters()]]


@pytest.mark.parametrize("name", _PLAIN)
def test_an_optimizer_steps_as_in_plain_torch(mesh: Any, double: None, name: str) -> None:
    run_on_both(mesh, lambda: train(lambda p: getattr(optim, name)(p, lr=0.05)))


_OPTIONS: dict[str, Callable[..., Any]] = {
    "momentum": lambda p: optim.SGD(p, 0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "amsgrad": lambda p: optim.Adam(p, 0.1, amsgrad=True),
    "maximize": lambda p: optim.AdamW(p, 0.1, maximize=True),
    "centered": lambda p: optim.RMSprop(p, 0.1, centered=True, momentum=0.5),
    "foreach": lambda p: optim.AdamW(p, 0.1, foreach=True),
    "fused": lambda p: optim.Adam(p, 0.1, fused=True),
    "lr as tensor": lambda p: optim.Adam(p, torch.tensor(0.1)),
    "groups": lambda p: optim.SGD([{"params": [next(p)], "lr": 0.3}, {"params": list(p)}], lr=0.1),
}


@pytest.mark.parametrize("option", list(_OPTIONS))
def test_an_option_of_an_optimizer_acts_as_in_plain_torch(mesh: Any, double: None, option: str) -> None:
    run_on_both(mesh, lambda: train(_OPTIONS[option]))


@pytest.mark.parametrize("line_search", [None, "strong_wolfe"])
def test_lbfgs_drives_its_closure_as_in_plain_torch(mesh: Any, double: None, line_search: str | None) -> None:
    def fit() -> Any:
        model, batch = nn.Linear(3, 2), torch.randn(5, 3)
        optimizer = optim.LBFGS(model.parameters(), lr=0.5, max_iter=5, line_search_fn=line_search)

        def closure() -> Any:
            optimizer.zero_grad()
            loss = model(batch).pow(2).sum()
            loss.backward()
            return loss

        return [optimizer.step(closure).item() for _ in range(3)]

    run_on_both(mesh, fit)


def test_sparse_adam_steps_on_sparse_gradients_as_in_plain_torch(mesh: Any, double: None) -> None:
    def fit() -> Any:
        table = nn.Embedding(6, 3, sparse=True)
        optimizer = optim.SparseAdam(table.parameters(), lr=0.1)
        for words in ([1, 2, 2], [0, 1, 5], [3, 3, 3]):
            optimizer.zero_grad()
            table(torch.tensor(words)).pow(2).sum().backward()
            optimizer.step()
        return table.weight.detach()

    run_on_both(mesh, fit)


@pytest.mark.skipif(not hasattr(optim, "Muon"), reason="not in this torch")
def test_muon_steps_as_in_plain_torch(mesh: Any) -> None:
    run_on_both(mesh, lambda: train(lambda p: optim.Muon([q for q in p if q.ndim == 2], lr=0.1)), 1e-4)


_SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.9**epoch),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda epoch: 0.9),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [1, 3]),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 0.5, 2),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, total_iters=3),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 4),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 4, 2),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, 2),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=10),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, 0.1, 2), lr_scheduler.ExponentialLR(o, 0.9)], [2]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.1, 2), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "SWALR": lambda o: optim.swa_utils.SWALR(o, 0.05),
}


@pytest.mark.parametrize("name", list(_SCHEDULES))
def test_a_scheduler_sets_the_rates_of_plain_torch(mesh: Any, double: None, name: str) -> None:
    def fit() -> Any:
        model, batch = nn.Linear(3, 2), torch.randn(5, 3)
        optimizer = optim.SGD(model.parameters(), 0.1, momentum=0.9)
        schedule = _SCHEDULES[name](optimizer)
        seen = []
        for _ in range(5):
            optimizer.zero_grad()
            loss = model(batch).pow(2).sum()
            loss.backward()
            optimizer.step()
            schedule.step(loss) if name == "ReduceLROnPlateau" else schedule.step()
            seen += [loss.item(), float(optimizer.param_groups[0]["lr"])]
        return seen

    run_on_both(mesh, fit)


def test_a_learning_rate_schedule_makes_no_new_kind_of_call(cell: Any) -> None:
    model, batch = nn.Linear(3, 2), torch.randn(5, 3)
    optimizer = optim.AdamW(model.parameters(), lr=0.1)
    schedule = lr_scheduler.CosineAnnealingLR(optimizer, 50)

    def step() -> None:
        optimizer.zero_grad()
        model(batch).pow(2).sum().backward()
        optimizer.step()
        schedule.step()

    for _ in range(4):
        step()
    misses, asked = cell.client.cache.misses, cell.client.cache.asked
    for _ in range(8):
        step()
    assert (cell.client.cache.misses, cell.client.cache.asked) == (misses, asked)


def test_the_step_counters_of_an_optimizer_are_read_without_a_message(cell: Any) -> None:
    weight = nn.Parameter(torch.ones(3))
    optimizer = optim.Adam([weight])
    for _ in range(3):
        weight.grad = torch.ones(3)
        optimizer.step()
    cell.sync()
    ops = cell.client.ops
    assert optimizer.state[weight]["step"].item() == 3
    assert cell.client.ops == ops


def test_the_state_of_an_optimizer_moves_to_another_one(mesh: Any, double: None) -> None:
    def fit() -> Any:
        model, batch = nn.Linear(3, 2), torch.randn(5, 3)
        other = copy.deepcopy(model)
        first = optim.AdamW(model.parameters(), lr=0.1)
        for _ in range(2):
            first.zero_grad()
            model(batch).pow(2).sum().backward()
            first.step()
        other.load_state_dict(model.state_dict())
        second = optim.AdamW(other.parameters(), lr=0.3)
        second.load_state_dict(copy.deepcopy(first.state_dict()))
        for m, o in ((model, first), (other, second)):
            o.zero_grad()
            m(batch).pow(2).sum().backward()
            o.step()
        return [[p.detach() for p in m.parameters()] for m in (model, other)]

    (first, second), _ = run_on_both(mesh, fit)
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)


def test_an_averaged_model_follows_the_parameters(mesh: Any, double: None) -> None:
    def fit() -> Any:
        model, batch = nn.Linear(3, 2), torch.randn(5, 3)
        averaged = optim.swa_utils.AveragedModel(model)
        optimizer = optim.SGD(model.parameters(), 0.1)
        for _ in range(3):
            optimizer.zero_grad()
            model(batch).pow(2).sum().backward()
            optimizer.step()
            averaged.update_parameters(model)
        return [p.detach() for p in averaged.module.parameters()]

    run_on_both(mesh, fit)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_starts_a_step_afresh(mesh: Any, set_to_none: bool) -> None:
    def fit() -> Any:
        model, batch = nn.Linear(3, 2), torch.randn(5, 3)
        optimizer = optim.SGD(model.parameters(), 0.1)
        for _ in range(3):
            model(batch).pow(2).sum().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)
        left = [p.grad for p in model.parameters()]
        assert all((g is None) == set_to_none for g in left)
        return [p.detach() for p in model.parameters()]

    run_on_both(mesh, fit)


def test_gradients_add_up_over_micro_batches(mesh: Any) -> None:
    def fit() -> Any:
        model, batch = nn.Linear(3, 2), torch.randn(6, 3)
        optimizer = optim.SGD(model.parameters(), 0.1)
        for _ in range(2):
            optimizer.zero_grad()
            for part in batch.chunk(3):
                (model(part).pow(2).mean() / 3).backward()
            optimizer.step()
        return [p.detach() for p in model.parameters()]

    run_on_both(mesh, fit, 1e-5)


@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
def test_clip_grad_norm_scales_the_gradients(mesh: Any, norm_type: float) -> None:
    def clip() -> Any:
        model = nn.Linear(3, 2)
        model(torch.randn(5, 3)).pow(2).sum().backward()
        total = nn.utils.clip_grad_norm_(model.parameters(), 0.5, norm_type=norm_type)
        return total, [p.grad for p in model.parameters()]

    run_on_both(mesh, clip, 1e-5)


def test_clip_grad_value_and_parameter_vectors_work(mesh: Any) -> None:
    def clip() -> Any:
        model = nn.Linear(3, 2)
        model(torch.randn(5, 3)).pow(2).sum().backward()
        nn.utils.clip_grad_value_(model.parameters(), 0.1)
        vector = nn.utils.parameters_to_vector(model.parameters())
        nn.utils.vector_to_parameters(vector * 2, model.parameters())
        return vector.detach(), [p.grad for p in model.parameters()], [p.detach() for p in model.parameters()]

    run_on_both(mesh, clip)


def test_a_closure_free_loop_gives_the_same_numbers_on_the_second_run(cell: Any) -> None:
    def fit() -> Any:
        torch.manual_seed(7)
        return train(lambda p: optim.AdamW(p, 0.1))[0]

    assert_same(fit(), fit(), 0)
