"""What users train with beside modules and optimizers: schedulers, scaling, parametrizations, pruning, averaging."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, get_total_norm, parametrizations, parametrize, prune
from torch.optim import lr_scheduler as ls
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn, update_bn

from tests.controller.compare import run_on_both

SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": lambda o: ls.LambdaLR(o, lambda k: 0.9**k),
    "MultiplicativeLR": lambda o: ls.MultiplicativeLR(o, lambda k: 0.8),
    "StepLR": lambda o: ls.StepLR(o, 2, 0.5),
    "MultiStepLR": lambda o: ls.MultiStepLR(o, [1, 3], 0.5),
    "ConstantLR": lambda o: ls.ConstantLR(o, 0.5, 2),
    "LinearLR": lambda o: ls.LinearLR(o, 0.25, total_iters=4),
    "ExponentialLR": lambda o: ls.ExponentialLR(o, 0.7),
    "SequentialLR": lambda o: ls.SequentialLR(o, [ls.ConstantLR(o, 0.1, 2), ls.ExponentialLR(o, 0.9)], [2]),
    "CosineAnnealingLR": lambda o: ls.CosineAnnealingLR(o, 5, 0.001),
    "ChainedScheduler": lambda o: ls.ChainedScheduler([ls.ConstantLR(o, 0.1, 2), ls.ExponentialLR(o, 0.9)], o),
    "ReduceLROnPlateau": lambda o: ls.ReduceLROnPlateau(o, patience=0, factor=0.5, threshold=0.5),
    "CyclicLR": lambda o: ls.CyclicLR(o, 0.01, 0.1, 2, cycle_momentum=True),
    "CosineAnnealingWarmRestarts": lambda o: ls.CosineAnnealingWarmRestarts(o, 2, 2),
    "OneCycleLR": lambda o: ls.OneCycleLR(o, 0.1, total_steps=8),
    "PolynomialLR": lambda o: ls.PolynomialLR(o, 4, 2.0),
    "SWALR": lambda o: SWALR(o, 0.01, 3),
}


def test_the_table_has_every_scheduler() -> None:
    assert set(ls.__all__) - {"LRScheduler"} <= set(SCHEDULERS)


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("is_tensor", [False, True], ids=["float", "tensor"])
def test_a_scheduler_trains_as_in_plain_torch(mesh: Any, name: str, is_tensor: bool) -> None:
    def run() -> Any:
        w = torch.tensor([1.0, -2.0, 3.0]).requires_grad_()
        rate: Any = torch.tensor(0.1) if is_tensor else 0.1
        optimizer = optim.SGD([w], lr=rate, momentum=0.9)
        scheduler = SCHEDULERS[name](optimizer)
        rates, losses = [], []
        for _ in range(6):
            optimizer.zero_grad()
            loss = (w * w).sum()
            loss.backward()
            optimizer.step()
            if name == "ReduceLROnPlateau":
                scheduler.step(loss.detach())
            else:
                scheduler.step()
            rates.append(float(optimizer.param_groups[0]["lr"]))
            losses.append(loss.detach())
        return w, losses, rates

    run_on_both(mesh, run, 1e-5)


def small() -> Any:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))


def fit(model: Any, steps: int = 3, after: Callable[[Any], Any] = lambda o: None) -> list[Any]:
    optimizer = optim.Adam(model.parameters(), lr=0.05)
    x, losses = torch.randn(5, 4), []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(x).pow(2).mean()
        loss.backward()
        after(model)
        optimizer.step()
        losses.append(loss.detach())
    return losses


def test_a_gradient_scaler_skips_steps_that_overflow(mesh: Any) -> None:
    def run() -> Any:
        model = small()
        optimizer = optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
        x, scales = torch.randn(5, 4), []
        for k in range(5):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(x).float().pow(2).mean() * (float("inf") if k == 2 else 1.0)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        return [p for p in model.parameters()], scales

    run_on_both(mesh, run, 1e-2)


def test_gradients_are_clipped_as_in_plain_torch(mesh: Any) -> None:
    def run() -> Any:
        model, norms = small(), []
        kinds = iter((2.0, 1.0, float("inf")))
        fit(model, 3, lambda m: norms.append(clip_grad_norm_(m.parameters(), 0.1, next(kinds))))
        fit(model, 2, lambda m: clip_grad_value_(m.parameters(), 0.01))
        return norms, get_total_norm([p.grad for p in model.parameters()]), list(model.parameters())

    run_on_both(mesh, run, 1e-5)


def test_a_gradient_that_is_not_finite_is_an_error_where_that_is_asked_for(cell: Any) -> None:
    w = torch.ones(2).requires_grad_()
    (w * float("nan")).sum().backward()
    with pytest.raises(RuntimeError, match="non-finite"):
        clip_grad_norm_([w], 1.0, error_if_nonfinite=True)


@pytest.mark.parametrize("name", ["weight_norm", "spectral_norm", "orthogonal"])
def test_a_parametrization_trains_as_in_plain_torch(mesh: Any, name: str) -> None:
    def run() -> Any:
        model = small()
        for k in (0, 2):
            getattr(parametrizations, name)(model[k])
        losses = fit(model)
        model.eval()
        values = [model[0].weight, model[2].weight]
        parametrize.remove_parametrizations(model[0], "weight")
        return losses, values, model[0].weight, fit(model, 1)

    run_on_both(mesh, run, 1e-4)


class Symmetric(nn.Module):
    def forward(self, x: Any) -> Any:
        return x.triu() + x.triu(1).mT

    def right_inverse(self, a: Any) -> Any:
        return a.triu()


def test_a_parametrization_of_the_user_s(mesh: Any) -> None:
    def run() -> Any:
        model = nn.Sequential(nn.Linear(4, 4))
        parametrize.register_parametrization(model[0], "weight", Symmetric())
        with parametrize.cached():
            losses = fit(model)
        model[0].weight = torch.eye(4)
        return losses, model[0].weight

    run_on_both(mesh, run, 1e-5)


def test_pruned_modules_train_as_in_plain_torch(mesh: Any) -> None:
    def run() -> Any:
        model = small()
        prune.l1_unstructured(model[0], "weight", amount=0.5)
        prune.ln_structured(model[2], "weight", amount=1, n=2, dim=0)
        prune.random_unstructured(model[0], "bias", amount=2)
        losses = fit(model)
        prune.global_unstructured([(model[0], "weight"), (model[2], "weight")], prune.L1Unstructured, amount=0.2)
        losses += fit(model, 1)
        masks = [model[0].weight_mask, model[2].weight_mask]
        prune.remove(model[0], "weight")
        assert prune.is_pruned(model)
        return losses, masks, list(model.parameters())

    run_on_both(mesh, run, 1e-5)


@pytest.mark.parametrize("kind", ["mean", "ema"])
def test_an_averaged_model_and_its_batch_norm(mesh: Any, kind: str) -> None:
    def run() -> Any:
        # Without the bias: the norm takes it out, and Adam would make steps of what rounding leaves of its gradient.
        model = nn.Sequential(nn.Linear(4, 6, bias=False), nn.BatchNorm1d(6), nn.Linear(6, 2))
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9) if kind == "ema" else None)
        losses = fit(model, 3, lambda m: average.update_parameters(m))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            update_bn([torch.randn(5, 4) for _ in range(3)], average)
        return losses, [p for p in average.parameters()], [b.float() for b in average.buffers()]

    run_on_both(mesh, run, 1e-5)
