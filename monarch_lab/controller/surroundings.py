"""What a recorded function can see: its arguments, and what its free names mean.

Taken apart at each call into tensors, which are the inputs of a replay, and a key of all else: plain values, whether
modules train, which tensors they hold. A recording is used where the key is the same, so that another value of a
global, or a model in evaluation, is another recording. Attributes of objects of libraries are not looked at.
"""

from __future__ import annotations

import dis
import sys
import types
import weakref
from collections.abc import Callable
from typing import Any

import torch

from monarch_lab.controller import dispatch
from monarch_lab.controller.remote_functions import RemoteFunction, fingerprint

_PLAIN = frozenset((int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.device, torch.Size, range))
_LIMIT = 20_000  # things looked at; beyond, objects count by identity alone
_DEPTH = 6
_LIBRARIES = frozenset((*sys.stdlib_module_names, "torch", "numpy", "IPython", "ipykernel", "monarch_lab"))
_QUIET = frozenset(("_parameters", "_buffers", "_modules", "training"))


class View:
    """``tensors``: mesh tensors in the order of their places, each once, the first ``explicit`` of them arguments.
    ``key``: hashable. ``anchors``: objects that are in the key by their identity. ``schedulers``: with their epochs."""

    def __init__(self) -> None:
        self.tensors: list[Any] = []
        self.key: list[Any] = []
        self.anchors: list[Any] = []
        self.explicit = 0
        self.schedulers: list[tuple[Any, Any]] = []
        self._places: dict[int, int] = {}
        self._seen: set[int] = set()
        self._count = 0

    def add(self, value: Any, depth: int = 0) -> None:
        kind = type(value)
        self._count += 1
        if kind in _PLAIN:
            self.key.append((kind, value))
        elif kind in dispatch.all_classes:
            self._tensor(value)
        elif depth > _DEPTH or self._count > _LIMIT:
            self._by_identity(value)
        elif kind is tuple or kind is list:
            self.key.append((kind, len(value)))
            for v in value:
                self.add(v, depth + 1)
        elif kind is dict:
            self.key.append((dict, len(value)))
            for k, v in value.items():
                self.key.append(k if type(k) in _PLAIN else id(k))
                self.add(v, depth + 1)
        elif id(value) in self._seen:
            self._by_identity(value)
        else:
            self._seen.add(id(value))
            self._object(value, kind, depth)

    def _tensor(self, value: Any) -> None:
        place = self._places.get(id(value))
        if place is None:
            place = self._places[id(value)] = len(self.tensors)
            self.tensors.append(value)
            self.key.append((value._meta, hasattr(value, "_value")))
        self.key.append(place)

    def _by_identity(self, value: Any) -> None:
        self.key.append(id(value))
        self.anchors.append(value)

    def _object(self, value: Any, kind: type, depth: int) -> None:
        if isinstance(value, torch.nn.Module):
            self._module(value, depth)
        elif kind is types.FunctionType:
            self.key.append(value.__code__)
            if value.__module__ is None or value.__module__.partition(".")[0] not in _LIBRARIES:
                self.function(value, depth + 1)
            else:
                self._by_identity(value)
        elif kind is types.MethodType:
            self.add(value.__func__, depth + 1)
            self.add(value.__self__, depth + 1)
        elif kind is RemoteFunction:
            self._by_identity(value)
            self.key.append(None if isinstance(value.fn, str) else fingerprint(value.fn))
        elif isinstance(value, torch.Tensor):  # a local one: its data may have changed
            self._by_identity(value)
            self.key.append(value.item() if value.dim() == 0 and value.device.type == "cpu" else value._version)
        else:
            self._by_identity(value)
            inner = getattr(value, "__dict__", None)
            is_scheduler = isinstance(value, torch.optim.lr_scheduler.LRScheduler)
            if is_scheduler:
                self.schedulers.append((value, value.last_epoch))
            elif type(inner) is dict and kind.__module__.partition(".")[0] not in _LIBRARIES:
                for v in inner.values():
                    self.add(v, depth + 1)

    def _module(self, module: Any, depth: int) -> None:
        self._by_identity(module)
        self.key.append(module.training)
        for held in (module._parameters, module._buffers):
            for tensor in held.values():
                if tensor is not None:
                    self._by_identity(tensor)
        for name, value in module.__dict__.items():
            kind = type(value)
            if name in _QUIET or (kind is dict or kind is set) and not value:
                continue
            if kind in _PLAIN:
                self.key.append((kind, value))
            elif name[0] != "_" or kind is dict:
                self.add(value, depth + 1)
        for child in module._modules.values():
            if child is not None:
                self._module(child, depth)

    def function(self, fn: types.FunctionType, depth: int = 0) -> None:
        """What its free names mean now."""
        for cell in fn.__closure__ or ():
            try:
                value = cell.cell_contents
            except ValueError:
                self.key.append(None)
                continue
            self.add(value, depth)
        names = fn.__globals__
        for name in _global_names(fn.__code__):
            if name in names:
                value = names[name]
                if type(value) is not types.ModuleType:
                    self.add(value, depth)


_names: weakref.WeakKeyDictionary[types.CodeType, tuple[str, ...]] = weakref.WeakKeyDictionary()


def _global_names(code: types.CodeType) -> tuple[str, ...]:
    found = _names.get(code)
    if found is None:
        names = dict.fromkeys(i.argval for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME"))
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                names |= dict.fromkeys(_global_names(constant))
        found = _names[code] = tuple(names)
    return found


def look(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> View:
    """Raises nothing of its own; what cannot be looked into counts by its identity."""
    view = View()
    view.add(args)
    view.add(kwargs)
    view.explicit = len(view.tensors)
    owner = getattr(fn, "__self__", None)
    if owner is not None:
        view.add(owner)
    function = getattr(fn, "__func__", fn)
    if isinstance(function, types.FunctionType):
        view.function(function)
    else:
        view.add(fn)
    return view
