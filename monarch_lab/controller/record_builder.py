"""What one run of a function left with its Recorder, made a Recording: inputs told from what is made inside, results
and other effects found, ops cut into segments (record_code.py then defines these on the workers).

Runs on: the thread that recorded, under the client's lock.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

from torch.utils._pytree import TreeSpec, tree_flatten

from monarch_lab.controller import dispatch, lending, record_steps
from monarch_lab.controller.record_steps import Step
from monarch_lab.controller.recorder import Before, Recorder, handles_of
from monarch_lab.controller.recording import Expected, Made, Recording, Segment, Source
from monarch_lab.controller.tape import Traced
from monarch_lab.errors import UsageTypeError
from monarch_lab.wire.engine import FIRST_ENTRY, Op


def build(recorder: Recorder, result: Any) -> Recording | None:
    """None where the run made what later ones will find, so that none of them does the same.

    Raises UsageTypeError for a result or an effect that a replay could not give again.
    """
    return _Builder(recorder).build(result)


class _Builder:
    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.client = recorder.client
        self.recording = Recording(recorder.function, recorder.client, slots=recorder.slots)
        self.recording.generation = recorder.client.cache.generation
        self.inputs: dict[int, int] = {}  # ref -> value
        self.literals: dict[int, int] = {}
        self.kept: dict[int, int] = {}  # ref of what is made inside and outlives its segment -> value
        self.defined: dict[int, int] = {}  # ref -> place among all that is made
        self.is_whole = not recorder.lasting
        self._made_of: dict[int, int] = {}  # value -> place among the recording's handles
        self._made_stores: list[tuple[Any, int]] = []

    def build(self, result: Any) -> Recording | None:
        leaves, spec = tree_flatten(result)
        self._refuse_grad(leaves)
        for op in self.recorder.ops:
            for ref in op.outputs:
                if ref:
                    self.defined[ref] = len(self.defined)
        returned = [t._ref.id for t in leaves if type(t) in dispatch.handle_classes]
        for ref in dict.fromkeys([*self._reads(), *(r for r in returned if r in self.recorder.before)]):
            self._find_input(ref)
        leafs = [leaf for leaf in self.recorder.leaves.values() if self._find_leaf(leaf)]
        self._drop_leaks(leaves)
        if not self.is_whole:
            return None
        self._expect()
        self._results(leaves, spec)
        for k, leaf in enumerate(leafs):
            self._gradient(k, leaf)
        self._changes()
        self._segments()
        recording = self.recording
        recording.lines = [op.where for op in self.recorder.ops]
        recording.entries = frozenset(self._entries())
        recording.moves = frozenset(op.plan for op in self.recorder.ops if op.number == Op.MOVE)
        recording.writes = sorted(set(self._writes()))
        recording.signature = list(self._signature())
        recording.tape = self.recorder.tape.close()
        return recording if self.is_whole else None

    # --- inputs

    def _reads(self) -> Iterator[int]:
        for op in self.recorder.ops:
            for ref in op.inputs:
                if ref and ref not in self.defined:
                    yield ref
            if op.number in (Op.SET_GRAD, Op.BACKWARD):
                for ref in op.inputs:
                    leaf = self.client.leaves.get(ref)
                    if leaf is not None:
                        self.recorder.touch(leaf)

    def _entries(self) -> Iterator[int]:
        for op in self.recorder.ops:
            if op.number >= FIRST_ENTRY:
                yield op.number
            elif op.number == Op.BACKWARD:
                yield -op.plan

    def _writes(self) -> Iterator[int]:
        for op in self.recorder.ops:
            if op.number >= FIRST_ENTRY:
                written = [op.inputs[k] for k in self.client.cache.kinds[op.number][3]]
                yield from (self.inputs[ref] for ref in written if ref in self.inputs)
            elif op.number == Op.RETURN and op.inputs[1] in self.inputs:
                yield self.inputs[op.inputs[1]]

    def _source(self, ref: int) -> Source | None:
        recorder = self.recorder
        if ref in recorder.formals:
            return Source(("tensor", recorder.formals[ref]), place=recorder.formals[ref])
        if ref in recorder.grads:
            leaf = recorder.grads[ref]
            owner = self._source(leaf._ref.id)
            if owner is not None:
                return Source(("grad", *owner.name), owner.place, owner.held, is_grad=True)
        before = recorder.before.get(ref)
        handle = None if before is None else before.handle()
        return None if before is None or handle is None else Source(("held", id(handle)), held=before.handle)

    def _find_input(self, ref: int) -> None:
        if ref in self.recorder.placed and ref not in self.recorder.before:
            self.literals[ref] = 0
            return
        source = self._source(ref)
        if source is None:  # it died meanwhile
            self.is_whole = False
            return
        self.inputs[ref] = len(self.recording.sources)
        self.recording.sources.append(source)

    def _find_leaf(self, leaf: Any) -> bool:
        source = self._source(leaf._ref.id)
        if source is None:
            self.is_whole = False
            return False
        self.recording.leaves.append((source, leaf._ref.id in self.recorder.had))
        return True

    def _expect(self) -> None:
        stores: dict[int, int] = {}
        pattern = []
        for ref, k in self.inputs.items():
            before = self.recorder.before[ref]
            self.recording.expected.append(Expected(before.meta, before.equal, before.sig, before.mesh))
            pattern.append(stores.setdefault(id(before.store), k + 1))
        self.recording.pattern = tuple(pattern)
        self.literals = {ref: len(self.inputs) + k for k, ref in enumerate(self.literals)}
        self.recording.values = len(self.inputs) + len(self.literals)

    # --- what the run left

    def _refuse_grad(self, leaves: list[Any]) -> None:
        for leaf in leaves:
            if type(leaf) in dispatch.handle_classes and leaf._meta.requires_grad:
                raise UsageTypeError(
                    f"REQUIRES_GRAD: {self.recorder.function} returns a tensor that requires grad, and a recording "
                    "gives none: return t.detach(), and call backward() inside the function"
                )

    def _drop_leaks(self, results: list[Any]) -> None:
        """What was made inside and is still there, and is no result: of later runs it would be the old value."""
        recorder = self.recorder
        known = {id(r) for r in results}
        known.update(id(leaf._grad) for leaf in list(self.client.leaves.values()))
        state = {id(v) for o in recorder.optimizers for s in o.state.values() for v in s.values()}
        made = [weakref.ref(c) for c in recorder.constants]
        recorder.constants.clear()
        left = [c for w in made if (c := w()) is not None]
        left += [h for h in handles_of(self.client) if h._ref.id in self.defined or h._ref.id in recorder.placed]
        for handle in left:
            if id(handle) in state:
                self.is_whole = False
            elif id(handle) not in known and handle._ref.id not in recorder.before:
                drop(handle, recorder.function)

    def _results(self, leaves: list[Any], spec: TreeSpec) -> None:
        recording, tape = self.recording, self.recorder.tape
        recording.spec = spec
        for leaf in leaves:
            if type(leaf) in dispatch.handle_classes:
                recording.results.append(self._tensor(leaf))
            elif type(leaf) in dispatch.all_classes:
                source = self._source(leaf._ref.id)
                if source is not None:
                    recording.results.append(("passed", source))
                else:
                    value = (leaf._ref.mesh, leaf._value.clone(), tape.result(leaf))
                    recording.results.append(("constant", value))
            elif type(leaf) is Traced:
                recording.results.append(("number", tape.operand(leaf)))
            else:
                recording.results.append(("value", leaf))

    def _tensor(self, handle: Any) -> tuple[str, Any]:
        ref = handle._ref.id
        if ref in self.inputs:
            return "input", self.inputs[ref]
        if ref in self.recorder.placed:
            raise UsageTypeError(
                f"{self.recorder.function} returns a literal as it is, and each call would give another: make it "
                "before the call, or return literal.clone()"
            )
        return "made", self._make(handle)

    def _make(self, handle: Any) -> int:
        ref = handle._ref.id
        if ref in self.kept:
            return self._made_of[self.kept[ref]]
        recording = self.recording
        value = self._keep(ref)
        store = handle._store or handle._ref
        place = self._made_of[value] = len(recording.made)
        recording.made.append(Made(value, handle._meta, store.equal, handle._ref.mesh, self._shared(store, place)))
        return place

    def _keep(self, ref: int) -> int:
        value = self.kept[ref] = self.recording.values
        self.recording.values += 1
        return value

    def _shared(self, store: Any, place: int) -> tuple[str, int] | None:
        for ref, k in self.inputs.items():
            if self.recorder.before[ref].store is store:
                return "input", k
        for other, k in self._made_stores:
            if other is store:
                return "made", k
        self._made_stores.append((store, place))
        return None

    def _gradient(self, k: int, leaf: Any) -> None:
        gradient, had = leaf._grad, leaf._ref.id in self.recorder.had
        if gradient is None:
            if had:
                self.recording.grads.append((k, "none", 0))
            return
        ref = gradient._ref.id
        if gradient._meta.requires_grad:
            raise UsageTypeError(
                f"REQUIRES_GRAD: {self.recorder.function} leaves a gradient that has a graph itself (create_graph), "
                "which a recording does not: use torch.autograd.grad inside the function"
            )
        if self.recorder.grads.get(ref) is leaf:
            return
        if ref in self.inputs:
            self.recording.grads.append((k, "input", self.inputs[ref]))
        elif ref in self.defined:
            self.recording.grads.append((k, "made", self._make(gradient)))
        else:
            self.is_whole = False

    def _changes(self) -> None:
        for ref, k in self.inputs.items():
            before: Before = self.recorder.before[ref]
            handle = before.handle()
            if handle is None:  # such as a gradient that was replaced
                continue
            store = handle._store or handle._ref
            if store is not before.store:
                raise UsageTypeError(
                    f"{self.recorder.function} gives a tensor from outside other memory (.data = or set_), which a "
                    "recording does not: write into it with copy_"
                )
            if store.equal != before.equal:
                self.recording.equals.append((k, store.equal))
            meta = handle._meta
            if meta.wants_sig and (not before.meta.wants_sig or handle._sig not in (before.sig, ref)):
                raise UsageTypeError(
                    f"REQUIRES_GRAD: {self.recorder.function} writes to a tensor from outside under autograd, so that "
                    "it requires grad: write under torch.no_grad()"
                )
            if meta is not before.meta:
                self.recording.metas.append((k, meta))

    # --- segments

    def _segments(self) -> None:
        steps, segments = self.recording.steps, self.recording.segments
        for op in self.recorder.ops:
            if op.number in record_steps.WIDTHS:
                steps.append(Step(op.mesh, [op]))
                continue
            if not steps or type(steps[-1]) is Step or steps[-1].mesh is not op.mesh:
                segments.append(Segment(self.client, op.mesh))
                steps.append(segments[-1])
            steps[-1].ops.append(op)
        home = {ref: k for k, s in enumerate(steps) for op in s.ops for ref in op.outputs}
        for k, step in enumerate(steps):
            for op in step.ops:
                is_step = type(step) is Step
                if is_step and any(ref in self.literals for ref in op.inputs):
                    raise UsageTypeError(
                        f"{self.recorder.function} lends or moves a literal as it is, and each call would have "
                        "another: make it before the call, or use literal.clone()"
                    )
                for ref in (*op.inputs, *(op.outputs if is_step else ())):
                    if ref in home and (is_step or home[ref] != k) and ref not in self.kept:
                        self._keep(ref)
        for k, segment in enumerate(steps):
            if type(segment) is Step:
                segment.inputs = [self._value(ref) for ref in segment.ops[0].inputs]
                segment.outputs = [self._value(ref) for ref in segment.ops[0].outputs]
                continue
            used = dict.fromkeys(ref for op in segment.ops for ref in op.inputs if ref and home.get(ref, -1) != k)
            segment.refs = list(used)
            segment.inputs = [self._value(ref) for ref in used]
            made = dict.fromkeys(ref for op in segment.ops for ref in op.outputs if ref in self.kept)
            segment.made = list(made)
            segment.outputs = [self.kept[ref] for ref in made]
            segment.lines = {n: op.where for n, op in enumerate(segment.ops)}
            segment.last_ambient = segment.ops[-1].ambient
            segment.ambients = {op.ambient for op in segment.ops}
            segment.numbers = self._numbers(segment)
        self.recording.passing = list(self._passing())
        shared = [ref for ref in self.literals if sum(ref in s.refs for s in segments) > 1]
        if shared:
            raise UsageTypeError(
                f"{self.recorder.function} uses one literal on two meshes: make one for each, or before the call"
            )
        self.recording.placed = [(self.recorder.placed[ref], self._home_of(ref)) for ref in self.literals]
        self.recording.copied = {self.literals[ref] for ref in self.literals}

    def _passing(self) -> Iterator[tuple[int, int]]:
        """(value, stream) of what is made for later steps alone: deleted where it was used last."""
        owned = {m.value for m in self.recording.made}
        last: dict[int, int] = {}
        for step in self.recording.steps:
            for value in (*step.inputs, *step.outputs):
                last[value] = step.mesh.stream_number
        first = len(self.inputs) + len(self.literals)
        yield from ((v, stream) for v, stream in last.items() if v >= first and v not in owned)

    def _home_of(self, ref: int) -> Any:
        return next(op.mesh for op in self.recorder.ops if ref in op.inputs)

    def _value(self, ref: int) -> int:
        for known in (self.inputs, self.literals, self.kept):
            if ref in known:
                return known[ref]
        raise AssertionError(f"a recording reads {ref}, which is not there")

    def _numbers(self, segment: Segment) -> list[list[tuple[bool, Any]]]:
        """For each op its numbers: (it is the tape's, the number or its place among the segment's varying ones)."""
        found: list[list[tuple[bool, Any]]] = []
        for op in segment.ops:
            row: list[tuple[bool, Any]] = []
            for number in op.numbers:
                if type(number) is Traced:
                    place = self.recorder.tape.operand(number)
                    if place not in segment.varying:
                        segment.varying.append(place)
                    row.append((True, segment.varying.index(place)))
                else:
                    row.append((False, number))
            found.append(row)
        return found

    def _signature(self) -> Iterator[tuple[Any, ...]]:
        """Each op without the refs of its run: (number, plan, inputs, numbers, outputs, ambient, mesh)."""
        names: dict[int, Any] = {ref: self.recording.sources[k].name for ref, k in self.inputs.items()}
        names |= {ref: ("literal", self.recorder.placed[ref].content()) for ref in self.literals}
        names |= {ref: ("made", k) for ref, k in self.defined.items()}
        names[0] = None
        for op in self.recorder.ops:
            numbers = tuple(("tape", n.name) if type(n) is Traced else ("number", repr(n)) for n in op.numbers)
            inputs = tuple(names[ref] for ref in op.inputs)
            kind = op.plan if op.number == Op.MOVE else self.client.cache.kinds.get(-op.plan if op.plan else op.number)
            yield (
                op.number < FIRST_ENTRY and int(op.number),
                kind,
                inputs,
                numbers,
                tuple(names[ref] for ref in op.outputs),
                op.ambient,
                id(op.mesh),
            )


def drop(handle: Any, function: str) -> None:
    """Whatever uses it from now on is told that it was dropped."""
    if hasattr(handle, "_value"):
        del handle._value
        handle.__class__ = dispatch.handle_class
    text = (
        f"this tensor was made inside {function}, which is recorded, and was not returned: replays make no such "
        "tensor, so it would keep an old value; return it from the function"
    )
    lending.let_go([handle], text)
