"""Keeps the notebook's Out[...] and _ from holding worker memory for values that were only shown.

A mesh tensor that is the last expression of a cell has no name; left to IPython, Out[n], _ and _n would keep it on
the workers until the kernel ends. They get a note in its place, whose use is an error that says what to do.
"""

from __future__ import annotations

import sys
from typing import Any, NoReturn

TENSOR = "monarch_lab.controller.tensor"
_HOOKED = ("update_user_ns", "fill_exec_result")
_LOOK_INTO = (list, tuple, set, frozenset)
_MOST_ITEMS = 1000


class OnlyShown:
    """Stands in Out[...] for a value on the workers."""

    def __repr__(self) -> str:
        return "<a value on the workers that was only shown; give it a name to keep it>"

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"no {name!r}: this value on the workers was only shown; give it a name to keep it")


class ShownValues:
    """Between ``start`` and ``stop`` IPython's displayhook caches no mesh tensors."""

    def __init__(self, displayhook: Any) -> None:
        self._hook = displayhook

    def start(self) -> None:
        for name in _HOOKED:
            cache = getattr(self._hook, name)
            setattr(self._hook, name, lambda value, cache=cache: cache(OnlyShown() if on_workers(value) else value))

    def stop(self) -> None:
        for name in _HOOKED:
            vars(self._hook).pop(name, None)


def on_workers(value: object, depth: int = 3) -> bool:
    """Whether a value is a mesh tensor, or an ordinary container of some."""
    module = sys.modules.get(TENSOR)
    if module is None:
        return False
    if isinstance(value, module.MeshTensor):
        return True
    nn = sys.modules.get("torch.nn")
    if nn is not None and isinstance(value, nn.Module):
        return any(isinstance(parameter, module.MeshTensor) for parameter in value.parameters())
    if depth == 0 or not isinstance(value, (*_LOOK_INTO, dict)) or len(value) > _MOST_ITEMS:
        return False
    return any(on_workers(item, depth - 1) for item in (value.values() if isinstance(value, dict) else value))
