"""Completion and inspection in the namespace of ``%%spmd`` cells.

Runs no code of the user's: attributes are read without descriptors, so that neither a property that waits for other
ranks nor one that changes something is called. Runs on: a thread for each question, while the main thread computes.
"""

from __future__ import annotations

import builtins
import inspect
import keyword
import reprlib
import threading
import types
from collections.abc import Callable
from typing import Any

import torch

from monarch_lab.wire.engine import LookedUp, LookUp

_MOST_NAMES = 2_000
_SIZED = (str, bytes, list, tuple, dict, set, frozenset)
_PLAIN = (int, float, complex, bool, type(None), *_SIZED)
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 200
_MISSING = object()


def answer(asked: LookUp, namespace: Callable[[], dict[str, Any]], report: Callable[[Any], None]) -> None:
    """Report a LookedUp, from a thread of its own. Called on the reader thread."""

    def look() -> None:
        try:
            told = _looked_up(asked, namespace())
        except Exception:  # whatever it is of the user's that cannot be looked at
            told = LookedUp(asked.ident, False)
        report(told)

    threading.Thread(target=look, name="look", daemon=True).start()


def _looked_up(asked: LookUp, namespace: dict[str, Any]) -> LookedUp:
    if not asked.path:
        return LookedUp(asked.ident, True, _starting(asked.prefix or "", _all_names(namespace)))
    value = resolve(namespace, asked.path)
    if value is _MISSING:
        return LookedUp(asked.ident, False)
    if asked.prefix is None:
        return LookedUp(asked.ident, True, text=described(value))
    members = {name: _kind(attribute(value, name)) for name in dir(value)}
    return LookedUp(asked.ident, True, _starting(asked.prefix, members))


def _all_names(namespace: dict[str, Any]) -> dict[str, str]:
    names = dict.fromkeys(keyword.kwlist, "keyword")
    names.update((name, _kind(value)) for name, value in vars(builtins).items())
    names.update((name, _kind(value)) for name, value in namespace.copy().items())
    return names


def _starting(prefix: str, names: dict[str, str]) -> list[tuple[str, str]]:
    # As in IPython, names that begin with "_" are for who types it.
    found = [(n, k) for n, k in names.items() if n.startswith(prefix) and (prefix or not n.startswith("_"))]
    return sorted(found)[:_MOST_NAMES]


def resolve(namespace: dict[str, Any], path: str) -> Any:
    first, *rest = path.split(".")
    value = namespace.get(first, vars(builtins).get(first, _MISSING))
    for name in rest:
        if value is _MISSING:
            return value
        value = attribute(value, name)
    return value


def attribute(value: Any, name: str) -> Any:
    """Without running code; what a property or ``__getattr__`` would give is missing, but for parts of a module."""
    if isinstance(value, torch.nn.Module):
        for table in ("_modules", "_parameters", "_buffers"):
            held = vars(value).get(table, {})
            if name in held:
                return held[name]
    found = inspect.getattr_static(value, name, _MISSING)
    if isinstance(found, staticmethod | classmethod):
        return found.__func__
    if isinstance(found, property) or (hasattr(type(found), "__set__") and not isinstance(found, types.FunctionType)):
        return _MISSING  # a descriptor: it would run, or is of C
    return found


def _kind(value: Any) -> str:
    if isinstance(value, types.ModuleType):
        return "module"
    if isinstance(value, type):
        return "class"
    return "function" if callable(value) and not isinstance(value, torch.nn.Module) else "instance"


def described(value: Any) -> str:
    """As IPython's ``name?``: type, value, signature, documentation."""
    lines = [f"Type:        {type(value).__name__}"]
    if isinstance(value, torch.Tensor):
        lines.append(f"Shape:       {tuple(value.shape)}, {str(value.dtype).removeprefix('torch.')}, {value.device}")
    elif isinstance(value, _PLAIN):
        lines.append(f"String form: {_SHORT.repr(value)}")
    if isinstance(value, _SIZED):
        lines.append(f"Length:      {len(value)}")
    if inspect.isroutine(value) or isinstance(value, type):
        try:
            lines.insert(0, f"Signature:   {value.__name__}{inspect.signature(value)}")
        except (ValueError, TypeError):
            pass
    documentation = inspect.getdoc(value) if not isinstance(value, _PLAIN) else None
    if documentation:
        lines += ["Docstring:", documentation]
    return "\n".join(lines)
