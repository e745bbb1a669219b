"""The graph nodes of the notebook's autograd.Functions: the bodies run in the kernel, the place in the graph is here.

The kernel runs ``forward`` on mesh tensors, op by op, and then has :func:`attach` put a real autograd.Function around
what came out. That one saves the tensors, so that torch itself keeps its rules (versions, freed graphs, views, inputs
that were written), and asks the kernel for ``backward``.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch

from monarch_lab.worker.callbacks import Ask, asking
from monarch_lab.worker.calls import refuse_failed


@dataclass(slots=True)
class _Made:
    """What forward gave, in one object: as arguments, torch would take the outputs for inputs that are returned."""

    ask: Ask
    outputs: tuple[torch.Tensor, ...]
    saved: tuple[torch.Tensor, ...]
    dirty: tuple[torch.Tensor, ...]
    non_differentiable: tuple[torch.Tensor, ...]
    materialize: bool


class _Bridge(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, made: _Made, *inputs: torch.Tensor) -> Any:
        ctx.ask = made.ask
        ctx.save_for_backward(*made.saved)
        ctx.mark_dirty(*made.dirty)
        ctx.mark_non_differentiable(*made.non_differentiable)
        ctx.set_materialize_grads(made.materialize)
        return made.outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        given = ctx.ask([*gradients, *ctx.saved_tensors], len(gradients))
        return None, *given


@functools.lru_cache(maxsize=1000)
def _named(name: str) -> type[_Bridge]:
    """grad_fn is called as the user's class is."""
    return type(name, (_Bridge,), {})


def attach(
    handler: float,
    name: str,
    inputs: tuple[torch.Tensor, ...],
    outputs: tuple[torch.Tensor, ...],
    saved: tuple[torch.Tensor, ...],
    dirty: tuple[int, ...],
    non_differentiable: tuple[int, ...],
    materialize: bool,
) -> tuple[torch.Tensor, ...]:
    """The outputs, as results of a Function ``name`` of these inputs. ``dirty``: indices of inputs,
    ``non_differentiable``: of outputs."""
    ask = asking(handler)
    refuse_failed(*inputs, *outputs, *saved)
    made = _Made(
        ask,
        outputs,
        saved,
        tuple(inputs[k] for k in dirty),
        tuple(outputs[k] for k in non_differentiable),
        materialize,
    )
    return _named(name).apply(made, *inputs)


def delayed_error(message: str, tensors: tuple[Any, ...]) -> Any:
    """The tensors, with a graph node that raises when it is differentiated (torch's once_differentiable)."""
    refuse_failed(*tensors)
    return torch._C._functions.DelayedError(  # noqa: SLF001  once_differentiable has no other way
        message.encode(), len(tensors)
    )(*tensors)
