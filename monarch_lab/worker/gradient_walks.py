"""The walks of ``ml.grad_generator``, by number. Their results come with a Python value, so each is waited for."""

from __future__ import annotations

from typing import Any

import torch

from monarch_lab.tensors.gradient_walk import GradientWalk, execution_order
from monarch_lab.worker.calls import refuse_failed

_walks: dict[int, GradientWalk] = {}


def begin(number: float, roots: list[torch.Tensor], grads: list[Any], wrt: list[torch.Tensor]) -> int:
    refuse_failed(*roots, *grads, *wrt)
    _walks[int(number)] = GradientWalk(roots, grads, wrt)
    return 0


def gradient(number: float, k: int) -> tuple[torch.Tensor | None, int]:
    return _walks[int(number)].gradient(k), k


def order(roots: list[torch.Tensor], wrt: list[torch.Tensor]) -> list[int]:
    refuse_failed(*roots, *wrt)
    return execution_order(roots, wrt)


def end(number: float) -> None:
    _walks.pop(int(number), None)
