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
from monarch_lab.controller.dispatch import dispatch, sign, start_ambient
from monarch_lab.controller.lending import turn_to
from monarch_lab.controller.operands import INT, SCALARS, is_scalar
from monarch_lab.controller.refs import Ref
from monarch_lab.controller.scanning import FLOAT, FLOATS
from monarch_lab.controller.state import ambient_number

NAMES = "add sub mul truediv matmul pow radd rsub rmul rtruediv".split()

_wrapper = torch.Tensor._make_wrapper_subclass
_here = locations.here
_library = locations.library
_getframe = sys._getframe

# Filled by tensor.py, which needs this module in turn.
handle_class: type = torch.Tensor
handle_classes: frozenset[type] = frozenset()


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
