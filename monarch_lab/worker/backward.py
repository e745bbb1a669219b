"""Backward passes, and which leaves got a gradient from them.

Leaves say so themselves, by a hook set when they became leaves (OpStream.arm), so the answer is what autograd did,
not what the graph suggests. The first pass over a graph of one kind reports; later ones are checked against it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from monarch_lab.tensors.meta import describe, is_leaf
from monarch_lab.wire import engine as wire
from monarch_lab.worker.calls import refuse_failed
from monarch_lab.worker.failures import PredictionError

if TYPE_CHECKING:
    from monarch_lab.worker.op_stream import OpStream


def width(plan: wire.BackwardDef) -> int:
    return 2 + 2 * plan.roots + plan.inputs + 3 * len(plan.grads) + plan.crossings


def gradient_refs(plan: wire.BackwardDef, code: list[int], i: int, *, added_to: bool = False) -> list[int]:
    """Refs of the new gradients, or of those that are added to; 0 where a leaf has no such."""
    start = i + 2 + 2 * plan.roots + plan.inputs
    return code[start + 1 + added_to : start + 3 * len(plan.grads) : 3]


def crossing_refs(plan: wire.BackwardDef, code: list[int], i: int) -> list[int]:
    """The crossings whose gradient the pass reaches."""
    end = i + width(plan)
    return code[end - plan.crossings : end]


def run(
    engine: OpStream, roots: list[Any], gradients: list[Any], inputs: list[Any], keep: bool, create: bool
) -> list[int]:
    """The crossings whose gradient was reached."""
    refuse_failed(*roots, *gradients, *inputs)
    engine.touched.clear()
    with engine.moves.reached() as crossings:
        torch.autograd.backward(
            roots,
            gradients if any(g is not None for g in gradients) else None,
            retain_graph=keep,
            create_graph=create,
            inputs=inputs or None,
        )
    return sorted(crossings)


def _touched(engine: OpStream) -> set[int]:
    """The leaves that got a gradient. A leaf whose handle is gone still has its hook, and so has one that was frozen
    since, whose hook is called with nothing."""
    cells = engine.cells
    return {ref for ref in engine.touched if ref in cells and cells[ref].grad is not None}


def _values(engine: OpStream, refs: list[int]) -> list[Any]:
    return [engine.cells[ref] if ref else None for ref in refs]


def tell(engine: OpStream, next_ref: Callable[[], int]) -> tuple[list[int], list[int], list[wire.TensorMeta]]:
    """The leaves that got a gradient since the last report, the refs of those that are new, and their metadata."""
    touched = sorted(_touched(engine))  # the order in which a rank reached them is its own
    engine.touched.clear()
    known = engine.had[-1] if engine.had else {}
    retained = [r for r, t in engine.retained.items() if r in engine.cells and t.grad is not known.get(r)]
    touched += sorted(r for r in retained if r not in touched)
    outs, grads = [], []
    for ref in touched:
        gradient = engine.cells[ref].grad
        outs.append(0)
        if gradient is not known.get(ref):
            outs[-1] = next_ref()
            engine.cells[outs[-1]] = gradient
        grads.append(describe(gradient))
        for had in engine.had:
            had[ref] = gradient
    return touched, outs, grads


def learn(
    engine: OpStream, order: wire.LearnBackward, roots: list[Any]
) -> tuple[wire.BackwardLearned, BaseException | None]:
    """What the pass did; with the exception that ended it, up to there."""
    had = {}
    for ref, tensor in list(engine.cells.items()):
        if isinstance(tensor, torch.Tensor) and tensor.requires_grad and (ref in engine.retained or is_leaf(tensor)):
            had[ref] = tensor.grad
    engine.had.append(had)
    error, crossings = None, []
    try:
        crossings = run(
            engine,
            roots,
            _values(engine, order.gradients),
            _values(engine, order.inputs),
            order.keep_graph,
            order.create_graph,
        )
    except BaseException as e:
        error = e
    numbers = itertools.count()

    def next_ref() -> int:
        return order.first_out - next(numbers)

    touched, outs, grads = tell(engine, next_ref)
    engine.had.pop()
    for ref in [r for r in engine.retained if r not in engine.cells]:
        del engine.retained[ref]
    return wire.BackwardLearned(order.ident, touched, outs, grads, crossings), error


def missed(plan: wire.BackwardDef, touched: int) -> PredictionError:
    """Other leaves got a gradient than the plan says."""
    return PredictionError(
        f"backward() reached {touched} leaves where the same graph reached {len(plan.grads)} before; "
        "what was learned is dropped, so running the cell again is right",
        -plan.plan,
    )


def replay(engine: OpStream, plan: wire.BackwardDef, code: list[int], i: int) -> int:
    cells = engine.cells
    a = i + 2
    b = a + plan.roots
    c = b + plan.roots
    start = c + plan.inputs
    end = start + 3 * len(plan.grads)
    roots, gradients = [cells[r] for r in code[a:b]], _values(engine, code[b:c])
    inputs = [cells[r] for r in code[c:start]]
    crossings = run(engine, roots, gradients, inputs, plan.keep_graph, plan.create_graph)
    leaves = code[start:end:3]
    touched = _touched(engine)
    after = end + plan.crossings
    if set(leaves) != touched or code[end:after] != crossings:
        engine.moves.forget(crossings)
        raise missed(plan, len(touched))
    for k, leaf in enumerate(leaves):
        gradient = cells[leaf].grad
        engine.check_gradient(gradient, plan.grads[k])
        ref = code[start + 3 * k + 1]
        if ref:
            cells[ref] = gradient
    engine.touched.clear()
    return after
