"""Cells (ref -> value) and the op stream. Runs on: the worker's main thread.

A failing op marks its outputs and is reported; ops that read a mark set theirs and are not reported. An interrupt
drops the rest of the batch and every later batch that was already sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from monarch_lab.errors import DeviceException, ProtocolError
from monarch_lab.tensors import ambient
from monarch_lab.tensors.meta import describe, dtype_named
from monarch_lab.wire import engine as wire
from monarch_lab.wire.engine import FIRST_ENTRY, Failure, Op
from monarch_lab.worker import backward, bundles, calls, children, meeting, recording, user_code
from monarch_lab.worker.callbacks import Callbacks
from monarch_lab.worker.definitions import Definitions
from monarch_lab.worker.failures import DependentOnError, Failed, PredictionError
from monarch_lab.worker.failures import describe as describe_error
from monarch_lab.worker.moves import Moves
from monarch_lab.worker.randomness import Randomness

Frames = Sequence[bytes | memoryview]
INTERRUPTED = Failure("KeyboardInterrupt", "interrupted, so it has no value", [], interrupted=True)


class OpStream:
    """``report(message, frames)`` sends to the kernel."""

    callbacks: Callbacks

    ran_user_code = False  # any stream of the process, since the worker's loop asked last

    def __init__(self, rank: int, report: Callable[..., None], randomness: Randomness) -> None:
        self.rank = rank
        self.randomness = randomness
        self.cells: dict[int, Any] = {}
        self.known = Definitions(self._make_entry, lambda d: recording.make_recording(d, self), self._drop_entry)
        self.cell = 0
        self.interruptible = False  # the SIGINT handler raises only while this is set
        self.in_user_code = False  # and, unless the interrupt is hard, this
        self.dropped_batch = -1  # set by the reader thread: batches and calls up to these are dropped
        self.dropped_ident = -1
        self.ended_batch = -1  # of batches and calls up to these, the users' functions are dropped
        self.ended_ident = -1
        self.batch = -1
        self._report = self.report = report
        self.on_account: Callable[[wire.Done], None] = report  # another with several streams
        self.events: dict[int, meeting.Event] = {}  # where streams meet
        self._applied = ambient.Applied()
        self._ambient = 0
        self._poisoned: set[int] = set()
        self._unwritten: set[tuple[int, int]] = set()
        self.scope = 0
        self.touched: list[int] = []  # leaves whose gradient was accumulated, by their hooks
        self.retained: dict[int, Any] = {}
        self.had: list[dict[int, Any]] = []  # the gradients the kernel knows, of each backward pass that runs
        self._table: list[calls.OpFunction] = [self._unknown] * FIRST_ENTRY
        self._table[Op.DELETE] = self._delete
        self._table[Op.AMBIENT] = self._set_ambient
        self._table[Op.SET_GRAD] = self._set_grad
        self._table[Op.BACKWARD] = self._backward
        self._table[Op.REPLAY] = self._replay
        self.moves = Moves(self)
        self._table[Op.MOVE] = self.moves.move
        self._table[Op.MOVE_BACK] = self.moves.move_back
        self._table[Op.SIGNAL] = self._signal
        self._table[Op.WAIT] = self._wait
        self._table[Op.LEND] = self._lend
        self._table[Op.RETURN] = self._return
        # Instructions are no ops: a failure's position counts ops alone.
        self._width = {Op.DELETE: 2, Op.AMBIENT: 2, Op.SET_GRAD: 3, Op.MOVE: 5, Op.MOVE_BACK: 3, **meeting.WIDTHS}

    # --- definitions

    def define(self, order: wire.Define, frames: Frames) -> None:
        self.known.add(order, frames)

    def _make_entry(self, definition: wire.EntryDef, template: calls.Template) -> calls.Entry:
        entry = calls.make_entry(definition, template, self)
        while len(self._table) <= definition.entry:
            self._table.append(self._unknown)
        self._table[definition.entry] = entry.run if entry.bundle is None else self._bundled
        return entry

    def _drop_entry(self, number: int) -> None:
        self._table[number] = self._unknown

    def forget_ambient(self) -> None:
        """Another stream may have set what torch keeps for the process: the next batch sets it again."""
        self._ambient = 0

    def restore_ambient(self) -> None:
        """After a user's function, which may have changed what is not its own."""
        if self._ambient:
            self._applied.restore(self.known.ambients[self._ambient])

    def arm(self, leaf: torch.Tensor, ref: int) -> None:
        """Let a leaf say when a backward pass has accumulated into it."""
        if getattr(leaf, "_monarch_ref", None) != ref:
            leaf._monarch_ref = ref
            touched = self.touched
            leaf.register_post_accumulate_grad_hook(lambda _: touched.append(ref))

    # --- batches

    def run_batch(self, batch: wire.Batch) -> None:
        self.cell = batch.cell
        self.batch = batch.number
        self._begin_scope(batch.scope)
        if batch.number <= self.dropped_batch:
            self._drop(batch.code, 0)
        else:
            self.run_code(batch, 0)
        if batch.report:
            self.on_account(self.account(batch.number))

    def run_code(self, batch: wire.Batch, i: int, within: int = -1, error: BaseException | None = None) -> None:
        """Run a batch's ops from ``i`` on; ``error``: the one there has raised it. ``within``: they are those of a
        recording, run by the batch's op of this position."""
        code, numbers, cells, table = batch.code, batch.numbers, self.cells, self._table
        end = len(code)
        if error is not None:
            i = self._failed(batch, i, error, within)
            if isinstance(error, KeyboardInterrupt) and batch.number <= self.dropped_batch:
                self._drop(code, i)
                i = end
        while i < end:
            try:
                self.interruptible = True
                while i < end:
                    i = table[code[i]](cells, code, i, numbers)
                self.interruptible = False
            except KeyboardInterrupt as e:
                self.interruptible = False
                i = self._failed(batch, i, e, within)
                if batch.number <= self.dropped_batch:
                    self._drop(code, i)
                    i = end
            except BaseException as e:
                self.interruptible = False
                i = self._failed(batch, i, e, within)

    def account(self, number: int) -> wire.Done:
        """What failed since the last account."""
        done = wire.Done(number, self._poisoned_by_cause(), sorted(self._unwritten))
        self._poisoned.clear()
        self._unwritten.clear()
        return done

    def _poisoned_by_cause(self) -> list[tuple[Failure, list[int]]]:
        causes: dict[int, tuple[Failure, list[int]]] = {}
        for ref in sorted(self._poisoned):
            value = self.cells.get(ref)
            if type(value) is Failed:
                causes.setdefault(id(value.failure), (value.failure, []))[1].append(ref)
        return list(causes.values())

    def _begin_scope(self, scope: int) -> None:
        self.scope = scope
        self.randomness.use(scope)

    def width_at(self, code: list[int], i: int) -> int:
        number = code[i]
        if number >= FIRST_ENTRY:
            return self.known.entries[number].width
        if number == Op.BACKWARD:
            return backward.width(self.known.plans[code[i + 1]])
        if number == Op.REPLAY:
            return self.known.recordings[code[i + 1]].width
        return self._width[Op(number)]

    def position(self, code: list[int], i: int) -> int:
        position = j = 0
        while j < i:
            position += code[j] >= FIRST_ENTRY or code[j] not in (Op.DELETE, Op.AMBIENT)
            j += self.width_at(code, j)
        return position

    def _outputs_at(self, code: list[int], i: int) -> list[int]:
        number = code[i]
        if number >= FIRST_ENTRY:
            return self.known.entries[number].output_refs(code, i)
        if number == Op.BACKWARD:
            plan = self.known.plans[code[i + 1]]
            return [r for r in backward.gradient_refs(plan, code, i) if r] + backward.crossing_refs(plan, code, i)
        if number == Op.REPLAY:
            return self.known.recordings[code[i + 1]].output_refs(code, i)
        return self.moves.outputs_at(code, i)

    def _failed(self, batch: wire.Batch, i: int, error: BaseException, within: int = -1) -> int:
        """Marks the outputs of the op at ``i``; returns the next op's place."""
        code = batch.code
        after = i + self.width_at(code, i)
        outputs = self._outputs_at(code, i)
        dependent = error if isinstance(error, DependentOnError) else self._marked_input(code, i)
        if dependent is not None:
            failure = dependent.failure
            self._take_part(code, i)
        else:
            if isinstance(error, DeviceException):  # an input went with the process before this one
                self._take_part(code, i)
            failure = describe_error(error)
            position = self.position(code, i)
            place = (position, -1) if within < 0 else (within, position)
            self._report(wire.OpFailed(batch.number, place[0], failure, outputs, place[1]))
        self.mark(outputs, failure)
        self._note_unwritten(code, i)
        return after

    def _note_unwritten(self, code: list[int], i: int) -> None:
        """An in-place op that did not run leaves its target as it was; ranks where it did run hold another value."""
        if code[i] >= FIRST_ENTRY:
            entry = self.known.entries[code[i]]
            refs = entry.input_refs(code, i)
            self._unwritten.update((refs[k], self.scope) for k in entry.definition.writes)
        elif code[i] == Op.SET_GRAD:
            self._unwritten.add((code[i + 1], self.scope))
        elif code[i] == Op.BACKWARD:
            added_to = backward.gradient_refs(self.known.plans[code[i + 1]], code, i, added_to=True)
            self._unwritten.update((ref, self.scope) for ref in added_to if ref)
        elif code[i] == Op.REPLAY:
            written = self.known.recordings[code[i + 1]].written_refs(code, i)
            self._unwritten.update((ref, self.scope) for ref in written)

    def forget(self, ref: int) -> None:
        """A value that no order knows of."""
        self.cells.pop(ref, None)
        self._poisoned.discard(ref)
        self._unwritten.discard((ref, self.scope))

    def _marked_input(self, code: list[int], i: int) -> DependentOnError | None:
        if code[i] < FIRST_ENTRY:
            return None
        for ref in self.known.entries[code[i]].input_refs(code, i):
            value = self.cells.get(ref)
            if type(value) is Failed:
                return DependentOnError(value.failure)
        return None

    def _take_part(self, code: list[int], i: int) -> None:
        if code[i] >= FIRST_ENTRY and self.known.entries[code[i]].template.definition.collective:
            entry = self.known.entries[code[i]]
            zeros = [zeros_of(meta) for meta in entry.definition.inputs]
            with torch.no_grad():
                entry.template.invoke(zeros, [0.0] * entry.template.definition.numbers)

    def mark(self, refs: Sequence[int], failure: Failure) -> None:
        for ref in refs:
            self.cells[ref] = Failed(failure)
        self._poisoned.update(refs)

    def _drop(self, code: list[int], i: int) -> None:
        """Skip ops that were sent and shall not run; what they delete and the state they set still counts."""
        end = len(code)
        while i < end:
            number = code[i]
            if number in (Op.DELETE, Op.AMBIENT, *meeting.WIDTHS):
                i = self._table[number](self.cells, code, i, [])
                continue
            self.moves.take_part(code, i, INTERRUPTED)
            self.mark(self._outputs_at(code, i), INTERRUPTED)
            self._note_unwritten(code, i)
            i += self.width_at(code, i)

    def _bundled(self, cells: dict[int, Any], code: list[int], i: int, numbers: list[Any]) -> int:
        """An op that may be done together with those after it."""
        first = self.known.entries[code[i]]
        metas, refs, after = [], [], i
        while after < len(code):
            entry = self.known.entries.get(code[after])
            if entry is None or entry.bundle != first.bundle:
                break
            metas.append(entry.definition.inputs[0])
            refs += entry.input_refs(code, after)
            after += entry.width
        assert first.bundle is not None
        count = bundles.split(refs, metas, first.bundle)[0]
        if count == 1:
            return first.run(cells, code, i, numbers)
        values = [cells.get(ref) for ref in refs[:count]]
        bundles.reduce(first.bundle, values, metas[:count])
        self.unwritten(ref for ref, value in zip(refs, values, strict=False) if not isinstance(value, torch.Tensor))
        return i + count * first.width

    def unwritten(self, refs: Iterable[int]) -> None:
        """They keep the values they had, and other ranks have new ones."""
        self._unwritten.update((ref, self.scope) for ref in refs)

    # --- instructions

    def _unknown(self, cells: dict[int, Any], code: list[int], i: int, numbers: list[Any]) -> int:
        raise ProtocolError(f"entry {code[i]} was never defined")

    def _delete(self, cells: dict[int, Any], code: list[int], i: int, numbers: list[Any]) -> int:
        if cells.pop(code[i + 1], None) is None:
            self.known.recordings.pop(code[i + 1], None)
        return i + 2

    def _set_ambient(self, cells: dict[int, Any], code: list[int], i: int, numbers: list[Any]) -> int:
        self.set_ambient(code[i + 1])
        return i + 2

    def set_ambient(self, number: int) -> None:
        if number != self._ambient:
            self._applied.apply(self.known.ambients[number])
            self._ambient = number

    def _set_grad(self, cells: dict[int, Any], code: list[int], i: int, numbers: list[Any]) -> int:
        target, gradient = cells[code[i + 1]], cells[code[i + 2]] if code[i + 2] else None
        calls.refuse_failed(target, gradient)
        self.set_grad(target, gradient, code[i + 1])
        return i + 3

    def set_grad(self, target: Any, gradient: Any, ref: int) -> None:
        target.grad = gradient
        for had in self.had:
            had[ref] = gradient

    def _backward(self, cells: dict[int, Any], code: list[int], i: int, numbers: list[Any]) -> int:
        return backward.replay(self, self.known.plans[code[i + 1]], code, i)

    def _replay(self, cells: dict[int, Any], code: list[int], i: int, numbers: list[Any]) -> int:
        replayed = self.known.recordings[code[i + 1]]
        try:
            return replayed.run(cells, code, i, numbers)
        except BaseException as e:
            self.interruptible = False
            recording.finish(self, replayed, code, i, numbers, e, self.position(code, i))
            self.interruptible = True
        return i + replayed.width

    def _signal(self, cells: dict[int, Any], code: list[int], i: int, numbers: list[Any]) -> int:
        meeting.signal(self.events, code[i + 1])
        return i + 2

    def _wait(self, cells: dict[int, Any], code: list[int], i: int, numbers: list[Any]) -> int:
        meeting.wait(self.events, code[i + 1])
        return i + 2

    def _lend(self, cells: dict[int, Any], code: list[int], i: int, numbers: list[Any]) -> int:
        value = cells[code[i + 1]]
        cells[code[i + 2]] = value if type(value) is Failed else value.detach()
        return i + 3

    def _return(self, cells: dict[int, Any], code: list[int], i: int, numbers: list[Any]) -> int:
        value = cells.get(code[i + 1])
        if type(value) is Failed and code[i + 2] in cells:
            self.mark([code[i + 2]], value.failure)
        return i + 3

    @contextmanager
    def user_code(self, ident: int = 0) -> Iterator[None]:
        """Around a user's function: it can be interrupted, draws from a stream of its own, leaves nothing behind."""
        if ident <= self.ended_ident if ident else self.batch <= self.ended_batch:
            raise KeyboardInterrupt("interrupted before it ran")
        try:
            with children.of_users_code(), self.randomness.private():
                self.in_user_code = True
                user_code.begins()
                yield
        finally:
            user_code.ends()
            self.in_user_code = False
            OpStream.ran_user_code = True
            self.restore_ambient()

    def check_gradient(self, gradient: torch.Tensor, told: wire.TensorMeta) -> None:
        got = describe(gradient)
        if (got.shape, got.dtype, got.layout) != (told.shape, told.dtype, told.layout):
            raise PredictionError(f"a gradient of {got.shape} {got.dtype} came where {told.shape} {told.dtype} did", 0)


def zeros_of(meta: wire.TensorMeta) -> torch.Tensor:
    return torch.zeros(meta.shape, dtype=dtype_named(meta.dtype), device=meta.device)
