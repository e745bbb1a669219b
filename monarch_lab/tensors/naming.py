"""Functions to names and back.

A name is a dotted path that gives the very same object in another interpreter with the same torch, a getter or
setter of a tensor's attribute (``get:T``), an operator of torch.ops (``op:aten::add.Tensor``), a user's function by
its path (``user:package.module.function``), or ``payload:N``, a function that was sent by value.
"""

from __future__ import annotations

import functools
import importlib
import sys
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional
import torch.nn.init

from monarch_lab.errors import ProtocolError

# Where torch's own functions are looked for, the public place first.
_PLACES = (
    "torch.Tensor",
    "torch",
    "torch.nn.functional",
    "torch.linalg",
    "torch.special",
    "torch.fft",
    "torch.sparse",
    "torch.nested",
    "torch.nn.init",
    "torch.functional",
    "torch.autograd",
    "torch._C._nn",
    "torch._C._linalg",
    "torch._C._special",
    "torch._C._fft",
    "torch._C._sparse",
    "torch._C._nested",
    "torch._C._VariableFunctions",
    "torch._C",
)


def _walk(path: str) -> Any:
    """The object at a dotted path, importing what is a module. AttributeError or ImportError where there is none."""
    parts = path.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for part in parts[cut:]:
            found = getattr(found, part)
        return found
    raise ImportError(path)


def _same(path: str, function: Any) -> bool:
    try:
        found = _walk(path)
    except (ImportError, AttributeError):
        return False
    return found is function or (isinstance(function, types.MethodWrapperType) and found == function)


def name_of(function: Any) -> str | None:
    """A name that :func:`resolve` turns back into ``function``, or None where it must travel by value."""
    owner = getattr(function, "__self__", None)
    name = getattr(function, "__name__", None)
    if isinstance(function, types.MethodWrapperType) and name in ("__get__", "__set__"):
        attribute = getattr(owner, "__name__", None)
        return f"{name[2:5]}:{attribute}" if attribute is not None else None
    if isinstance(function, torch._ops.OpOverload):
        return f"op:{function._schema.name}.{function._overloadname}"
    if isinstance(function, torch._ops.OpOverloadPacket):
        return f"op:{function._qualified_op_name}"
    if not isinstance(name, str):
        return None
    for place in _PLACES:
        if _same(f"{place}.{name}", function):
            return f"{place}.{name}"
    if function in _operators():  # Tensor.__pow__ calls itself pow
        return f"torch.Tensor.{_operators()[function]}"
    module, qualified = getattr(function, "__module__", None), getattr(function, "__qualname__", "")
    if module and module != "__main__" and "<" not in qualified and _importable(module):
        path = f"{module}.{qualified}"
        if _same(path, function):
            return path
    return None


@functools.cache
def _operators() -> dict[Any, str]:
    return {
        getattr(torch.Tensor, n): n
        for n in dir(torch.Tensor)
        if n.startswith("__") and n.endswith("__") and isinstance(getattr(torch.Tensor, n), types.FunctionType)
    }


def _importable(module: str) -> bool:
    """Whether another interpreter can import it too: a module made by hand, or by a test runner, has no such file."""
    found = sys.modules.get(module)
    spec = getattr(found, "__spec__", None)
    return spec is not None and spec.origin is not None and module.partition(".")[0] in ("torch", "monarch_lab")


def resolve(name: str, payloads: dict[int, Any]) -> Callable[..., Any]:
    """The function of a name. Raises ProtocolError for a name that is none."""
    kind, colon, rest = name.partition(":")
    try:
        if not colon:
            return _walk(name)
        if kind == "payload":
            return payloads[int(rest)]
        if kind == "user":
            return _walk(rest)
        if kind == "op":
            space, _, rest = rest.partition("::")
            packet, _, overload = rest.partition(".")
            found = getattr(getattr(torch.ops, space), packet)
            return getattr(found, overload) if overload else found
        if kind == "get":
            return getattr(torch.Tensor, rest).__get__
        if kind == "set":
            return getattr(torch.Tensor, rest).__set__
    except (ImportError, AttributeError, KeyError, ValueError) as e:
        raise ProtocolError(f"{name!r} names no function here: {e}") from None
    raise ProtocolError(f"{name!r} names no function")


_SIGNS = {
    "add": "+", "radd": "+", "iadd": "+=", "sub": "-", "rsub": "-", "isub": "-=", "mul": "*", "rmul": "*",
    "imul": "*=", "truediv": "/", "rtruediv": "/", "itruediv": "/=", "floordiv": "//", "mod": "%", "pow": "**",
    "rpow": "**", "matmul": "@", "rmatmul": "@", "and": "&", "or": "|", "xor": "^", "eq": "==", "ne": "!=",
    "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "getitem": "t[...]", "setitem": "t[...] =",
}  # fmt: skip


def shown(function: Any) -> str:
    """How a function is called in messages: ``torch.cat``, ``Tensor.sum``, ``+``, ``my_function``."""
    name = getattr(function, "shown", None) or name_of(function)
    if name is None or name.startswith("payload:"):
        return getattr(function, "__name__", repr(function))
    if name.startswith("torch.Tensor."):
        method = name.removeprefix("torch.Tensor.")
        sign = _SIGNS.get(method.strip("_")) if method.startswith("__") else None
        return f"Tensor.{method}" if sign is None else f'"{sign}"'
    return name.removeprefix("get:")
