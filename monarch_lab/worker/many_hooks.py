"""torch's register_multi_grad_hook, whose function runs in the kernel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from monarch_lab.worker.callbacks import asking
from monarch_lab.worker.calls import refuse_failed


def register(handler: float, tensors: tuple[torch.Tensor, ...], mode: Any) -> None:
    """``mode``: "all" or "any", as torch's."""
    ask = asking(handler)
    refuse_failed(*tensors)

    def call(given: Sequence[torch.Tensor | None] | torch.Tensor) -> None:
        gradients = [given] if isinstance(given, torch.Tensor) else list(given)
        ask(gradients, len(gradients))

    ask.keep(torch.autograd.graph.register_multi_grad_hook(tensors, call, mode=mode))
