"""Backward passes, and which leaves got a gradient from them.

Leaves say so themselves, by a hook set when they became leaves (Engine.arm), so the answer is what autograd did,
not what the graph suggests. The first pass over a graph of one kind reports; later ones are checked against it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from monarch_lab.tensors.meta import describe, is_leaf
from monarch_lab.wire import engine as wire
from monarch_lab.worker.calls import refuse_failed
from monarch_lab.worker.failures import PredictionError

if TYPE_CHECKING:
    from monarch_lab.worker.engine import Engine


def width(plan: wire.BackwardDef) -> int:
    return 2 + 2 * plan.roots + plan.inputs + 3 * len(plan.grads)


def gradient_refs(plan: wire.BackwardDef, code: list[int], i: int, *, added_to: bool = False) -> list[int]:
    """Refs of the new gradients, or of those that are added to; 0 where a leaf has no such."""
    start = i + 2 + 2 * plan.roots + plan.inputs
    return code[start + 1 + added_to : start + 3 * len(plan.grads) : 3]


def run(engine: Engine, roots: list[Any], gradients: list[Any], inputs: list[Any], keep: bool, create: bool) -> None:
    refuse_failed(*roots, *gradients, *inputs)
    engine.touched.clear()
    torch.autograd.backward(
        roots,
        gradients if any(g is not None for g in gradients) else None,
        retain_graph=keep,
        create_graph=create,
        inputs=inputs or None,
    )


def _touched(engine: Engine) -> set[int]:
    """The leaves that got a gradient. A leaf whose handle is gone still has its hook, and so has one that was frozen
    since, whose hook is called with nothing."""
    cells = engine.cells
    return {ref for ref in engine.touched if ref in cells and cells[ref].grad is not None}


def _values(engine: Engine, refs: list[int]) -> list[Any]:
    return [engine.cells[ref] if ref else None for ref in refs]


def learn(engine: Engine, order: wire.LearnBackward, roots: list[Any]) -> wire.BackwardLearned:
    had = {}
    for ref, tensor in list(engine.cells.items()):
        if isinstance(tensor, torch.Tensor) and tensor.requires_grad and (ref in engine.retained or is_leaf(tensor)):
            had[ref] = tensor.grad
    run(
        engine,
        roots,
        _values(engine, order.gradients),
        _values(engine, order.inputs),
        order.keep_graph,
        order.create_graph,
    )
    touched = sorted(_touched(engine))  # the order in which a rank reached them is its own
    retained = [r for r, t in engine.retained.items() if r in engine.cells and t.grad is not had.get(r)]
    touched += sorted(r for r in retained if r not in touched)
    fresh, grads = [], []
    for k, ref in enumerate(touched):
        gradient = engine.cells[ref].grad
        fresh.append(gradient is not had.get(ref))
        grads.append(describe(gradient))
        if fresh[-1]:
            engine.cells[order.first_out - k] = gradient
    for ref in [r for r in engine.retained if r not in engine.cells]:
        del engine.retained[ref]
    return wire.BackwardLearned(order.ident, touched, fresh, grads)


def check_leaves(plan: wire.BackwardDef, expected: set[int], touched: set[int], before: int) -> None:
    """Raises PredictionError where other leaves got a gradient than the plan says."""
    if expected != touched:
        raise PredictionError(
            f"backward() reached {len(touched)} leaves where the same graph reached {before} before; "
            "what was learned is dropped, so running the cell again is right",
            -plan.plan,
        )


def replay(engine: Engine, plan: wire.BackwardDef, code: list[int], i: int) -> int:
    cells = engine.cells
    a = i + 2
    b = a + plan.roots
    c = b + plan.roots
    start = c + plan.inputs
    end = start + 3 * len(plan.grads)
    roots, gradients = [cells[r] for r in code[a:b]], _values(engine, code[b:c])
    run(engine, roots, gradients, [cells[r] for r in code[c:start]], plan.keep_graph, plan.create_graph)
    leaves = code[start:end:3]
    check_leaves(plan, set(leaves), _touched(engine), len(leaves))
    for k, leaf in enumerate(leaves):
        gradient = cells[leaf].grad
        engine.check_gradient(gradient, plan.grads[k])
        ref = code[start + 3 * k + 1]
        if ref:
            cells[ref] = gradient
    return end
