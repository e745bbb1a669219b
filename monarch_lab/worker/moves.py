"""Values between the processes of two meshes, and their gradients back.

A move has groups: one rank that has the value and many that get it (``spread``), or many that have one and one that
gets all of them (``stack``) or their sum (``sum``). A gradient goes the other way: of spread it is summed, of sum
spread, of stack cut up. A rank whose value failed takes part with a mark, so that nobody waits for ever, and who gets
the mark marks its own value.

Autograd ends at each side: the value that arrives comes out of a node that keeps the gradient it is given, and a
stand-in for the value that left has a node that goes on with the gradient that was brought back. The controller runs
the backward passes of the meshes one after the other (controller/crossings.py).

Runs on: the worker's main thread.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from monarch_lab.errors import InternalError
from monarch_lab.tensors.meta import describe
from monarch_lab.wire import engine as wire
from monarch_lab.wire.engine import Failure, Op
from monarch_lab.worker import exchange
from monarch_lab.worker.failures import Failed, PredictionError
from monarch_lab.worker.failures import describe as describe_error

if TYPE_CHECKING:
    from monarch_lab.worker.op_stream import OpStream

_NOTHING = Failure("InternalError", "a gradient was asked for that no backward pass reached", [])
_BACK = {"spread": "sum", "sum": "spread", "stack": "unstack"}


class _Arrival(torch.autograd.Function):
    """The value that arrives; its gradient stays here until it is sent back."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, moves: Moves, crossing: int, box: list[torch.Tensor]) -> torch.Tensor:
        ctx.moves, ctx.crossing = moves, crossing
        return box[0]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[None, None, None, None]:
        ctx.moves.reach(ctx.crossing, gradients[0])
        return None, None, None, None


class _Departure(torch.autograd.Function):
    """The stand-in for the value that left."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, box: list[torch.Tensor | None]) -> torch.Tensor:
        ctx.box = box
        ctx.like = (value.shape, value.dtype, value.device)
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        if not ctx.box:
            raise InternalError("a backward pass went on where no gradient was brought back")
        gradient = ctx.box.pop()
        shape, dtype, device = ctx.like
        if gradient is None:  # this process's value went nowhere
            return torch.zeros(shape, dtype=dtype, device=device), None
        return gradient.to(device), None


class Moves:
    def __init__(self, engine: OpStream) -> None:
        self._engine = engine
        self._reaching: dict[int, torch.Tensor] | None = None  # of the backward pass that runs
        self._arrived: dict[int, torch.Tensor] = {}  # crossing -> gradient of its value, until it is sent back

    # --- the instructions

    def move(self, cells: dict[int, Any], code: list[int], i: int, numbers: list[Any]) -> int:
        plan = self._engine.known.moves[code[i + 1]]
        ref, out, crossing = code[i + 2 : i + 5]
        value: Any = None
        error: BaseException | None = None
        if self._gives(plan):
            value, error = self._read(cells, ref, plan.given)
        if crossing and self._engine.rank in plan.home:
            self._depart(cells, ref if error is None else 0, crossing)
        with self._uninterrupted():
            got = self._exchange(plan, plan.kind, value, plan.given, plan.meta)
        if error is not None:
            raise error
        if isinstance(value, Failure):
            self._engine.mark([r for r in (out, crossing) if r], value)
        if isinstance(got, Failure):
            self._engine.mark([out], got)
        elif got is not None:
            cells[out] = self._arrive(got, crossing)
        return i + 5

    def move_back(self, cells: dict[int, Any], code: list[int], i: int, numbers: list[Any]) -> int:
        crossing = code[i + 2]
        if not code[i + 1]:  # the pass was given up
            self._arrived.pop(crossing, None)
            return i + 3
        plan = self._engine.known.moves[code[i + 1]]
        value: Any = None
        if self._gets(plan):
            value = self._arrived.pop(crossing, None)
            if value is None:
                mark = cells.get(crossing)
                value = mark.failure if type(mark) is Failed else _NOTHING
        with self._uninterrupted():
            got = self._exchange(plan, _BACK[plan.kind], value, plan.meta, plan.given)
        if isinstance(got, Failure):
            self._engine.mark([crossing], got)
        elif self._engine.rank in plan.home and type(cells[crossing]) is not Failed:
            cells[crossing]._monarch_box[:] = [got]
        return i + 3

    def outputs_at(self, code: list[int], i: int) -> list[int]:
        if code[i] == Op.MOVE:
            return [ref for ref in code[i + 3 : i + 5] if ref]
        return [code[i + 2]] if code[i] == Op.MOVE_BACK and code[i + 1] else []

    def take_part(self, code: list[int], i: int, failure: Failure) -> None:
        """In place of a move that shall not run: the others get a mark and do not wait."""
        if code[i] not in (Op.MOVE, Op.MOVE_BACK) or not code[i + 1]:
            return
        plan = self._engine.known.moves[code[i + 1]]
        there = code[i] == Op.MOVE
        kind, given, meta = (plan.kind, plan.given, plan.meta) if there else (_BACK[plan.kind], plan.meta, plan.given)
        has = self._gives(plan) if there else self._gets(plan)
        self._exchange(plan, kind, failure if has else None, given, meta)

    # --- backward passes

    @contextmanager
    def reached(self) -> Iterator[dict[int, torch.Tensor]]:
        """Around a backward pass: the crossings that it reached, with their gradients. They count once it succeeds."""
        found: dict[int, torch.Tensor] = {}
        outer, self._reaching = self._reaching, found
        try:
            yield found
        finally:
            self._reaching = outer
        for crossing, gradient in found.items():
            before = self._arrived.get(crossing)
            self._arrived[crossing] = gradient if before is None else before + gradient

    @contextmanager
    def apart(self) -> Iterator[None]:
        """In the middle of a backward pass, around what is no part of it."""
        outer, self._reaching = self._reaching, None
        try:
            yield
        finally:
            self._reaching = outer

    def reach(self, crossing: int, gradient: torch.Tensor) -> None:
        if self._reaching is None:
            raise RuntimeError(
                "a backward pass inside a function reached a value that came from another mesh: "
                "call backward() in the cell, which goes on there"
            )
        self._reaching[crossing] = gradient.detach()

    def forget(self, crossings: Sequence[int]) -> None:
        for crossing in crossings:
            self._arrived.pop(crossing, None)

    # --- parts

    def _gives(self, plan: wire.MoveDef) -> bool:
        one = plan.kind == "spread"
        return any(self._engine.rank in (g[:1] if one else g[1:]) for g in plan.groups)

    def _gets(self, plan: wire.MoveDef) -> bool:
        one = plan.kind != "spread"
        return any(self._engine.rank in (g[:1] if one else g[1:]) for g in plan.groups)

    def _read(self, cells: dict[int, Any], ref: int, told: wire.TensorMeta) -> tuple[Any, BaseException | None]:
        """(the value or the failure it carries, the error to raise once the others have been told)"""
        try:
            value = cells[ref]
            if type(value) is Failed:
                return value.failure, None
            got = describe(value)
            if (got.shape, got.dtype, got.layout) != (told.shape, told.dtype, told.layout):
                raise PredictionError(f"a value of {got.shape} {got.dtype} was moved as {told.shape} {told.dtype}", 0)
        except Exception as e:
            return describe_error(e), e
        return value, None

    def _depart(self, cells: dict[int, Any], ref: int, crossing: int) -> None:
        value = cells.get(ref)
        if type(value) is Failed:
            self._engine.mark([crossing], value.failure)
        elif value is not None:
            box: list[torch.Tensor | None] = []
            cells[crossing] = _Departure.apply(value, box)
            cells[crossing]._monarch_box = box

    def _arrive(self, value: torch.Tensor, crossing: int) -> torch.Tensor:
        if not crossing:
            return value
        return _Arrival.apply(torch.empty(0, requires_grad=True), self, crossing, [value])

    @contextmanager
    def _uninterrupted(self) -> Iterator[None]:
        """A rank that left in the middle would leave the others of its group waiting."""
        engine = self._engine
        before, engine.interruptible = engine.interruptible, False
        try:
            yield
        finally:
            engine.interruptible = before

    def _exchange(
        self, plan: wire.MoveDef, kind: str, value: Any, given: wire.TensorMeta, meta: wire.TensorMeta
    ) -> torch.Tensor | Failure | None:
        """What this rank gets: a value, a failure, or None where it gets nothing."""
        rank, got = self._engine.rank, None
        with torch.no_grad():
            for group in plan.groups:
                if rank in group:
                    has = rank in (group[:1] if kind in ("spread", "unstack") else group[1:])
                    mine = exchange.KINDS[kind](group, rank, value if has else None, given, meta)
                    got = mine if mine is not None else got
        return got
