"""A recording: what a function did to the stream once, made ready to be done again with one op.

    inputs     values the ops read that were there before: the function's tensors by place, the gradient of a leaf,
               a literal (each run gets a copy), another tensor itself
    expected   what was known of the inputs, which of them share memory, which leaves had gradients: a recording is
               used only where all that is so again, for what the ops did hangs on it
    segments   one stretch of ops for each mesh and stream they ran on, defined on the workers; a replay sends one op
               for each, and what is between them (record_steps.py)
    effects    what the run left on handles: results, gradients, what is known equal, metadata

Runs on: the thread that calls, under the client's lock.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch.utils._pytree import TreeSpec, tree_unflatten

from monarch_lab.controller import dispatch, locations, record_steps
from monarch_lab.controller.recorder import Noted, line_of
from monarch_lab.controller.refs import Ref
from monarch_lab.controller.state import ambient_values
from monarch_lab.errors import UsageRuntimeError
from monarch_lab.transport.frames import HeldInterrupt
from monarch_lab.wire.engine import Op

_SENT_AT_ONCE = 4_000  # a batch with replays of so many ops does not wait for more: a send costs as much as a replay


class RecordedCall(tuple[Any, int]):
    """The line of a call, and those of the recorded ops by their number."""

    inside: dict[int, locations.Location]


@dataclass(frozen=True, slots=True)
class Source:
    """Where a replay finds an input. ``name`` says the same for comparisons."""

    name: tuple[Any, ...]
    place: int = -1  # among the function's tensors
    held: Callable[[], Any] | None = None
    is_grad: bool = False  # the gradient of what is found

    def find(self, tensors: list[Any]) -> Any:
        found = tensors[self.place] if self.held is None else self.held()
        return found._grad if self.is_grad and found is not None else found


@dataclass(frozen=True, slots=True)
class Expected:
    meta: Any
    equal: int
    sig: int
    mesh: Any


class Segment:
    """Its definition is given up with it."""

    def __init__(self, client: Any, mesh: Any) -> None:
        self.client = client
        self.mesh = mesh
        self.number = 0
        self.inputs: list[int] = []  # values
        self.outputs: list[int] = []
        self.varying: list[int] = []  # numbers of the tape
        self.lines: dict[int, locations.Location] = {}
        self.last_ambient = -1
        self.ambients: set[int] = set()
        # Until it is defined: its ops with the refs of their run, those of its inputs and outputs, the ops' numbers.
        self.ops: list[Noted] = []
        self.refs: list[int] = []
        self.made: list[int] = []
        self.numbers: list[list[tuple[bool, Any]]] = []

    def __del__(self) -> None:
        if self.number:
            self.client.recordings.pop(self.number, None)
            self.mesh.let_go(self.number)


@dataclass(slots=True)
class Made:
    """A tensor that a replay makes a handle for. ``shares``: ("input" or "made", index) of the one whose storage it
    has, None for its own."""

    value: int
    meta: Any
    equal: int
    mesh: Any
    shares: tuple[str, int] | None


@dataclass(slots=True, weakref_slot=True, eq=False)
class Recording:
    function: str
    client: Any
    sources: list[Source] = field(default_factory=list)
    expected: list[Expected] = field(default_factory=list)
    pattern: tuple[int, ...] = ()
    placed: list[Any] = field(default_factory=list)  # the literals as they were noted, with their mesh
    copied: set[int] = field(default_factory=set)  # values that are literals
    literals: list[Ref] = field(default_factory=list)
    leaves: list[tuple[Source, bool]] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)
    steps: list[Any] = field(default_factory=list)  # the segments, and what is between them (record_steps.py)
    passing: list[tuple[int, int]] = field(default_factory=list)
    made: list[Made] = field(default_factory=list)
    values: int = 0
    grads: list[tuple[int, str, int]] = field(default_factory=list)  # leaf, "none" or "made" or "input", index
    equals: list[tuple[int, int]] = field(default_factory=list)
    metas: list[tuple[int, Any]] = field(default_factory=list)
    results: list[tuple[str, Any]] = field(default_factory=list)
    spec: TreeSpec | None = None
    tape: Callable[[], Any] = lambda: ([], [])
    slots: list[Any] = field(default_factory=list)
    ties: list[tuple[frozenset[int], bool]] = field(default_factory=list)  # see ties.py
    entries: frozenset[int] = frozenset()
    moves: frozenset[int] = frozenset()
    signature: list[tuple[Any, ...]] = field(default_factory=list)
    lines: list[locations.Location] = field(default_factory=list)
    writes: list[int] = field(default_factory=list)  # inputs that are written
    length: int = 0  # in ops
    batch: int = -1  # the one that its last replay is in, and the ops that it has put there
    unsent: int = 0
    is_verified: bool = False
    is_published: bool = False
    generation: int = 0  # of the cache
    is_dead: bool = False
    anchors: list[Any] = field(default_factory=list)

    def anchor(self, objects: list[Any]) -> None:
        """These are meant by their identity: once one is gone, another may have it."""
        own = weakref.ref(self)

        def gone(_: Any) -> None:
            recording = own()
            if recording is not None:
                recording.is_dead = True

        for thing in objects:
            try:
                self.anchors.append(weakref.ref(thing, gone))
            except TypeError:
                self.anchors.append(thing)

    # --- use

    def fitting(self, tensors: list[Any]) -> tuple[list[Any], Any] | None:
        """The inputs and the tape's numbers, where all is as it was recorded; None where something is not."""
        if self.is_dead:
            return None
        if not self.is_published and self.generation != self.client.cache.generation:
            self.is_dead = True  # what its ops are known by was forgotten
            return None
        forgotten = self.client.cache.forgotten
        if forgotten and not self.entries.isdisjoint(forgotten):
            self.is_dead = True
            return None
        inputs: list[Any] = []
        stores: dict[int, int] = {}
        for source, told in zip(self.sources, self.expected, strict=True):
            found = source.find(tensors)
            if found is None:
                self.is_dead = source.held is not None and not source.is_grad
                return None
            store = found._store or found._ref
            if found._meta is not told.meta or store.equal != told.equal or found._ref.mesh is not told.mesh:
                return None
            if told.meta.wants_sig and found._sig != told.sig and not (told.meta.is_leaf and told.sig):
                return None
            inputs.append(found)
            stores.setdefault(id(store), len(inputs))
        if tuple([stores[id(t._store or t._ref)] for t in inputs]) != self.pattern:
            return None
        for source, had in self.leaves:
            leaf = source.find(tensors)
            if leaf is None or (leaf._grad is not None) is not had:
                return None
        if any(ref.mesh.lost_ranks for ref in self.literals):
            self.is_dead = True
            return None
        self.slots[:] = tensors
        computed = self.tape()
        self.slots.clear()
        return None if computed is None else (inputs, computed)

    def replay(self, tensors: list[Any], inputs: list[Any], computed: Any) -> Any:
        client = self.client
        numbers, written = computed
        refs = [t._ref.id for t in inputs] + [ref.id for ref in self.literals]
        where = locations.here(3)
        with client.lock, HeldInterrupt():
            for index in self.writes:  # raises where it is lent to be read: see lending.py
                store = inputs[index]._store or inputs[index]._ref
                store.equal = store.equal
            for _ in range(self.values - len(refs)):
                refs.append(next(client.refs))
            events: dict[int, int] = {}
            for step in self.steps:
                if type(step) is Segment:
                    self._send(step, refs, numbers, where)
                else:
                    record_steps.send(client, step, refs, inputs, events, where)
            made = self._handles(inputs, refs)
            self._affect(tensors, inputs, made)
            for constant, value in written:
                constant._value = value
            for v, stream in self.passing:
                client.dead_of(stream).append(refs[v])
            if self.ties:
                client.ties.put_back(self.ties)
            if client.batch != self.batch:
                self.batch, self.unsent = client.batch, 0
            self.unsent += self.length
            if self.unsent >= _SENT_AT_ONCE and not client.holds:
                client.flush()
        client.flush_if_full()
        leaves = [self._result(kind, what, tensors, inputs, made, numbers) for kind, what in self.results]
        return tree_unflatten(leaves, self.spec)

    def _send(self, segment: Segment, refs: list[int], numbers: list[Any], where: locations.Location) -> None:
        client = self.client
        client.use_scope(segment.mesh)
        if client.has_streams:  # what torch keeps for the process may be for no stream or for one alone
            for ambient in segment.ambients:
                client.define_ambient(ambient, ambient_values(ambient), client.stream)
        if client.urgent:
            client.drain_dead()
        if not client.code:
            client.dirty()
        code = [Op.REPLAY, segment.number]
        code += [refs[v] for v in segment.inputs]
        if segment.varying:
            place = len(client.numbers)
            client.numbers.extend([numbers[k] for k in segment.varying])
            code += range(place, place + len(segment.varying))
        code += [refs[v] for v in segment.outputs]
        call = RecordedCall(where)
        call.inside = segment.lines
        client.where.append(call)
        client.code.extend(code)
        client.ambient = segment.last_ambient

    def _handles(self, inputs: list[Any], refs: list[int]) -> list[Any]:
        handles: list[Any] = []
        for m in self.made:
            handle = dispatch.make_handle(m.meta, Ref(refs[m.value], m.mesh, m.equal, m.meta.is_large))
            if m.shares is not None:
                kind, index = m.shares
                first = inputs[index] if kind == "input" else handles[index]
                handle._store = first._store or first._ref
                handle._store.share(first, handle)
            handles.append(handle)
        return handles

    def _affect(self, tensors: list[Any], inputs: list[Any], made: list[Any]) -> None:
        for index, meta in self.metas:
            inputs[index]._refresh(meta)
        for index, equal in self.equals:
            (inputs[index]._store or inputs[index]._ref).equal = equal
        changed = []
        for leaf, kind, index in self.grads:
            gradient = None if kind == "none" else made[index] if kind == "made" else inputs[index]
            changed.append((self.leaves[leaf][0].find(tensors), gradient))
        for handle, gradient in changed:
            handle._grad = gradient

    def _result(
        self, kind: str, what: Any, tensors: list[Any], inputs: list[Any], made: list[Any], numbers: list[Any]
    ) -> Any:
        match kind:
            case "input":
                return inputs[what]
            case "made":
                return made[what]
            case "number":
                return numbers[what]
            case "passed":
                return what.find(tensors)
            case "constant":
                from monarch_lab.controller import constants

                mesh, value, place = what
                return constants.make(value.clone() if place is None else numbers[place], mesh)
        return what

    # --- verification

    def compare(self, other: Recording) -> None:
        """Raises where a second run did something else than this one."""
        for k in range(max(len(self.signature), len(other.signature))):
            first = self.signature[k] if k < len(self.signature) else None
            second = other.signature[k] if k < len(other.signature) else None
            if first != second:
                a, b = _described(self, k, second), _described(other, k, first)
                raise UsageRuntimeError(
                    f"the recording of {self.function} diverges at operation {k}: the first call had {a}, the second "
                    f"had {b}; what changes from call to call must be an argument, or stay outside of the function"
                )
        if self.results_signature() != other.results_signature():
            raise UsageRuntimeError(
                f"the recording of {self.function} diverges in its result: two calls with arguments of the same kind "
                "returned values of another structure"
            )

    def results_signature(self) -> Any:
        return (
            self.spec,
            [(kind, what if kind in ("input", "made", "number") else None) for kind, what in self.results],
        )


def _described(recording: Recording, k: int, other: tuple[Any, ...] | None) -> str:
    if k >= len(recording.signature):
        return "no such operation"
    mine = recording.signature[k]
    text = line_of(recording.lines[k])
    if other is not None and mine[:3] == other[:3] and mine[3] != other[3]:
        pairs = zip(mine[3], other[3], strict=False)
        changed = ", ".join(str(a[1]) for a, b in pairs if a != b)
        text += f" with {changed}"
    return text
