"""Integers that change from call to call and decide nothing about a result: sent beside the op, no part of its key.

Without it each minibatch ``x[i : i + 64]``, each row ``x[i]`` and each ``y * step`` would be a kind of call of its own,
and wait for the workers. Two sorts:

    positions   ints and slices of a basic index, the start of ``narrow``, the index of ``select``: what is left of a
                slice in the key is its length and step. One that is out of range stays in the key, so that the call
                is made at once and torch's own IndexError comes from the line.
    scalars     the number of an arithmetic function or a comparison. 0 and 1 stay in the key, as for floats; so does
                what a narrow integer dtype could not hold, which torch refuses.
"""

from __future__ import annotations

from typing import Any

import torch

from monarch_lab.tensors.meta import STRIDED

handle_classes: frozenset[type] = frozenset()  # set by tensor.py


class Mark:
    """A constant of keys that equals nothing else (``True == 1`` would join two kinds of call)."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return self.name


INT, SPAN = Mark("INT"), Mark("SPAN")


class Operand:
    """An int that is a number operand."""

    __slots__ = ("value",)

    def __init__(self, value: int) -> None:
        self.value = value


class Span:
    """A slice whose ends are number operands."""

    __slots__ = ("start", "stop", "length", "step")

    def __init__(self, start: int, length: int, step: int) -> None:
        self.start, self.length, self.step = start, length, step
        self.stop = start + max(0, (length - 1) * step + 1)


def _named(names: str, *places: Any) -> frozenset[Any]:
    return frozenset(getattr(place, name) for place in places for name in names.split() if hasattr(place, name))


_INDEXED = _named("__getitem__ __setitem__", torch.Tensor)
_SELECT = _named("select", torch, torch.Tensor)
_NARROW = _named("narrow", torch, torch.Tensor)
_POSITIONS = _INDEXED | _SELECT | _NARROW
SCALARS: frozenset[Any] = _named(
    "add add_ sub sub_ subtract subtract_ rsub mul mul_ multiply multiply_ div div_ divide divide_ true_divide "
    "true_divide_ eq ne lt le gt ge eq_ ne_ lt_ le_ gt_ ge_ clamp clamp_ clamp_min clamp_min_ clamp_max clamp_max_ "
    "masked_fill masked_fill_ fill_ full_like new_full where addcmul addcmul_ addcdiv addcdiv_ normal_ uniform_ "
    "floor_divide floor_divide_ remainder remainder_ fmod fmod_ "
    "__add__ __radd__ __iadd__ __sub__ __rsub__ __isub__ __mul__ __rmul__ __imul__ __truediv__ __rtruediv__ "
    "__itruediv__ __div__ __rdiv__ __idiv__ __floordiv__ "
    "__rfloordiv__ __ifloordiv__ __mod__ __rmod__ __imod__ __eq__ __ne__ __lt__ __le__ __gt__ __ge__",
    torch,
    torch.Tensor,
)
_WIDE = 1 << 53  # a float64 has those below it exactly
_NARROWEST = 127  # every integer dtype has it


def is_scalar(value: int, meta: Any) -> bool:
    """Whether an int beside a tensor of this metadata may be an operand."""
    return 1 < value <= _NARROWEST or (meta.takes_ints and -_WIDE < value < _WIDE and value not in (0, 1))


def split(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments, with Operand and Span in place of the ints that are no part of the key."""
    if func in _POSITIONS and args and type(args[0]) in handle_classes and args[0]._meta.layout is STRIDED:
        args = _placed(func, args)
    if func in SCALARS:
        meta = next((a._meta for a in args if type(a) in handle_classes), None)
        if meta is not None:
            args = tuple([_scalar(a, meta) for a in args])
            kwargs = {name: _scalar(a, meta) for name, a in kwargs.items()}
    return args, kwargs


def _scalar(value: Any, meta: Any) -> Any:
    return Operand(value) if type(value) is int and is_scalar(value, meta) else value


def _placed(func: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    shape = args[0]._meta.shape
    if func in _INDEXED:
        index = basic(shape, args[1])
        return (args[0], args[1] if index is None else index, *[_scalar(a, args[0]._meta) for a in args[2:]])
    if any(type(a) is not int for a in args[1:]) or not -len(shape) <= args[1] < len(shape):
        return args
    size = shape[args[1]]
    if func in _SELECT and len(args) == 3 and -size <= args[2] < size:
        return (*args[:2], Operand(args[2] % size))
    if func in _NARROW and len(args) == 4 and 0 <= args[2] <= args[2] + args[3] <= size:
        return (*args[:2], Operand(args[2]), args[3])
    return args


def basic(shape: torch.Size, index: Any) -> Any:
    """A basic index with operands in it; None where it is another kind, or out of range."""
    parts = index if type(index) is tuple else (index,)
    taking = sum(type(p) is int or type(p) is slice for p in parts)
    if not taking or taking > len(shape) or parts.count(Ellipsis) > 1:
        return None
    found: list[Any] = []
    dim = 0
    for part in parts:
        kind = type(part)
        if kind is int:
            if not -shape[dim] <= part < shape[dim]:
                return None
            found.append(Operand(part % shape[dim]))
            dim += 1
        elif kind is slice:
            whole = _span(part, shape[dim])
            if whole is None:
                return None
            found.append(whole)
            dim += 1
        elif part is Ellipsis:
            dim += len(shape) - taking
            found.append(part)
        elif part is None:
            found.append(part)
        else:
            return None
    return tuple(found) if type(index) is tuple else found[0]


def _span(part: slice, size: int) -> Any:
    ends = (part.start, part.stop, part.step)
    if any(x is not None and type(x) is not int for x in ends):
        return None
    step = 1 if part.step is None else part.step
    if step < 1:
        return None
    start, stop, _ = part.indices(size)
    length = len(range(start, stop, step))
    if not length or (length == size and step == 1):
        return part  # nothing or all of it, wherever it begins
    return Span(start, length, step)
