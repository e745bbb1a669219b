"""Everything a worker obeys: the op stream of op_stream.py, and the calls that answer. Runs on: the worker's main
thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
import torch
from torch.utils._python_dispatch import _disable_current_modes

from monarch_lab.errors import DeviceException
from monarch_lab.tensors import ambient, payload
from monarch_lab.tensors.meta import describe, is_leaf
from monarch_lab.transport.segments import SegmentPool
from monarch_lab.wire import engine as wire
from monarch_lab.worker import backward, calls, learning, mapped
from monarch_lab.worker.callbacks import Callbacks
from monarch_lab.worker.failures import Cells, DependentOnError
from monarch_lab.worker.failures import describe as describe_error
from monarch_lab.worker.op_stream import Frames, OpStream, zeros_of
from monarch_lab.worker.randomness import ONE_PROCESS, Randomness


class Engine(OpStream):
    """``report(message, frames)`` sends to the kernel."""

    def __init__(self, rank: int, report: Callable[..., None], randomness: Randomness) -> None:
        super().__init__(rank, report, randomness)
        self.callbacks = Callbacks(self, report)
        self._segments = SegmentPool()

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
            template.invoke([zeros_of(m) for m in order.inputs_meta], order.numbers)

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
            given = payload.loads(mapped.open_placed(order, frames))
            if order.device:
                given = [t.detach().to(order.device).requires_grad_(t.requires_grad) for t in given]
        except Exception as e:  # memory, above all
            failure = describe_error(e)
            self._report(wire.OpFailed(order.batch, 0, failure, order.refs))
            return self.mark(order.refs, failure)
        for ref, tensor in zip(order.refs, given, strict=True):
            self.cells[ref] = tensor
            if tensor.requires_grad and is_leaf(tensor):
                self.arm(tensor, ref)

    def fetch(self, order: wire.Fetch) -> None:
        try:
            values = [self.cells[ref] for ref in order.refs]
            calls.refuse_failed(*values)
            frames, _ = payload.dumps([_portable(v) for v in values], copy=not order.shared)
        except BaseException as e:
            self._fetch_failed(order.ident, e)
            return
        segments: list[tuple[int, int, int]] = []
        self._segments.free(order.free.get(self.rank, ()), order.drop.get(self.rank, ()))
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
