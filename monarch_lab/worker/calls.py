"""Entries made into code: one generated function for each, which calls, checks its prediction and stores.

The check is rule 3 of docs/torch_rules.md: shape, stride, dtype, requires_grad and identity of every output are
compared with what the controller was told, and a difference is an error that names the op and both.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from monarch_lab.tensors.meta import describe, dtype_named
from monarch_lab.tensors.structure import tensors_of
from monarch_lab.tensors.template import CallTree, Input, Number, Source
from monarch_lab.wire.engine import EntryDef, TemplateDef, TensorMeta
from monarch_lab.worker import bundles
from monarch_lab.worker.failures import DependentOnError, Failed, PredictionError
from monarch_lab.worker.failures import describe as describe_error
from monarch_lab.worker.learning import Rejecting, version

if TYPE_CHECKING:
    from monarch_lab.worker.op_stream import OpStream

OpFunction = Callable[[dict[int, Any], list[int], int, list[Any]], int]


@dataclass(frozen=True, slots=True)
class Template:
    definition: TemplateDef
    function: Callable[..., Any]
    tree: CallTree
    invoke: Callable[..., Any]  # (inputs, numbers) -> result
    opaque: bool  # a user's function: may not touch a failed input, and may do anything


@dataclass(frozen=True, slots=True)
class Entry:
    definition: EntryDef
    template: Template
    run: OpFunction
    fresh: tuple[int, ...]  # outputs that get a ref
    width: int  # integers of the op in the stream
    bundle: bundles.Key | None  # what it may be done together with

    def output_refs(self, code: list[int], i: int) -> list[int]:
        return code[i + self.width - len(self.fresh) : i + self.width]

    def input_refs(self, code: list[int], i: int) -> list[int]:
        return code[i + 1 : i + 1 + self.template.definition.inputs]


def compiled(name: str, parameters: str, lines: list[str], namespace: dict[str, Any]) -> Callable[..., Any]:
    """A function made of these lines of its body."""
    text = "\n    ".join([f"def {name}({parameters}):", *lines])
    exec(compile(text, "<monarch_lab call>", "exec"), namespace)
    return namespace[name]


def make_template(definition: TemplateDef, function: Callable[..., Any], tree: CallTree) -> Template:
    source = Source()
    expression = source.call(function, tree)
    lines = []
    if definition.inputs:
        lines.append("".join(f"t{k}, " for k in range(definition.inputs)) + "= inputs")
    if definition.numbers:
        lines.append("".join(f"n{k}, " for k in range(definition.numbers)) + "= numbers")
    lines.append(f"return {expression}")
    opaque = definition.function.startswith("payload:") or definition.function.startswith("user:")
    invoke = compiled("invoke", "inputs, numbers", lines, dict(source.names))
    return Template(definition, function, tree, invoke, opaque)


def refuse_failed(*inputs: Any) -> None:
    for value in inputs:
        if type(value) is Failed:
            raise DependentOnError(value.failure)


@dataclass(slots=True)
class Names:
    """What an op's code calls its inputs, number operands and outputs, and the refs of inputs and outputs."""

    inputs: list[str]
    numbers: list[str]
    input_refs: list[str]
    outputs: list[str]  # where each new output is stored; an output that has no ref is not
    output_refs: list[str]


class _Placed(Source):
    """A Source whose placeholders have names given for one op, and whose constants are shared between ops."""

    def __init__(self) -> None:
        super().__init__()
        self.op = Names([], [], [], [], [])
        self._known: dict[int, str] = {}

    def constant(self, value: Any) -> str:
        name = self._known.get(id(value))
        if name is None:
            name = self._known[id(value)] = super().constant(value)  # kept alive by ``names``
        return name

    def expression(self, tree: Any) -> str:
        if type(tree) is Input:
            return self.op.inputs[tree.index]
        if type(tree) is Number and tree.dtype is None:
            return self.op.numbers[tree.index]
        if type(tree) is Number:
            return f"{self.constant(torch.tensor)}({self.op.numbers[tree.index]}, dtype={self.constant(tree.dtype)})"
        return super().expression(tree)


class OpCode:
    """Writes the code of ops: the call, the check of its prediction, and the stores of what is new."""

    def __init__(self, engine: OpStream) -> None:
        self.engine = engine
        self.source = _Placed()
        self.names = self.source.names
        self.names |= {
            "rejecting": Rejecting,
            "refuse_failed": refuse_failed,
            "user_code": engine.user_code,
            "touched": engine.touched,
            "arm": engine.arm,
            "versions": _versions,
        }

    def unchecked(self, template: Template, op: Names) -> list[str]:
        """The call alone, of one that gives one new tensor."""
        self.source.op = op
        return [f"{op.outputs[0]} = {self.source.call(template.function, template.tree)}"]

    def lines(self, definition: EntryDef, template: Template, op: Names) -> list[str]:
        self.source.op = op
        lines: list[str] = []
        checks: list[str] = []
        call = self.source.call(template.function, template.tree)
        if definition.private and not template.opaque:
            lines += ["with rejecting():", f"    r = {call}"]
        elif template.opaque:
            guarded = [k for k in range(len(op.inputs)) if k not in definition.writes]
            tensors = "".join(f"{op.inputs[k]}, " for k in guarded)
            refs = "".join(f"{op.input_refs[k]}, " for k in guarded)
            wrote = self.source.constant(_wrote(definition, template, self.engine))
            lines += [
                f"refuse_failed({', '.join(op.inputs)})",
                "touched.clear()",
                f"before = versions({tensors})",
                "with user_code():",
                f"    r = {call}",
                f"if before != versions({tensors}): {wrote}(before, ({tensors}), ({refs}))",
            ]
            checks.append("touched")  # it ran a backward pass, and did not when it was learned
        else:
            lines.append(f"r = {call}")
        names: dict[int, str] = {}
        _unpack(definition.tree, "r", names, checks)
        stores, fresh = [], 0
        for k, keep in enumerate(definition.keeps):
            name, meta = names[k], definition.outputs[k]
            if keep >= 0:
                checks.append(f"{name} is not {op.inputs[keep]}")
                continue
            if keep <= -2:
                checks.append(f"{name} is not {names[-2 - keep]}")
                continue
            checks += self._differs(name, meta)
            checks += [f"{name} is {t}" for t in dict.fromkeys(op.inputs)]
            if template.opaque:
                checks.append(f"{name}.is_leaf is not {meta.is_leaf}")
            stores.append(f"{op.outputs[fresh]} = {name}")
            if meta.requires_grad and meta.is_leaf:
                stores.append(f"arm({name}, {op.output_refs[fresh]})")
            fresh += 1
        for k, meta in definition.after:
            checks += self._differs(op.inputs[k], meta)
            if meta.requires_grad and meta.is_leaf:
                stores.append(f"arm({op.inputs[k]}, {op.input_refs[k]})")
        if checks:
            wrong = self.source.constant(_Wrong(definition, template, self.engine.rank))
            lines += [
                "try:",
                "    bad = " + " or ".join(checks),
                "except (AttributeError, TypeError, IndexError, KeyError, RuntimeError):",
                "    bad = True",
                f"if bad: {wrong}(r)",
            ]
        return lines + stores

    def _differs(self, name: str, meta: TensorMeta) -> list[str]:
        constant = self.source.constant
        size, dtype = constant(_shape(meta.shape)), constant(dtype_named(meta.dtype))
        checks = [f"{name}.shape != {size}", f"{name}.dtype is not {dtype}"]
        if meta.layout == "strided":
            checks.append(f"{name}.stride() != {meta.stride!r}")
        checks.append(f"{name}.requires_grad is not {meta.requires_grad}")
        return checks


_shapes: dict[tuple[int, ...], torch.Size] = {}


def _shape(sizes: tuple[int, ...]) -> torch.Size:
    """One object for each, so that the code of a recording names it once."""
    return _shapes.setdefault(tuple(sizes), torch.Size(sizes))


def make_entry(definition: EntryDef, template: Template, engine: OpStream) -> Entry:
    inputs, numbers = template.definition.inputs, template.definition.numbers
    fresh = tuple(k for k, keep in enumerate(definition.keeps) if keep == -1)
    first = 1 + inputs + numbers
    refs = [f"code[i + {first + k}]" for k in range(len(fresh))]
    op = Names(
        inputs=[f"t{k}" for k in range(inputs)],
        numbers=[f"n{k}" for k in range(numbers)],
        input_refs=[f"code[i + {1 + k}]" for k in range(inputs)],
        outputs=[f"cells[{ref}]" for ref in refs],
        output_refs=refs,
    )
    writer = OpCode(engine)
    lines = [f"t{k} = cells[code[i + {1 + k}]]" for k in range(inputs)]
    lines += [f"n{k} = numbers[code[i + {1 + inputs + k}]]" for k in range(numbers)]
    lines += writer.lines(definition, template, op)
    width = first + len(fresh)
    lines.append(f"return i + {width}")
    run = compiled("op", "cells, code, i, numbers", lines, writer.names)
    return Entry(definition, template, run, fresh, width, bundles.key_of(definition, template))


def _versions(*inputs: Any) -> list[int]:
    return [version(t) for t in inputs]


def _wrote(definition: EntryDef, template: Template, engine: OpStream) -> Callable[..., None]:
    def wrote(before: list[int], tensors: tuple[Any, ...], refs: tuple[int, ...]) -> None:
        """Whether ranks hold equal values was told without it: what it wrote is not to be used any more."""
        error = PredictionError(
            f"{template.definition.function} wrote to an argument on rank {engine.rank}, and the same kind of call did "
            "not when it was learned or told: that argument is lost; write to it in every call, or in none",
            definition.entry,
        )
        engine.mark(
            [r for r, t, v in zip(refs, tensors, before, strict=True) if version(t) != v], describe_error(error)
        )
        raise error

    return wrote


def _unpack(tree: list, path: str, names: dict[int, str], checks: list[str]) -> None:
    match tree:
        case ["t", index]:
            names[index] = path
        case ["s", _, children]:
            checks.append(f"len({path}) != {len(children)}")
            for k, child in enumerate(children):
                _unpack(child, f"{path}[{k}]", names, checks)
        case ["d", keys, children]:
            for key, child in zip(keys, children, strict=True):
                _unpack(child, f"{path}[{key!r}]", names, checks)
        case ["o", index]:
            names[index] = f"{path}.key"
        case ["n"]:
            checks.append(f"{path} is not None")
        case ["c", _, children]:
            _unpack(["s", "tuple", children], path, names, checks)
        case ["p", _]:
            pass  # told by a propagator: the kernel has it
        case _:
            raise PredictionError(f"a result of this structure has no entry: {tree!r}", 0)


@dataclass(frozen=True, slots=True)
class _Wrong:
    """Raises what a prediction that was not met is."""

    definition: EntryDef
    template: Template
    rank: int

    def __call__(self, result: Any) -> None:
        _raise_wrong(self.definition, self.template, self.rank, result)


def _raise_wrong(definition: EntryDef, template: Template, rank: int, result: Any) -> None:
    def text(meta: TensorMeta) -> str:
        grad = (", a leaf that requires grad" if meta.is_leaf else ", requires_grad") if meta.requires_grad else ""
        return f"{tuple(meta.shape)} {meta.dtype} stride {tuple(meta.stride)}{grad}"

    got = ", ".join(text(describe(t)) for t in tensors_of(result)) or repr(result)[:100]
    told = ", ".join(text(m) for m in definition.outputs)
    raise PredictionError(
        f"{template.definition.function} gave {got} on rank {rank}, where the same kind of call gave {told} before; "
        "what was learned is dropped, so running the cell again is right",
        definition.entry,
    )
