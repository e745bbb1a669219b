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
from monarch_lab.tensors.template import CallTree, Source
from monarch_lab.wire.engine import EntryDef, TemplateDef, TensorMeta
from monarch_lab.worker.failures import DependentOnError, Failed, PredictionError
from monarch_lab.worker.failures import describe as describe_error
from monarch_lab.worker.learning import Rejecting, version

if TYPE_CHECKING:
    from monarch_lab.worker.engine import Engine

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

    def output_refs(self, code: list[int], i: int) -> list[int]:
        return code[i + self.width - len(self.fresh) : i + self.width]

    def input_refs(self, code: list[int], i: int) -> list[int]:
        return code[i + 1 : i + 1 + self.template.definition.inputs]


def _compile(name: str, lines: list[str], namespace: dict[str, Any]) -> Callable[..., Any]:
    exec(compile("\n".join(lines), "<monarch_lab call>", "exec"), namespace)
    return namespace[name]


def make_template(definition: TemplateDef, function: Callable[..., Any], tree: CallTree) -> Template:
    source = Source()
    expression = source.call(function, tree)
    lines = ["def invoke(inputs, numbers):"]
    if definition.inputs:
        lines.append("    " + "".join(f"t{k}, " for k in range(definition.inputs)) + "= inputs")
    if definition.numbers:
        lines.append("    " + "".join(f"n{k}, " for k in range(definition.numbers)) + "= numbers")
    lines.append(f"    return {expression}")
    opaque = definition.function.startswith("payload:") or definition.function.startswith("user:")
    return Template(definition, function, tree, _compile("invoke", lines, dict(source.names)), opaque)


def refuse_failed(*inputs: Any) -> None:
    for value in inputs:
        if type(value) is Failed:
            raise DependentOnError(value.failure)


def make_entry(definition: EntryDef, template: Template, engine: Engine) -> Entry:
    source = Source()
    rank, arm = engine.rank, engine.arm
    inputs, numbers = template.definition.inputs, template.definition.numbers
    lines = ["def op(cells, code, i, numbers):"]
    for k in range(inputs):
        lines.append(f"    t{k} = cells[code[i + {1 + k}]]")
    for k in range(numbers):
        lines.append(f"    n{k} = numbers[code[i + {1 + inputs + k}]]")
    call = source.call(template.function, template.tree)
    checks: list[str] = []
    if definition.private and not template.opaque:
        source.names["rejecting"] = Rejecting
        lines.append("    with rejecting():")
        lines.append(f"        r = {call}")
    elif template.opaque:
        source.names |= {"refuse_failed": refuse_failed, "user_code": engine.user_code, "touched": engine.touched}
        lines.append(f"    refuse_failed({', '.join(f't{k}' for k in range(inputs))})")
        lines.append("    touched.clear()")
        guarded = [k for k in range(inputs) if k not in definition.writes]
        tensors, refs = ("".join(f"{n}, " for n in row) for row in _rows(guarded))
        source.names |= {"versions": _versions, "wrote": _wrote(definition, template, engine)}
        lines.append(f"    before = versions({tensors})")
        lines.append("    with user_code():")
        lines.append(f"        r = {call}")
        lines.append(f"    if before != versions({tensors}): wrote(before, ({tensors}), ({refs}))")
        checks.append("touched")  # it ran a backward pass, and did not when it was learned
    else:
        lines.append(f"    r = {call}")
    names: dict[int, str] = {}
    _unpack(definition.tree, "r", names, checks)
    fresh, position, stores = [], 1 + inputs + numbers, []
    for k, keep in enumerate(definition.keeps):
        name = names[k]
        if keep == -1:
            checks += _differs(name, definition.outputs[k], source)
            checks += [f"{name} is t{j}" for j in range(inputs)]
            if template.opaque:
                checks.append(f"{name}.is_leaf is not {definition.outputs[k].is_leaf}")
            stores.append(f"    cells[code[i + {position}]] = {name}")
            if definition.outputs[k].requires_grad and definition.outputs[k].is_leaf:
                source.names["arm"] = arm
                stores.append(f"    arm({name}, code[i + {position}])")
            fresh.append(k)
            position += 1
        elif keep >= 0:
            checks.append(f"{name} is not t{keep}")
        else:
            checks.append(f"{name} is not {names[-2 - keep]}")
    for k, meta in definition.after:
        checks += _differs(f"t{k}", meta, source)
        if meta.requires_grad and meta.is_leaf:
            source.names["arm"] = arm
            stores.append(f"    arm(t{k}, code[i + {1 + k}])")
    source.names["wrong"] = lambda result: _wrong(definition, template, rank, result)
    if checks:
        lines.append("    try:")
        lines.append("        bad = " + " or ".join(checks))
        lines.append("    except (AttributeError, TypeError, IndexError, KeyError, RuntimeError):")
        lines.append("        bad = True")
        lines.append("    if bad: wrong(r)")
    lines += stores
    lines.append(f"    return i + {position}")
    return Entry(definition, template, _compile("op", lines, source.names), tuple(fresh), position)


def _rows(inputs: list[int]) -> tuple[list[str], list[str]]:
    return [f"t{k}" for k in inputs], [f"code[i + {1 + k}]" for k in inputs]


def _versions(*inputs: Any) -> list[int]:
    return [version(t) for t in inputs]


def _wrote(definition: EntryDef, template: Template, engine: Engine) -> Callable[..., None]:
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


def _differs(name: str, meta: TensorMeta, source: Source) -> list[str]:
    size, dtype = source.constant(torch.Size(meta.shape)), source.constant(dtype_named(meta.dtype))
    checks = [f"{name}.shape != {size}", f"{name}.dtype is not {dtype}"]
    if meta.layout == "strided":
        checks.append(f"{name}.stride() != {meta.stride!r}")
    checks.append(f"{name}.requires_grad is not {meta.requires_grad}")
    return checks


def _wrong(definition: EntryDef, template: Template, rank: int, result: Any) -> None:
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
