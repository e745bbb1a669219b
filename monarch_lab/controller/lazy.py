"""Parameters and buffers of lazy modules in a %%mesh cell: mesh tensors that get their shape later (rule 16)."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]

from monarch_lab.controller import autograd, tensor
from monarch_lab.controller.state import active_mesh

_set_class = object.__dict__["__class__"].__set__


class _Uninitialized(UninitializedTensorMixin):
    """torch.nn.parameter.is_lazy() is true of it. Ops with it are refused: it has no shape yet."""

    def materialize(self: Any, shape: Any, device: Any = None, dtype: Any = None) -> None:
        """Gives it a shape, and memory with arbitrary values: from then on it is an ordinary mesh tensor."""
        meta = self._meta
        _set_class(self, self.cls_to_become)
        with self._ref.mesh.activate():
            fresh = torch.empty(shape, device=device or meta.device, dtype=dtype or meta.dtype)
        autograd.set_data(self, fresh)

    def __deepcopy__(self: Any, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            with self._ref.mesh.activate():
                memo[id(self)] = _make(type(self), self._meta.requires_grad, self._meta.device, self._meta.dtype)
        return memo[id(self)]


class UninitializedMeshParameter(_Uninitialized, tensor.Parameter):
    """In place of torch's UninitializedParameter."""

    cls_to_become = tensor.Parameter
    # For isinstance.
    __class__ = property(lambda self: torch.nn.parameter.UninitializedParameter)


class UninitializedMeshBuffer(_Uninitialized, tensor.MeshTensor):
    """In place of torch's UninitializedBuffer."""

    cls_to_become = tensor.MeshTensor
    __class__ = property(lambda self: torch.nn.parameter.UninitializedBuffer)


def _make(cls: Any, requires_grad: bool, device: Any, dtype: Any) -> Any:
    made = torch.empty(0, device=device, dtype=dtype).requires_grad_(requires_grad)
    _set_class(made, cls)
    return made


def install() -> None:
    """While a mesh is active, torch's classes make ours."""
    parameter, buffer = torch.nn.parameter.UninitializedParameter, torch.nn.parameter.UninitializedBuffer
    new_parameter, new_buffer = parameter.__new__, buffer.__new__

    def make_parameter(cls: Any, requires_grad: bool = True, device: Any = None, dtype: Any = None) -> Any:
        if active_mesh.get() is None or device == torch.device("meta"):
            return new_parameter(cls, requires_grad, device, dtype)
        return _make(UninitializedMeshParameter, requires_grad, device, dtype)

    def make_buffer(
        cls: Any, requires_grad: bool = False, device: Any = None, dtype: Any = None, persistent: bool = True
    ) -> Any:
        if active_mesh.get() is None or device == torch.device("meta"):
            return new_buffer(cls, requires_grad, device, dtype, persistent)
        made = _make(UninitializedMeshBuffer, requires_grad, device, dtype)
        made.persistent, made._is_buffer = persistent, True  # noqa: SLF001  as torch.nn.Buffer marks its own
        return made

    parameter.__new__ = make_parameter
    buffer.__new__ = make_buffer
