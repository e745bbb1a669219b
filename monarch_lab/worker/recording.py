"""Recordings: a stretch of the op stream made into one function of straight-line code over local variables.

    replay     the function runs: the calls and checks of its ops, as calls.py writes them, and nothing else
    failure    an op raised: it and what is left are then done one by one as ops of a batch are, from the function's
               local variables, so that failures spread, and collectives are taken part in, as without a recording

Runs on: the worker's main thread.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import CodeType
from typing import TYPE_CHECKING, Any

import torch

from monarch_lab.wire import engine as wire
from monarch_lab.wire.engine import FIRST_ENTRY, Op
from monarch_lab.worker import backward, bundles, calls

if TYPE_CHECKING:
    from monarch_lab.worker.op_stream import OpStream

_ARITHMETIC = ("add", "sub", "mul", "div", "true_divide", "neg", "abs", "exp", "log", "sqrt", "tanh", "sigmoid", "relu")
# By their definition (broadcasting, type promotion) what their result looks like hangs on what their inputs look like
# alone: it is checked where it leaves the recording, and not at each step. A check costs a third of a small op.
_BY_DEFINITION = {
    getattr(place, name)
    for place in (torch, torch.Tensor)
    for name in (*_ARITHMETIC, "__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__", "__truediv__")
    if hasattr(place, name)
}
_TEMPORARY = -(1 << 62)  # refs of values made inside, while a failure is dealt with, lie below


@dataclass(frozen=True, slots=True)
class _Part:
    """One instruction of a recording's code, taken apart. Zeros stand for no value."""

    at: int
    number: int
    inputs: list[int]
    numbers: list[int]
    outputs: list[int]


@dataclass(slots=True)
class Recording:
    definition: wire.RecordingDef
    run: Callable[[dict[int, Any], list[int], int, list[Any]], int]
    parts: list[_Part]
    starts: list[int]  # line of the function where each part begins
    writes: list[int]  # positions among the inputs that are written, or whose gradient is
    width: int

    def output_refs(self, code: list[int], i: int) -> list[int]:
        return code[i + self.width - len(self.definition.outputs) : i + self.width]

    def written_refs(self, code: list[int], i: int) -> list[int]:
        return [code[i + 2 + k] for k in self.writes]


def make_recording(definition: wire.RecordingDef, engine: OpStream) -> Recording:
    parts = list(_parts(definition.code, engine))
    writer = _Writer(definition, engine)
    lines, starts = writer.lines(parts)
    run = calls.compiled("replay", "cells, code, i, numbers", lines, writer.op_code.names)
    return Recording(definition, run, parts, starts, _writes(definition, parts, engine), writer.width)


def _parts(code: list[int], engine: OpStream) -> Iterator[_Part]:
    i = 0
    while i < len(code):
        number = code[i]
        width = engine.width_at(code, i)
        if number >= FIRST_ENTRY:
            template = engine.known.entries[number].template.definition
            first = i + 1 + template.inputs
            last = first + template.numbers
            yield _Part(i, number, code[i + 1 : first], code[first:last], code[last : i + width])
        elif number == Op.BACKWARD:
            plan = engine.known.plans[code[i + 1]]
            end = i + 2 + 2 * plan.roots + plan.inputs
            triples = code[end : i + width]
            yield _Part(i, number, code[i + 2 : end] + triples[::3] + triples[2::3], [], triples[1::3])
        else:
            yield _Part(i, number, code[i + 1 : i + width] if number == Op.SET_GRAD else [], [], [])
        i += width


def _writes(definition: wire.RecordingDef, parts: list[_Part], engine: OpStream) -> list[int]:
    names: set[int] = set()
    for part in parts:
        if part.number >= FIRST_ENTRY:
            names.update(part.inputs[k] for k in engine.known.entries[part.number].definition.writes)
        elif part.number == Op.SET_GRAD:
            names.add(part.inputs[0])
        elif part.number == Op.BACKWARD:
            grads = len(part.outputs)
            names.update(part.inputs[len(part.inputs) - grads :])
    return [name - 1 for name in sorted(names) if 1 <= name <= definition.inputs]


class _Writer:
    """Writes the function."""

    def __init__(self, definition: wire.RecordingDef, engine: OpStream) -> None:
        self.definition = definition
        self.engine = engine
        self.op_code = calls.OpCode(engine)
        self.op_code.names |= {"copy": _copy, "set_ambient": engine.set_ambient, "backward": self._backward}
        self.op_code.names["set_grad"] = engine.set_grad
        self._leaving = frozenset(definition.outputs)
        self.width = 2 + definition.inputs + definition.varying + len(definition.outputs)

    def lines(self, parts: list[_Part]) -> tuple[list[str], list[int]]:
        definition = self.definition
        lines = [f"x{k + 1} = cells[code[i + {2 + k}]]" for k in range(definition.inputs)]
        numbers = 2 + definition.inputs
        lines += [f"v{k} = numbers[code[i + {numbers + k}]]" for k in range(definition.varying)]
        lines += [f"x{name} = copy(x{name})" for name in definition.copied]
        starts, last_use, bundled = [], self._last_uses(parts), dict(self._bundles(parts))
        for k, part in enumerate(parts):
            starts.append(len(lines) + 2)  # "def" is line 1
            lines += bundled[k] if k in bundled else self._part(part)
            if last_use[k]:  # its memory, as a handle's end would free it
                lines.append("del " + ", ".join(f"x{name}" for name in last_use[k]))
        outputs = numbers + definition.varying
        lines += [f"cells[code[i + {outputs + k}]] = x{name}" for k, name in enumerate(definition.outputs)]
        lines.append(f"return i + {self.width}")
        return lines, starts

    def _bundles(self, parts: list[_Part]) -> Iterator[tuple[int, list[str]]]:
        """(part, its lines) of those done together with their neighbours: the first does all, the others nothing."""
        entries = self.engine.known.entries
        k = 0
        for key, same in itertools.groupby(parts, lambda p: entries[p.number].bundle if p.number in entries else None):
            group = list(same)
            if key is not None:
                metas = [entries[part.number].definition.inputs[0] for part in group]
                done = 0
                for count in bundles.split([part.inputs[0] for part in group], metas, key):
                    if count > 1:
                        line = self._bundle(key, group[done : done + count], metas[done : done + count])
                        yield k + done, [line]
                        yield from ((k + n, []) for n in range(done + 1, done + count))
                    done += count
            k += len(group)

    def _bundle(self, key: bundles.Key, parts: list[_Part], metas: list[wire.TensorMeta]) -> str:
        def bundle(values: Sequence[Any], refs: Sequence[int]) -> None:
            bundles.reduce(key, values, metas)
            failed = [r for r, v in zip(refs, values, strict=True) if not isinstance(v, torch.Tensor)]
            self.engine.unwritten(ref for ref in failed if ref > _TEMPORARY)

        names = [part.inputs[0] for part in parts]
        values, refs = ", ".join(f"x{n}" for n in names), ", ".join(map(self._ref, names))
        return f"{self.op_code.source.constant(bundle)}(({values}), ({refs}))"

    def _last_uses(self, parts: list[_Part]) -> list[list[int]]:
        ends: list[list[int]] = [[] for _ in parts]
        seen = {0, *self.definition.outputs}
        for k in reversed(range(len(parts))):
            for name in (*parts[k].inputs, *parts[k].outputs):
                if name not in seen:
                    seen.add(name)
                    ends[k].append(name)
        return ends

    def _number(self, place: int) -> str:
        fixed = self.definition.numbers
        if place >= len(fixed):
            return f"v{place - len(fixed)}"
        value = fixed[place]
        return f"({value!r})" if math.isfinite(value) else self.op_code.source.constant(value)

    def _part(self, part: _Part) -> list[str]:
        if part.number >= FIRST_ENTRY:
            entry = self.engine.known.entries[part.number]
            names = calls.Names(
                inputs=[f"x{n}" for n in part.inputs],
                numbers=[self._number(n) for n in part.numbers],
                input_refs=[self._ref(n) for n in part.inputs],
                outputs=[f"x{n}" for n in part.outputs],
                output_refs=[self._ref(n) for n in part.outputs],
            )
            if entry.template.function in _BY_DEFINITION and part.outputs and part.outputs[0] not in self._leaving:
                return self.op_code.unchecked(entry.template, names)
            return self.op_code.lines(entry.definition, entry.template, names)
        code = self.definition.code
        if part.number == Op.AMBIENT:
            return [f"set_ambient({code[part.at + 1]})"]
        values = [f"x{n}" if n else "None" for n in part.inputs]
        if part.number == Op.SET_GRAD:
            ref = self._ref(part.inputs[0])
            return [f"refuse_failed({', '.join(values)})", f"set_grad({', '.join(values)}, {ref})"]
        plan = self.engine.known.plans[code[part.at + 1]]
        a, b = 2 * plan.roots, 2 * plan.roots + plan.inputs
        groups = (values[: plan.roots], values[plan.roots : a], values[a:b], values[b : b + len(part.outputs)])
        lists = ", ".join(f"[{', '.join(group)}]" for group in groups)
        lines = [f"r = backward({self.op_code.source.constant(plan)}, cells, {lists})"]
        return lines + [f"x{name} = r[{k}]" for k, name in enumerate(part.outputs) if name]

    def _ref(self, name: int) -> str:
        """A leaf is known by its ref; one made inside has none and needs none that outlives the run."""
        return f"code[i + {1 + name}]" if name <= self.definition.inputs else str(_TEMPORARY - name)

    def _backward(
        self,
        plan: wire.BackwardDef,
        cells: dict[int, Any],
        roots: list[Any],
        gradients: list[Any],
        inputs: list[Any],
        leaves: list[Any],
    ) -> list[Any]:
        engine = self.engine
        crossings = backward.run(engine, roots, gradients, inputs, plan.keep_graph, plan.create_graph)
        expected = {leaf._monarch_ref for leaf in leaves if leaf.grad is not None}
        touched = {r for r in engine.touched if r in expected or (r in cells and cells[r].grad is not None)}
        if len(expected) < len(leaves) or expected != touched or crossings:
            engine.moves.forget(crossings)
            raise backward.missed(plan, len(touched))
        found = [leaf.grad for leaf in leaves]
        for gradient, told in zip(found, plan.grads, strict=True):
            engine.check_gradient(gradient, told)
        engine.touched.clear()
        return found


def _copy(literal: torch.Tensor) -> torch.Tensor:
    return literal.detach().clone().requires_grad_(literal.requires_grad)


def finish(
    engine: OpStream,
    recording: Recording,
    code: list[int],
    i: int,
    numbers: list[Any],
    error: BaseException,
    within: int,
) -> None:
    """The function raised ``error``: deal with it as an op's, and run what is left. ``within``: the REPLAY's position
    among the ops of its batch, for reports."""
    definition = recording.definition
    function: CodeType = recording.run.__code__
    line, found = 0, {}
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code is function:
            line, found = trace.tb_lineno, trace.tb_frame.f_locals
        trace = trace.tb_next
    at = bisect.bisect_right(recording.starts, line) - 1  # -1: an input was not there; whoever reads it says so
    refs = _refs(definition, code, i)
    values = {name: found[f"x{name}"] for name in refs if f"x{name}" in found}
    copied = {name: code[i + 1 + name] for name in definition.copied}
    for name, ref in copied.items():
        if name not in values and isinstance(engine.cells.get(ref), torch.Tensor):
            values[name] = _copy(engine.cells[ref])
    engine.cells.update({refs[n]: v for n, v in values.items() if n > definition.inputs or n in copied})
    every = [*definition.numbers, *[numbers[p] for p in _varying(definition, code, i)]]
    batch = wire.Batch(engine.batch, engine.cell, engine.scope, _renamed(recording, refs), every, False)
    try:
        if at < 0 and not isinstance(error, KeyboardInterrupt):
            engine.run_code(batch, 0, within)
        else:
            engine.run_code(batch, recording.parts[max(at, 0)].at, within, error)
    finally:
        for ref in refs.values():
            if ref <= _TEMPORARY:
                engine.forget(ref)


def _varying(definition: wire.RecordingDef, code: list[int], i: int) -> list[int]:
    first = i + 2 + definition.inputs
    return code[first : first + definition.varying]


def _refs(definition: wire.RecordingDef, code: list[int], i: int) -> dict[int, int]:
    """The ref of each name, as long as a failure is dealt with."""
    first = i + 2 + definition.inputs + definition.varying
    refs = {k + 1: code[i + 2 + k] for k in range(definition.inputs)}
    refs |= {name: code[first + k] for k, name in enumerate(definition.outputs) if name > definition.inputs}
    refs |= {name: _TEMPORARY - name for name in definition.copied}
    return _Refs(refs)


class _Refs(dict[int, int]):
    def __missing__(self, name: int) -> int:
        self[name] = ref = _TEMPORARY - name
        return ref


def _renamed(recording: Recording, refs: dict[int, int]) -> list[int]:
    code = list(recording.definition.code)
    for part, end in zip(recording.parts, [*(p.at for p in recording.parts[1:]), len(code)], strict=True):
        if part.number == Op.AMBIENT:
            continue
        first = part.at + (2 if part.number == Op.BACKWARD else 1)
        last = first + len(part.inputs) if part.number >= FIRST_ENTRY else end
        places = [*range(first, last), *(range(end - len(part.outputs), end) if part.number >= FIRST_ENTRY else ())]
        for k in places:
            code[k] = refs[code[k]] if code[k] else 0
    return code
