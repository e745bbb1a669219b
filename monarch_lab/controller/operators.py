"""Arithmetic operators of a mesh tensor: dispatch and replay written out in one, for speed alone.

What is not a tensor of the same mesh or a plain number, and what was not seen before, goes to dispatch. Keys and
stream are the same.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from monarch_lab.controller import locations
from monarch_lab.controller.dispatch import dispatch, sign, single_result, start_ambient
from monarch_lab.controller.lending import turn_to
from monarch_lab.controller.operands import INT, SCALARS, SPAN, Operand, Span, basic, is_scalar
from monarch_lab.controller.refs import Ref
from monarch_lab.controller.scanning import FLOAT, FLOATS, SLICE
from monarch_lab.controller.state import ambient_number
from monarch_lab.tensors.meta import STRIDED

NAMES = "add sub mul truediv matmul pow radd rsub rmul rtruediv".split()

_wrapper = torch.Tensor._make_wrapper_subclass
_here = locations.here
_library = locations.library
_getframe = sys._getframe

# Filled by tensor.py, which needs this module in turn.
handle_class: type = torch.Tensor
handle_classes: frozenset[type] = frozenset()


_getitem = torch.Tensor.__getitem__


def getitem(self: Any, index: Any) -> Any:
    """``t[index]``; of a basic index with the key that scanning.Walk makes of it."""
    meta = self._meta
    placed = basic(meta.shape, index) if meta.layout is STRIDED else None
    if placed is None:
        return dispatch(_getitem, (self, index))
    ambient = ambient_number()
    key: list[Any] = [_getitem, ambient, meta]
    numbers: list[int] = []
    if type(placed) is tuple:
        key.append((tuple, len(placed)))
    for part in placed if type(placed) is tuple else (placed,):
        kind = type(part)
        if kind is Operand:
            numbers.append(part.value)
            key.append(INT)
        elif kind is Span:
            numbers += (part.start, part.stop)
            key.append((SPAN, part.length, part.step))
        elif kind is slice:
            key += (SLICE, part.start, part.stop, part.step)
        else:
            key.append(part)
    mesh = self._ref.mesh
    entry = mesh.client.cache.entries.get(tuple(key))
    if entry is None or entry.single is None:
        return dispatch(_getitem, (self, index))
    return single_result(entry, entry.single, [self], numbers, ambient, mesh)


def binary_method(func: Any) -> Callable[[Any, Any], Any]:
    """A method of a tensor and another one, or a number."""
    takes_ints = func in SCALARS

    def method(self: Any, other: Any) -> Any:
        kind = type(other)
        far = None
        if kind in handle_classes:
            far, operand = other._ref, other._meta
        elif kind is float:
            operand = FLOATS.get(other, FLOAT)
        elif kind is int:
            operand = INT if takes_ints and is_scalar(other, self._meta) else other
        else:
            return dispatch(func, (self, other))
        ambient = ambient_number()
        ref = self._ref
        mesh = ref.mesh
        client = mesh.client
        entry = client.cache.entries.get((func, ambient, self._meta, operand))
        if entry is None or not entry.plain or (far is not None and far.mesh is not mesh):
            return dispatch(func, (self, other))
        equal = (self._store or ref).equal
        if far is not None:
            equal &= (other._store or far).equal
        with client.lock:
            if mesh.ranks_key is not client.scope:
                turn_to(client, mesh)
            if client.urgent:
                client.drain_dead()
            if ambient != client.ambient:
                start_ambient(client, ambient)
            out = next(client.refs)
            if far is not None:
                operation: tuple[int, ...] = (entry.number, ref.id, far.id, out)
            elif kind is float or operand is INT:
                client.numbers.append(other)
                operation = (entry.number, ref.id, len(client.numbers) - 1, out)
            else:
                operation = (entry.number, ref.id, out)
            where = client.where
            frame = _getframe(1)
            code = frame.f_code
            location = (code, frame.f_lasti) if _library.get(id(code)) is False else _here(2)
            client.code += operation  # no call is between these: a Ctrl-C comes before both or after
            where.append(location)
        if client.due or len(where) >= client.flush_ops:
            client.flush_if_full()
        meta = entry.single
        handle = _wrapper(handle_class, *meta.wrapper)
        handle._meta = meta
        handle._ref = Ref(out, mesh, equal, meta.is_large)
        if meta.wants_sig:
            sign(handle, entry.number, 0, [self] if far is None else [self, other])
        return handle

    return method
