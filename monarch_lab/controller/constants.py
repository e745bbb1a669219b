"""0-dim tensors made from Python numbers: known here, and not sent until a worker needs them as a tensor.

Optimizers count their steps in such tensors and read them with ``.item()`` at each step; kept here, that costs no
message and no wait. As an operand beside a mesh tensor one travels as a number with its dtype.
"""

from __future__ import annotations

from typing import Any

import torch
from msgspec.structs import replace

from monarch_lab.controller import dispatch, scanning, state
from monarch_lab.controller.refs import Ref
from monarch_lab.tensors.meta import describe, intern

_plain = torch._C.DisableTorchFunctionSubclass
_BINARY = ("add", "sub", "mul", "div", "true_divide", "floor_divide", "remainder", "pow", "maximum", "minimum")
_UNARY = ("neg", "abs", "sqrt", "exp", "log", "square", "reciprocal", "sign", "floor", "ceil", "round")
_COMPARE = ("eq", "ne", "lt", "le", "gt", "ge")
_OPERATORS = (
    "add sub mul truediv floordiv mod pow radd rsub rmul rtruediv rpow neg abs eq ne lt le gt ge "
    "iadd isub imul itruediv"
).split()
_IN_PLACE = ("add_", "sub_", "mul_", "div_", "copy_", "fill_", "zero_", "pow_", "clamp_", "sqrt_", "neg_")


def _functions() -> tuple[set[Any], set[Any], set[Any]]:
    """(computed here among constants, of these in place, taking a constant as a number)"""
    local: set[Any] = set()
    in_place: set[Any] = set()
    for name in (*_BINARY, *_UNARY, *_COMPARE, "clone", "to", "float", "double", "clamp", "type_as"):
        for place in (torch, torch.Tensor):
            if hasattr(place, name):
                local.add(getattr(place, name))
    for name in _OPERATORS:
        (in_place if name.startswith("i") else local).add(getattr(torch.Tensor, f"__{name}__"))
    for name in _IN_PLACE:
        in_place.add(getattr(torch.Tensor, name))
    operands = {getattr(p, n) for p in (torch, torch.Tensor) for n in (*_BINARY, *_COMPARE) if hasattr(p, n)}
    operands |= {getattr(torch.Tensor, f"__{n}__") for n in _OPERATORS}
    operands |= {getattr(torch.Tensor, n + "_") for n in _BINARY if hasattr(torch.Tensor, n + "_")}
    return local | in_place, in_place, operands


_LOCAL, _LOCAL_IN_PLACE, _OPERANDS = _functions()


def make(value: torch.Tensor, mesh: Any) -> Any:
    """A constant on ``mesh`` with the value of a local 0-dim tensor that does not require grad."""
    handle = dispatch.make_handle(intern(describe(value)), Ref(next(mesh.client.refs), mesh, mesh.all_equal))
    handle.__class__ = scanning.constant_class
    handle._value = value
    if (recorder := state.recorder.get()) is not None:
        recorder.made(handle)
    return handle


def materialise(constant: Any) -> None:
    """Send it: from now on it is a mesh tensor as any other."""
    from monarch_lab.controller.placing import place

    if (recorder := state.recorder.get()) is not None:
        recorder.check_materialise(constant)
    if constant._ref.mesh.lost_ranks:  # its value is known here: nothing of it was lost
        now = constant._ref.mesh.now
        constant._ref = Ref(next(now.client.refs), now, now.all_equal)
    value = constant._value
    del constant._value
    constant.__class__ = scanning.handle_class
    mesh = constant._ref.mesh
    told = describe(value)
    constant._meta = intern(replace(told, device=mesh.torch_device or told.device))
    place(mesh, {rank: [value] for rank in mesh.ranks_key}, [constant._ref.id])


def resolve(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[bool, Any]:
    """(True, result) where the call is among constants alone; otherwise those that cannot go as numbers are sent."""
    kind = scanning.constant_class
    flat = [*args, *kwargs.values()]
    constants = [a for a in flat if isinstance(a, kind)]
    if not constants:
        for a in flat:
            if isinstance(a, (tuple, list, dict)):
                _materialise_within(a)
        return False, None
    others = any(isinstance(a, torch.Tensor) and not isinstance(a, kind) and a.dim() > 0 for a in flat)
    mesh_tensors = any(type(a) in scanning.handle_classes for a in flat)
    if func in _LOCAL and not others and not mesh_tensors:
        return _computed(func, args, kwargs, constants[0])
    for k, a in enumerate(flat):
        if isinstance(a, kind):
            is_target = k == 0 and _is_in_place(getattr(func, "__name__", ""))
            if func not in _OPERANDS or not mesh_tensors or is_target or "out" in kwargs:
                materialise(a)
        elif isinstance(a, (tuple, list, dict)):
            _materialise_within(a)
    return False, None


def _is_in_place(name: str) -> bool:
    return name.startswith("__i") or (name.endswith("_") and not name.endswith("__"))


def may_write(func: Any, kwargs: dict[str, Any]) -> bool:
    """Whether a call's name says that it writes to an input."""
    name = getattr(func, "__name__", "")
    return _is_in_place(name) or name in ("__setitem__", "__set__") or "out" in kwargs


def _computed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], first: Any) -> tuple[bool, Any]:
    if (recorder := state.recorder.get()) is not None and not recorder.tape.is_closed:
        target = args[0] if func in _LOCAL_IN_PLACE else None
        return recorder.compute(func, args, kwargs, target, lambda a, k: _run(func, tuple(a), k, first))
    return _run(func, args, kwargs, first)


def _run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], first: Any) -> tuple[bool, Any]:
    kind = scanning.constant_class

    def value(a: Any) -> Any:
        return a._value if isinstance(a, kind) else a  # type: ignore[attr-defined]

    with _plain():
        result = func(*map(value, args), **{k: value(v) for k, v in kwargs.items()})
    if result is NotImplemented:
        return True, result
    if func in _LOCAL_IN_PLACE:
        return True, args[0]
    for a in args:
        if isinstance(a, kind) and result is a._value:  # type: ignore[attr-defined]
            return True, a
    return True, make(result.detach(), first._ref.mesh)


def _materialise_within(value: Any) -> None:
    if isinstance(value, scanning.constant_class):
        materialise(value)
    elif isinstance(value, (tuple, list)):
        for v in value:
            _materialise_within(v)
    elif isinstance(value, dict):
        for v in value.values():
            _materialise_within(v)
