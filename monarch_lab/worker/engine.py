"""Cells (ref -> value) and the op stream. Runs on: the worker's main thread.

A failing op marks its outputs and is reported; ops that read a mark set theirs and are not reported. An interrupt
drops the rest of the batch and every later batch that was already sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
import torch
from torch.utils._python_dispatch import _disable_current_modes

from monarch_lab.errors import DeviceException, ProtocolError
from monarch_lab.tensors import ambient, payload
from monarch_lab.tensors.meta import describe, is_leaf
from monarch_lab.transport.segments import SegmentPool, SegmentReader
from monarch_lab.wire import engine as wire
from monarch_lab.wire.engine import FIRST_ENTRY, Failure, Op
from monarch_lab.worker import backward, calls, learning, meeting, recording, user_code
from monarch_lab.worker.callbacks import Callbacks
from monarch_lab.worker.definitions import Definitions
from monarch_lab.worker.failures import Cells, DependentOnError, Failed, PredictionError
from monarch_lab.worker.failures import describe as describe_error
from monarch_lab.worker.moves import Moves
from monarch_lab.worker.randomness import ONE_PROCESS, Randomness

Frames = Sequence[bytes | memoryview]
INTERRUPTED = Failure("KeyboardInterrupt", "interrupted, so it has no value", [], interrupted=True)


class Engine:
    """``report(message, frames)`` sends to the kernel."""

    def __init__(self, rank: int, report: Callable[..., None], randomness: Randomness) -> None:
        self.rank = rank
        self.randomness = randomness
        self.cells: dict[int, Any] = {}
        self.known = Definitions(self._make_entry, lambda d: recording.make_recording(d, self))
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
        self._segments = SegmentPool()
        self.had: list[dict[int, Any]] = []  # the gradients the kernel knows, of each backward pass that runs
        self.callbacks = Callbacks(self, report)
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
        self._table[definition.entry] = entry.run
        return entry

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

    def _position(self, code: list[int], i: int) -> int:
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
            position = self._position(code, i)
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
            zeros = [_zeros(meta) for meta in entry.definition.inputs]
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
            recording.finish(self, replayed, code, i, numbers, e, self._position(code, i))
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

    def rejoin(self, lost: str) -> None:
        """This process is not the first of its rank: what was made before it came is not here."""
        self.cells = Cells(lost, self.rank)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Obey other orders in the middle of one: they run as themselves, not as part of what is being watched, and
        what they set is put back."""
        thread, random = ambient.capture(), self.randomness.scope
        kept = self.cell, self.batch, self.scope, self._ambient, self.interruptible, self.in_user_code
        self.interruptible = self.in_user_code = False
        self._ambient = 0
        try:
            with _disable_current_modes(), self.moves.apart():
                yield
        finally:
            self._applied.apply(thread)
            self.randomness.use(random)
            self.cell, self.batch, self.scope, self._ambient, self.interruptible, self.in_user_code = kept

    # --- calls that answer

    def learn(self, order: wire.Learn) -> None:
        template = self.known.templates[order.template]
        try:
            inputs = self._begin(order.ident, order.cell, order.scope, order.ambient, order.inputs)
        except (DependentOnError, DeviceException) as e:
            if template.definition.collective:
                self._learn_with_zeros(order, template)
            failure = e.failure if isinstance(e, DependentOnError) else describe_error(e)
            self._report(wire.LearnFailed(order.ident, failure, isinstance(e, DependentOnError)))
            return
        except KeyboardInterrupt as e:
            self._report(wire.LearnFailed(order.ident, describe_error(e)))
            return
        try:
            self.touched.clear()
            versions = [learning.version(t) for t in inputs]
            invoke = self._guarded(template.invoke, order.ident) if template.opaque else template.invoke
            self.interruptible = True
            with self.callbacks.question(order.ident) as question:
                answer, tensors, values = learning.learn(
                    order.ident, invoke, inputs, order.numbers, has_out="out" in template.tree.kwargs
                )
            self.interruptible = False
            if question.serial:
                answer = msgspec.structs.replace(answer, dynamic=True)
            frames = [payload.pack(v, tensors=False)[0] for v in values]
            answer = self._with_gradients(answer, order.first_out)
        except BaseException as e:
            self.interruptible = False
            written = [k for k, t in enumerate(inputs) if learning.version(t) != versions[k]]
            self._report(wire.LearnFailed(order.ident, describe_error(e), written=written))
            return
        for k, (tensor, keep) in enumerate(zip(tensors, answer.keeps, strict=True)):
            if keep == -1:
                self.cells[order.first_out - k] = tensor
                if tensor.requires_grad and is_leaf(tensor):
                    self.arm(tensor, order.first_out - k)
        for k, meta in answer.after:
            if meta.requires_grad and meta.is_leaf:
                self.arm(inputs[k], order.inputs[k])
        self._report(answer, frames)

    @contextmanager
    def user_code(self, ident: int = 0) -> Iterator[None]:
        """Around a user's function: it can be interrupted, draws from a stream of its own, leaves nothing behind."""
        if ident <= self.ended_ident if ident else self.batch <= self.ended_batch:
            raise KeyboardInterrupt("interrupted before it ran")
        try:
            with self.randomness.private():
                self.in_user_code = True
                user_code.begins()
                yield
        finally:
            user_code.ends()
            self.in_user_code = False
            self.restore_ambient()

    def _guarded(self, invoke: Callable[..., Any], ident: int) -> Callable[..., Any]:
        def run(inputs: list[Any], numbers: list[Any]) -> Any:
            with self.user_code(ident):
                return invoke(inputs, numbers)

        return run

    def _with_gradients(self, answer: wire.Learned, first_out: int) -> wire.Learned:
        """A call that ran a backward pass inside: the leaves' gradients are results too, and it may do so again."""
        if not self.touched:
            return answer
        grads = []
        for k, ref in enumerate(sorted(r for r in set(self.touched) if r in self.cells)):
            gradient = self.cells[ref].grad
            self.cells[first_out - len(answer.outputs) - k] = gradient
            grads.append((ref, describe(gradient)))
        self.touched.clear()
        return msgspec.structs.replace(answer, grads=grads, dynamic=True)

    def _learn_with_zeros(self, order: wire.Learn, template: calls.Template) -> None:
        with torch.no_grad():
            template.invoke([_zeros(m) for m in order.inputs_meta], order.numbers)

    def _begin(self, ident: int, cell: int, scope: int, ambient_number: int, refs: Sequence[int]) -> list[Any]:
        self.cell = cell
        self._begin_scope(scope)
        if ident <= self.dropped_ident:
            raise KeyboardInterrupt("interrupted, so it has no value")
        self.set_ambient(ambient_number)
        inputs = [self.cells[ref] for ref in refs]
        calls.refuse_failed(*inputs)
        return inputs

    def learn_backward(self, order: wire.LearnBackward) -> None:
        try:
            roots = self._begin(order.ident, order.cell, order.scope, order.ambient, order.roots)
            self.interruptible = True
            with self.callbacks.question(order.ident):
                answer, error = backward.learn(self, order, roots)
            self.interruptible = False
        except BaseException as e:
            answer, error = None, e
        self.interruptible = False
        if error is None:
            self._report(answer)
            return
        dependent = isinstance(error, DependentOnError)
        failure = error.failure if isinstance(error, DependentOnError) else describe_error(error)
        self._report(wire.LearnFailed(order.ident, failure, dependent=dependent, partial=answer))

    def place(self, order: wire.Place, frames: Frames) -> None:
        try:
            given = SegmentReader().open(order.pid, frames, order.segments)
        except (OSError, ValueError) as e:
            return self.mark(order.refs, describe_error(e))
        for ref, tensor in zip(order.refs, payload.loads(given), strict=True):
            if order.device:
                tensor = tensor.detach().to(order.device).requires_grad_(tensor.requires_grad)
            self.cells[ref] = tensor
            if tensor.requires_grad and is_leaf(tensor):
                self.arm(tensor, ref)

    def fetch(self, order: wire.Fetch) -> None:
        try:
            values = [self.cells[ref] for ref in order.refs]
            calls.refuse_failed(*values)
            frames, _ = payload.dumps([_portable(v) for v in values])
        except BaseException as e:
            self._fetch_failed(order.ident, e)
            return
        segments: list[tuple[int, int, int]] = []
        self._segments.free(order.free, order.drop)
        if order.shared:
            frames, segments = self._segments.put(frames)
        self._report(wire.Fetched(order.ident, segments), frames)

    def call_and_fetch(self, order: wire.CallAndFetch) -> None:
        template = self.known.templates[order.template]
        try:
            inputs = self._begin(order.ident, order.cell, ONE_PROCESS, order.ambient, order.inputs)
            self.interruptible = True
            result = self._guarded(template.invoke, order.ident)(inputs, order.numbers)
            self.interruptible = False
            frames, _ = payload.dumps(torch.utils._pytree.tree_map(_portable, result))
        except BaseException as e:
            self.interruptible = False
            self._fetch_failed(order.ident, e)
            return
        self._report(wire.Fetched(order.ident), frames)

    def _fetch_failed(self, ident: int, error: BaseException) -> None:
        dependent = isinstance(error, DependentOnError)
        failure = error.failure if isinstance(error, DependentOnError) else describe_error(error)
        self._report(wire.FetchFailed(ident, failure, dependent=dependent))

    def retain(self, ref: int) -> None:
        tensor = self.cells.get(ref)
        if isinstance(tensor, torch.Tensor) and not is_leaf(tensor):
            tensor.retain_grad()
            self.retained[ref] = tensor

    def check_gradient(self, gradient: torch.Tensor, told: wire.TensorMeta) -> None:
        got = describe(gradient)
        if (got.shape, got.dtype, got.layout) != (told.shape, told.dtype, told.layout):
            raise PredictionError(f"a gradient of {got.shape} {got.dtype} came where {told.shape} {told.dtype} did", 0)


def _zeros(meta: wire.TensorMeta) -> torch.Tensor:
    from monarch_lab.tensors.meta import dtype_named

    return torch.zeros(meta.shape, dtype=dtype_named(meta.dtype), device=meta.device)


def _portable(value: Any) -> Any:
    """A tensor on the CPU, without its graph and, where it is a part of a larger storage, without the rest."""
    if not isinstance(value, torch.Tensor):
        return value
    value = value.detach()
    if value.is_conj():
        value = value.resolve_conj()
    if value.is_neg():
        value = value.resolve_neg()
    return value.cpu()
