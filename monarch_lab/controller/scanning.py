"""The arguments of a call, taken apart: mesh tensors, number operands, and a key of all that is left.

The same walk, with ``build``, gives the CallTree that is sent to the workers once for each kind of call.
"""

from __future__ import annotations

import enum
import itertools
import types
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_leaves

from monarch_lab.controller import operands
from monarch_lab.controller.operands import INT, SPAN, Mark, Operand, Span
from monarch_lab.controller.state import active_mesh, active_stream, recorder
from monarch_lab.controller.tape import Traced
from monarch_lab.errors import InternalError, UsageTypeError
from monarch_lab.tensors import payload
from monarch_lab.tensors.naming import name_of
from monarch_lab.tensors.template import Built, CallTree, Input, Number

TRUE, FALSE, FLOAT, FLOAT_0, FLOAT_1, COMPLEX = map(Mark, ("TRUE", "FALSE", "FLOAT", "FLOAT_0", "FLOAT_1", "COMPLEX"))
LOCAL_0_DIM, NAMED, SLICE, DICT, KEYED_FLOAT, KEYWORD, BIG_INT, AROUND = map(
    Mark, ("LOCAL_0_DIM", "NAMED", "SLICE", "DICT", "KEYED_FLOAT", "KEYWORD", "BIG_INT", "AROUND")
)
# 0 and 1 are kinds of their own: dropout(p=0.0) and the like return their input itself.
FLOATS = {0.0: FLOAT_0, 1.0: FLOAT_1}
PLAIN = {int, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format, type(Ellipsis)}
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodDescriptorType, type)
# Their floats decide a shape.
KEYED_FLOATS: set[Any] = {
    torch.arange,
    torch.range,
    torch.linspace,
    torch.logspace,
    torch.nn.functional.interpolate,
    torch.nn.functional.upsample,
    torch.nn.functional.upsample_bilinear,
    torch.nn.functional.upsample_nearest,
    torch.nn.functional.fractional_max_pool2d,
    torch.nn.functional.fractional_max_pool3d,
    torch.nn.functional.fractional_max_pool2d_with_indices,
    torch.nn.functional.fractional_max_pool3d_with_indices,
    torch.nn.functional._fractional_max_pool2d,
    torch.nn.functional._fractional_max_pool3d,
}

# Set by tensor.py and constants.py, which need this module in turn.
handle_class: type = torch.Tensor
handle_classes: frozenset[type] = frozenset()
constant_class: type = torch.Tensor


def resolve_constants(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[bool, Any]:
    raise InternalError("constants.resolve was not put here")


@dataclass(slots=True)
class Call:
    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    key: tuple[Any, ...]
    tensors: list[Any]
    numbers: list[Any]
    ambient: int
    mesh: Any
    hashable: bool = True
    result_is_known: bool = False
    result: Any = None
    packed: dict[int, Any] = field(default_factory=dict)  # objects around mesh tensors, see Walk.around


@dataclass(slots=True)
class Walk:
    func: Any
    build: bool = False
    key: list[Any] = field(default_factory=list)
    tensors: list[Any] = field(default_factory=list)
    numbers: list[Any] = field(default_factory=list)
    hashable: bool = True
    keyed_floats: bool = False
    packed: dict[int, Any] = field(default_factory=dict)

    def value(self, a: Any) -> Any:
        """Adds ``a`` to the key; returns its place in the tree where one is built."""
        kind = type(a)
        if kind in handle_classes:
            self.tensors.append(a)
            self.key.append(a._meta)
            return Input(len(self.tensors) - 1)
        if kind is float:
            return self._float(a)
        if kind is bool:
            self.key.append(TRUE if a else FALSE)
            return a
        if kind is int and not -(1 << 63) <= a < 1 << 63:
            self.key.append((BIG_INT, a))
            return a
        if kind in PLAIN:
            self.key.append(a)
            return a
        if kind is tuple or kind is list or kind is torch.Size:
            self.key.append((kind, len(a)))
            parts = [self.value(x) for x in a]
            return kind(parts) if kind is list else tuple(parts)
        return self._rarer(a, kind)

    def _float(self, a: float) -> Any:
        if self.keyed_floats:
            self.key.append((KEYED_FLOAT, a))
            return a
        self.numbers.append(a)
        self.key.append(FLOATS.get(a, FLOAT))
        return Number(len(self.numbers) - 1)

    def _rarer(self, a: Any, kind: type) -> Any:
        if kind is slice:
            self.key.append(SLICE)
            return slice(self.value(a.start), self.value(a.stop), self.value(a.step))
        if kind is Operand:
            self.numbers.append(a.value)
            self.key.append(INT)
            return Number(len(self.numbers) - 1)
        if kind is Span:
            self.numbers += (a.start, a.stop)
            self.key.append((SPAN, a.length, a.step))
            return slice(Number(len(self.numbers) - 2), Number(len(self.numbers) - 1), a.step)
        if kind is dict:
            self.key.append((DICT, tuple(a)))
            return {k: self.value(v) for k, v in a.items()}
        if kind is complex:
            self.key.append((COMPLEX, a))
            return a
        if kind is Traced:
            return self._traced(a)
        if isinstance(a, torch.Tensor):
            return self._tensor(a)
        if isinstance(a, np.generic):
            return self.value(a.item())
        if isinstance(a, np.ndarray):
            from monarch_lab.controller.messages import local_value

            raise local_value(self.func, a)
        if isinstance(a, torch.Generator):
            from monarch_lab.controller.messages import generator

            raise generator(self.func)
        if isinstance(a, tuple) and kind.__module__ == "torch.return_types":  # out= of torch.sort and the like
            self.key.append((tuple, len(a)))
            return tuple([self.value(x) for x in a])
        if isinstance(a, tuple) and hasattr(a, "_fields"):
            self.key.append((kind, len(a)))
            return kind(*[self.value(x) for x in a])
        return self._object(a, kind)

    def _object(self, a: Any, kind: type) -> Any:
        stand_in = getattr(kind, "for_workers", None)
        if stand_in is not None:  # a process group, an OpaqueRef: see controller/arguments.py
            return stand_in(a, self)
        if isinstance(a, enum.Enum) or kind in (range, bytes, np.dtype):
            self.key.append((kind, a))
        elif isinstance(a, _FUNCTIONS) and name_of(a) is not None:
            self.key.append((NAMED, a))
        else:
            # Anything else may change without its identity changing: never believed again.
            self.hashable = False
            if holds_mesh_tensors(a):
                return self._around(a)
        return a

    def _traced(self, a: Traced) -> Any:
        """A number that a replay of a recording computes anew."""
        if self.keyed_floats or a.value in FLOATS:
            return self._float(a.plain())
        a.tape.guard(f"{a.name} not in (0.0, 1.0)")
        self.numbers.append(a)
        self.key.append(FLOAT)
        return Number(len(self.numbers) - 1)

    def _around(self, a: Any) -> Any:
        """An object is sent by value, the mesh tensors in it as inputs: it is built around them on the worker."""
        if isinstance(a, torch.optim.Optimizer):
            raise UsageTypeError(
                "an optimizer given to a remote function would step a copy, and its state be lost: make it on the "
                "workers and keep it there with ml.OpaqueRef"
            )
        if id(a) not in self.packed:
            self.packed[id(a)] = payload.dumps_around(a)
        frames, tensors, _ = self.packed[id(a)]
        self.key.append((AROUND, len(tensors)))
        return Built("monarch_lab.tensors.payload.loads_around", (frames, [self.around(t) for t in tensors]))

    def around(self, tensor: Any) -> Any:
        """The input that stands for a mesh tensor held by an argument; one that is a constant is sent as a tensor."""
        if isinstance(tensor, constant_class):
            from monarch_lab.controller.constants import materialise

            materialise(tensor)
        return self.value(tensor)

    def _tensor(self, a: torch.Tensor) -> Any:
        if isinstance(a, constant_class):
            value: torch.Tensor = a._value  # type: ignore[attr-defined]
            if (noted := recorder.get()) is not None and type(item := noted.operand(a)) is Traced:
                self.key.append((LOCAL_0_DIM, value.dtype))
                self.numbers.append(item)
                return Number(len(self.numbers) - 1, value.dtype)
        elif a.dim() == 0 and not a.requires_grad and a.device.type != "meta":
            value = a
        else:
            from monarch_lab.controller.messages import local_value

            raise local_value(self.func, a)
        number = value.item()
        if isinstance(number, complex):
            self.key.append((LOCAL_0_DIM, a.dtype, number))
            return torch.tensor(number, dtype=value.dtype)
        if isinstance(number, int) and not -(1 << 63) <= number < 1 << 63:
            self.key.append((LOCAL_0_DIM, a.dtype, number))
            return torch.tensor(number, dtype=value.dtype)
        self.key.append((LOCAL_0_DIM, value.dtype))
        self.numbers.append(int(number) if isinstance(number, bool) else number)
        return Number(len(self.numbers) - 1, value.dtype)


def mesh_tensors_in(a: Any) -> Iterator[Any]:
    """The mesh tensors that an argument holds: a module's parameters and buffers, the attributes of any object."""
    if isinstance(a, torch.nn.Module):
        found: Iterable[Any] = itertools.chain(a.parameters(), a.buffers())
    else:
        found = tree_leaves((dict(a) if isinstance(a, Mapping) else None, getattr(a, "__dict__", None)))
    return (t for t in found if getattr(type(t), "is_mesh_tensor", False))


def holds_mesh_tensors(a: Any) -> bool:
    return not isinstance(a, (type, *_FUNCTIONS)) and next(mesh_tensors_in(a), None) is not None


def _walk(walk: Walk, args: Iterable[Any], kwargs: dict[str, Any]) -> CallTree | None:
    walk.keyed_floats = walk.func in KEYED_FLOATS
    tree_args = tuple([walk.value(a) for a in args])
    tree_kwargs = {}
    for name, a in kwargs.items():
        walk.key.append((KEYWORD, name))
        tree_kwargs[name] = walk.value(a)
    return CallTree(tree_args, tree_kwargs) if walk.build else None


def scan(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], ambient: int) -> Call:
    """Takes the arguments apart. Raises the usage error that names an argument that cannot be used."""
    known, result = resolve_constants(func, args, kwargs)
    args, kwargs = operands.split(func, args, kwargs)
    walk = Walk(func, key=[func, ambient])
    if known:
        return Call(func, args, kwargs, (), [], [], ambient, None, result_is_known=True, result=result)
    _walk(walk, args, kwargs)
    mesh = walk.tensors[0]._ref.mesh if walk.tensors else active_mesh.get()
    if mesh is None:
        from monarch_lab.controller.messages import no_mesh

        raise no_mesh(func)
    if not walk.tensors:
        mesh = mesh.on(active_stream.get())
    key = tuple(walk.key)
    return Call(func, args, kwargs, key, walk.tensors, walk.numbers, ambient, mesh, walk.hashable, packed=walk.packed)


def tree_of(call: Call) -> CallTree:
    walk = Walk(call.func, build=True, packed=call.packed)
    tree = _walk(walk, call.args, call.kwargs)
    assert tree is not None and len(walk.tensors) == len(call.tensors)
    return tree
