"""What is noted while a function that ``ml.compile`` was given runs: its ops, as the stream has them.

The function runs as it always does; what goes into the stream is noted where batches leave, and calls that wait for
their first result are noted when they are learned. What a replay could not do again is refused at its own line.

Runs on: the thread that records, which holds the client's lock all the while.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_map

from monarch_lab.controller import dispatch, lending, locations, record_steps, scanning, state
from monarch_lab.controller.client import clients
from monarch_lab.controller.tape import Tape, Traced, value_of
from monarch_lab.errors import UsageError, UsageNotImplementedError, UsageRuntimeError, UsageTypeError
from monarch_lab.wire import engine as wire
from monarch_lab.wire.engine import FIRST_ENTRY, Op


@dataclass(slots=True)
class Noted:
    """One op, with the real refs of that run. Zeros stand for no value."""

    number: int  # an entry, or an Op
    plan: int
    inputs: list[int]
    numbers: list[Any]  # Traced where a replay computes it anew
    outputs: list[int]
    ambient: int
    mesh: Any
    where: locations.Location


@dataclass(slots=True)
class Placed:
    """A literal: the orders that put it on the workers."""

    orders: list[tuple[str, tuple[int, ...] | None, list[Any]]]

    def content(self) -> tuple[Any, ...]:
        return tuple((device, ranks, tuple(bytes(f) for f in frames)) for device, ranks, frames in self.orders)


@dataclass(frozen=True, slots=True)
class Before:
    """A value that was there when the function began, and what was known of it."""

    handle: weakref.ref[Any]
    meta: Any
    equal: int
    sig: int
    store: Any
    mesh: Any


def line_of(location: locations.Location | None) -> str:
    frame = locations.frame_of(location)
    return f'"{frame.source}" (line {frame.line} of {frame.function})' if frame is not None else "a line of it"


class Recorder:
    def __init__(self, client: Any, function: str, on_stop: Callable[[str], None]) -> None:
        self.client = client
        self.function = function
        self._on_stop = on_stop
        self.ops: list[Noted] = []
        self.tape = Tape()
        self.placed: dict[int, Placed] = {}
        self.leaves: dict[int, Any] = {}  # by ref: leaves whose .grad matters
        self.lasting = False  # this run made what later ones will find: it stands for none of them
        self.constants: list[Any] = []  # made inside
        self.optimizers: list[Any] = []
        self._stopped: list[tuple[Any, list[dict[str, Any]]]] = []
        self.before: dict[int, Before] = {}
        self.formals: dict[int, int] = {}  # ref -> place among the tensors that the function is given
        self.slots: list[Any] = []  # those tensors, for the tape; a replay puts its own here
        self.grads: dict[int, Any] = {}  # ref of a gradient that was there -> its leaf
        self.had: set[int] = set()  # refs of those leaves
        self.loans: list[Any] = []  # begun inside
        self.events: dict[int, int] = {}
        self.stop: str | None = None  # where a function on the workers has a breakpoint: what has one is not replayed

    def begin(self, tensors: list[Any]) -> None:
        """The values that are there now: what else an op reads was made inside. ``tensors``: those that are given."""
        client = self.client
        client.flush()
        for other in list(clients):
            if other is not client and other.state == "live":
                other.forget_scope()
        self.slots[:] = tensors
        self.formals = {t._ref.id: k for k, t in enumerate(tensors)}
        for handle in handles_of(client):
            store = handle._store or handle._ref
            self.before[handle._ref.id] = Before(
                weakref.ref(handle), handle._meta, store.equal, handle._sig, store, handle._ref.mesh
            )
        for leaf in list(client.leaves.values()):
            if leaf._grad is not None:
                self.grads[leaf._grad._ref.id] = leaf
                self.had.add(leaf._ref.id)

    # --- ops

    def note_batch(self, code: list[int], numbers: list[Any], where: Sequence[Any]) -> list[Any]:
        """A batch that leaves; its numbers as plain ones."""
        client, i, ambient = self.client, 0, 0
        lines = iter(where)
        while i < len(code):
            number = code[i]
            if number >= FIRST_ENTRY:
                inputs, operands, news = client.cache.layouts[number]
                a, b = i + 1 + inputs, i + 1 + inputs + operands
                used = [numbers[k] for k in code[a:b]]
                outs = code[b : b + news]
                mesh = client.scope_mesh
                self.ops.append(Noted(number, 0, code[i + 1 : a], used, outs, ambient, mesh, next(lines)))
                i = b + news
            elif number == Op.BACKWARD:
                self._note_backward(code, i, ambient, next(lines))
                roots, inputs, grads, crossings = client.cache.layouts[-code[i + 1]]
                i += 2 + 2 * roots + inputs + 3 * grads + crossings
            elif number == Op.SET_GRAD:
                noted = Noted(number, 0, code[i + 1 : i + 3], [], [], ambient, client.scope_mesh, next(lines))
                self.ops.append(noted)
                i += 3
            elif number in (Op.AMBIENT, Op.DELETE):
                ambient = code[i + 1] if number == Op.AMBIENT else ambient
                i += 2
            elif number in record_steps.WIDTHS:
                at = next(lines) if number == Op.MOVE else locations.here(2)
                if number == Op.MOVE and code[i + 4]:
                    raise self.refuse("to_mesh of a value that requires grad", "move it before or after the call", at)
                used, operands, outs = record_steps.noted(code, i, self.events)
                again = number == Op.RETURN and self.ops[-1].number == number and self.ops[-1].inputs[0] == used[0]
                if not again:  # a replay gives it back to every view there is then
                    plan, around = (code[i + 1], ambient) if number == Op.MOVE else (0, 0)
                    self.ops.append(Noted(number, plan, used, operands, outs, around, client.scope_mesh, at))
                i += record_steps.WIDTHS[Op(number)]
            else:
                raise self.refuse("a backward() that crosses meshes", "leave it outside of the function", next(lines))
        return [value_of(n) for n in numbers]

    def _note_backward(self, code: list[int], i: int, ambient: int, where: Any) -> None:
        client = self.client
        roots, inputs, grads, crossings = client.cache.layouts[-code[i + 1]]
        if crossings:
            raise self.refuse("a backward() that crosses meshes", "leave it outside of the function", where)
        end = i + 2 + 2 * roots + inputs
        triples = code[end : end + 3 * grads]
        used = code[i + 2 : end] + triples[::3] + triples[2::3]
        self.ops.append(Noted(Op.BACKWARD, code[i + 1], used, [], triples[1::3], ambient, client.scope_mesh, where))

    def note_learned(self, entry: int, call: Any, inputs: list[int], outs: list[int]) -> None:
        noted = Noted(entry, 0, inputs, list(call.numbers), outs, call.ambient, call.mesh, locations.here(2))
        self.ops.append(noted)

    def note_learned_backward(self, plan: int, used: list[int], outs: list[int], ambient: int, mesh: Any) -> None:
        self.ops.append(Noted(Op.BACKWARD, plan, used, [], outs, ambient, mesh, locations.here(2)))

    def note_order(self, message: Any, ranks: Any, frames: Sequence[Any]) -> None:
        match message:
            case wire.Place(refs=refs, device=device):
                for ref in refs:
                    if ref in self.before:  # a constant that was there became a tensor
                        self.lasting = True
                    placed = self.placed.setdefault(ref, Placed([]))
                    placed.orders.append((device, None if ranks is None else tuple(ranks), list(frames)))
            case wire.Seed() | wire.Vary():
                raise self.refuse("a seed", "set it before the call, or draw in a function called with ml.remote")
            case wire.Retain():
                raise self.refuse("retain_grad()", "return what you want to keep from torch.autograd.grad")

    def check_loans(self) -> None:
        """Raises where one that began inside has not ended."""
        for loan in self.loans:
            if not loan.has_ended:
                raise UsageRuntimeError(
                    f"{self.function} is recorded and borrowed a tensor ({loan.place}) without ending the loan: call "
                    "its drop() inside the function"
                )

    def refuse(self, what: str, instead: str, where: Any = None) -> UsageError:
        """The error for what cannot be done again by a replay. Its traceback ends at the user's line."""
        at = line_of(where or locations.here(2))
        return UsageTypeError(f"{what} at {at} cannot be part of the recording of {self.function}: {instead}")

    def note_stop(self, function: str) -> None:
        """A function is called that may stop in a debugger."""
        if self.stop is None:
            self.stop = f"there is a breakpoint in {function}, which it calls"
            self._on_stop(self.stop)

    # --- gradients

    def touch(self, leaf: Any) -> None:
        """``leaf.grad`` is read or set."""
        if leaf._ref.id in self.before:
            self.leaves[leaf._ref.id] = leaf

    # --- numbers

    def numbers_of(self, numbers: list[Any]) -> list[Any]:
        return [value_of(n) for n in numbers]

    def _is_derived(self, constant: Any) -> bool:
        """Whether its value may be another at each replay; one that was there before becomes the tape's."""
        if self.tape.knows(constant):
            return True
        if constant._ref.id not in self.before:
            return False
        place = self.formals.get(constant._ref.id)
        self.tape.capture(constant, weakref.ref(constant) if place is None else partial(self.slots.__getitem__, place))
        return True

    def item(self, constant: Any) -> Any:
        return self.tape.item(constant) if self._is_derived(constant) else constant._value.item()

    def value(self, constant: Any) -> torch.Tensor:
        """Its value for Python: the recording holds for this one alone."""
        if self._is_derived(constant):
            item = self.tape.item(constant)
            if type(item) is Traced:
                item.plain()
        return constant._value

    def operand(self, constant: Any) -> Any:
        """Its value as an op's operand."""
        return self.item(constant)

    def check_materialise(self, constant: Any) -> None:
        if self.tape.knows(constant) and constant._ref.id not in self.before:
            raise self.refuse("a tensor made of a number that changes", "make it before the call and pass it in")
        if constant._ref.id in self.before:
            self.lasting = True

    def compute(self, function: Any, args: Any, kwargs: Any, target: Any, run: Any) -> Any:
        """A call among constants: run it, and note it where its result may be another at each replay."""
        flat = [*args, *kwargs.values()]
        kind = scanning.constant_class
        is_derived = any([self._is_derived(a) if isinstance(a, kind) else type(a) is Traced for a in flat])
        variable = self.tape.compute(function, args, kwargs, target) if is_derived else ""
        answer = run([value_of(a) for a in args], {k: value_of(v) for k, v in kwargs.items()})
        result = answer[1]
        if is_derived and target is None and isinstance(result, kind) and not any(result is a for a in flat):
            self.tape.own(result, variable)
        return answer

    def made(self, constant: Any) -> None:
        self.constants.append(constant)

    def plain(self, result: Any) -> Any:
        """What the function returned, without stand-ins for numbers."""
        return tree_map(lambda x: x.value if type(x) is Traced else x, result)

    # --- optimizers

    def enter_optimizer(self, optimizer: Any, args: Any = (), kwargs: Any = None) -> None:
        """Its rates are read again at each replay: a scheduler may change them between two."""
        self.optimizers.append(optimizer)
        kept = [dict(group) for group in optimizer.param_groups]
        self._stopped.append((optimizer, kept))
        for group in optimizer.param_groups:
            if group.get("foreach") or group.get("fused"):
                raise self.refuse(
                    "an optimizer made with foreach=True or fused=True",
                    "leave that out, a recording is sent as one op anyway",
                )
            for key, value in list(group.items()):
                if type(value) is float:
                    group[key] = self.tape.read(group, key, value)
                elif type(value) is tuple and value and all(type(v) is float for v in value):
                    whole = self.tape.hold(group, key)
                    group[key] = tuple([self.tape.read_part(whole, k, v) for k, v in enumerate(value)])
                elif type(value) in (bool, int, str, type(None)):
                    self.tape.expect(group, key, value)

    def leave_optimizer(self, optimizer: Any, args: Any = (), kwargs: Any = None) -> None:
        for place in reversed(range(len(self._stopped))):
            if self._stopped[place][0] is optimizer:
                _restore(*self._stopped.pop(place))
                return

    def end(self) -> None:
        """Whatever way the function ended."""
        while self._stopped:
            _restore(*self._stopped.pop())
        self.tape.is_closed = True


def _restore(optimizer: Any, groups: list[dict[str, Any]]) -> None:
    for group, kept in zip(optimizer.param_groups, groups, strict=True):
        for key, value in kept.items():
            now = group.get(key)
            if type(now) is Traced or (type(now) is tuple and any(type(v) is Traced for v in now)):
                group[key] = value


def handles_of(client: Any) -> list[Any]:
    """Every live handle of a mesh's values, found among the interpreter's objects: a list would cost each op."""
    kinds = dispatch.all_classes
    handles = [found for found in gc.get_objects() if type(found) in kinds]
    whole = [handle for handle in handles if hasattr(handle, "_ref")]  # not one whose making was cut short
    return [handle for handle in whole if lending.behind(handle._ref.mesh).client is client]


def current() -> Recorder | None:
    """The one that notes what this thread does."""
    return state.recorder.get()


def refuse_fetch(what: str) -> None:
    """Raises where a value is asked for while a function is recorded, or inside ``ml.coalescing``."""
    if state.coalescing.get():
        raise UsageNotImplementedError(
            f"{what} inside ml.coalescing(): its ops are not sent yet; do it after the block"
        )
    recorder = state.recorder.get()
    if recorder is not None:
        raise recorder.refuse(what, "it asks the workers for a value; return the tensor and read it after the call")
