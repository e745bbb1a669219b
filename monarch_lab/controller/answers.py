"""What a mesh tensor answers without an op: attributes that are pure functions of its metadata, and values.

A value (``item``, ``bool``, numpy …) is fetched where every process is known to hold the same one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from monarch_lab.controller import dispatch, hooks, state
from monarch_lab.controller.messages import needs_remote, not_one_value
from monarch_lab.tensors.meta import Meta, is_contiguous

ATTRIBUTES: dict[str, Callable[[Meta], Any]] = {
    "shape": lambda m: m.shape,
    "ndim": lambda m: len(m.shape),
    "dtype": lambda m: m.dtype,
    "device": lambda m: m.device,
    "layout": lambda m: m.layout,
    "is_leaf": lambda m: m.is_leaf,
    "itemsize": lambda m: m.dtype.itemsize,
    "nbytes": lambda m: m.numel * m.dtype.itemsize,
    "is_cpu": lambda m: m.device.type == "cpu",
    "is_cuda": lambda m: m.device.type == "cuda",
    "is_meta": lambda m: False,
    "is_sparse": lambda m: m.layout is torch.sparse_coo,
    "is_sparse_csr": lambda m: m.layout is torch.sparse_csr,
    "is_quantized": lambda m: m.wire.dtype.startswith("q"),
    "is_nested": lambda m: m.wire.layout == "nested",
    "is_mkldnn": lambda m: m.wire.layout == "_mkldnn",
    "is_mps": lambda m: False,
    "is_xla": lambda m: False,
    "is_xpu": lambda m: False,
    "is_ipu": lambda m: False,
    "is_hpu": lambda m: False,
    "is_maia": lambda m: False,
    "is_mtia": lambda m: False,
    "is_vulkan": lambda m: False,
    "output_nr": lambda m: 0,
    "names": lambda m: (None,) * len(m.shape),
    "name": lambda m: None,
    "volatile": lambda m: False,
    "_has_symbolic_sizes_strides": lambda m: False,
}

_METHODS: dict[str, Callable[..., Any]] = {
    "dim": lambda m: len(m.shape),
    "ndimension": lambda m: len(m.shape),
    "numel": lambda m: m.numel,
    "nelement": lambda m: m.numel,
    "element_size": lambda m: m.dtype.itemsize,
    "is_floating_point": lambda m: m.dtype.is_floating_point,
    "is_complex": lambda m: m.dtype.is_complex,
    "is_signed": lambda m: m.dtype.is_signed,
    "is_conj": lambda m: m.is_conj,
    "is_neg": lambda m: m.is_neg,
    "is_inference": lambda m: m.is_inference,
    "_is_view": lambda m: m.is_view,
    "get_device": lambda m: m.device.index if m.device.index is not None else -1,
    "has_names": lambda m: False,
    "is_contiguous": lambda m, memory_format=torch.contiguous_format: is_contiguous(m, memory_format),
    "is_distributed": lambda m: False,
    "_is_zerotensor": lambda m: False,
}
_FUNCTIONS = (
    "numel is_floating_point is_complex is_signed is_conj is_neg is_inference get_device is_distributed".split()
)


def unequal_dims(tensor: Any) -> list[str]:
    mesh = tensor._ref.mesh
    mask = (tensor._store or tensor._ref).equal
    return [name for k, name in enumerate(mesh.names) if not mask >> k & 1 and mesh.sizes[name] > 1]


def one_value(tensor: Any, what: str) -> torch.Tensor:
    """The tensor's value, as a local CPU tensor; UsageTypeError where processes may hold different ones."""
    if hasattr(tensor, "_value"):
        recorder = state.recorder.get()
        return tensor._value if recorder is None else recorder.value(tensor)
    different = unequal_dims(tensor)
    if different:
        raise not_one_value(what, tensor._ref.mesh, different)
    from monarch_lab.controller.moves import fetch_one

    return fetch_one(tensor)


def _scalar(name: str, turn: Callable[[torch.Tensor], Any]) -> Callable[..., Any]:
    def method(tensor: Any, *args: Any) -> Any:
        if name != "tolist" and tensor._meta.numel != 1:
            if name == "__bool__":
                raise RuntimeError("Boolean value of Tensor with more than one value is ambiguous")
            raise RuntimeError(f"a Tensor with {tensor._meta.numel} elements cannot be converted to Scalar")
        return turn(one_value(tensor, _SHOWN.get(name, f"t.{name}()")))

    method.__name__ = name
    return method


_SHOWN = {
    "__bool__": "bool(t)",
    "__int__": "int(t)",
    "__float__": "float(t)",
    "__complex__": "complex(t)",
    "__index__": "using t as an index of a Python sequence",
    "__contains__": "x in t",
}
_SCALARS: dict[str, Callable[[torch.Tensor], Any]] = {
    "item": lambda t: t.item(),
    "__bool__": bool,
    "__int__": int,
    "__float__": float,
    "__complex__": complex,
    "__index__": lambda t: t.__index__(),
    "tolist": lambda t: t.tolist(),
}


def _numpy(tensor: Any, *, force: bool = False) -> np.ndarray:
    if tensor._meta.requires_grad and not force:
        raise RuntimeError("Can't call numpy() on Tensor that requires grad. Use tensor.detach().numpy() instead.")
    array = one_value(tensor, "t.numpy()").numpy(force=force)
    array.flags.writeable = False  # a copy: writing to it would not reach the mesh
    return array


def _array(tensor: Any, dtype: Any = None, copy: Any = None) -> np.ndarray:
    array = one_value(tensor, "a numpy array of t").detach().numpy()
    return array if dtype is None else array.astype(dtype)


def _equal(a: Any, b: Any) -> bool:
    return _values(torch.equal, "torch.equal", a, b)


def _allclose(a: Any, b: Any, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False) -> bool:
    return _values(torch.allclose, "torch.allclose", a, b, rtol, atol, equal_nan)


def _values(func: Any, shown: str, *args: Any) -> Any:
    """A function whose Python result needs one value of each tensor."""
    from monarch_lab.controller.calling import call_on

    mesh = None
    for a in args:
        if getattr(a, "is_mesh_tensor", False):
            mesh = a._ref.mesh
            if not hasattr(a, "_value") and (different := unequal_dims(a)):
                raise not_one_value(shown, mesh, different)
    assert mesh is not None
    return call_on(mesh, mesh.ranks_key[0], func, args)


def base(tensor: Any) -> Any:
    """The live handle of the tensor this one is a view of, or None."""
    store = tensor._store
    if store is None or not tensor._meta.is_view or store.handles is None:
        return None
    first = store.handles[0]()
    return first if first is not tensor else None


def _pinned(tensor: Any, *args: Any) -> bool:
    return False


def _storage_offset(tensor: Any) -> int:
    """The one part of a tensor's metadata that is asked for: where it begins is no part of its kind."""
    from monarch_lab.controller.learning import about

    if hasattr(tensor, "_value"):
        return 0
    return int(about(tensor._ref.mesh, "storage_offset", tensor))


def _same_size(a: Any, b: Any) -> bool:
    return a.shape == b.shape


def install(cls: type) -> None:
    """Adds the methods, and answers the functions of torch that mean the same."""
    special = dispatch.special
    for name, answer in _METHODS.items():
        method = _on_meta(answer)
        if not hasattr(torch.Tensor, name):
            continue  # not in every version of torch
        setattr(cls, name, method)
        special[getattr(torch.Tensor, name)] = method
        if name in _FUNCTIONS:
            special[getattr(torch, name)] = method
    for name, answer in ATTRIBUTES.items():
        if hasattr(torch.Tensor, name):
            special[getattr(torch.Tensor, name).__get__] = _on_meta(answer)
    for name, turn in _SCALARS.items():
        method = _scalar(name, turn)
        setattr(cls, name, method)
        special[getattr(torch.Tensor, name)] = method
    others: dict[str, Callable[..., Any]] = {
        "numpy": _numpy,
        "__array__": _array,
        "equal": _equal,
        "allclose": _allclose,
        "is_pinned": _pinned,
        "register_hook": hooks.register_hook,
        "register_post_accumulate_grad_hook": hooks.register_post_accumulate_grad_hook,
        "is_same_size": _same_size,
        "storage_offset": _storage_offset,
        "__contains__": lambda t, x: bool((t == x).any()),
    }
    for name, function in others.items():
        if not hasattr(torch.Tensor, name):
            continue
        setattr(cls, name, function)
        special[getattr(torch.Tensor, name)] = function
        if hasattr(torch, name):
            special[getattr(torch, name)] = function
    special[torch.Tensor.size] = lambda t, dim=None: t.size(dim)
    special[torch.Tensor.stride] = lambda t, dim=None: t.stride(dim)
    special[torch.Tensor.__repr__] = lambda t, **_: repr(t)
    special[torch.Tensor.__format__] = lambda t, spec: format(t, spec)
    special[torch.Tensor.__len__] = len
    special[torch.is_nonzero] = bool
    special[torch.Tensor.is_nonzero] = bool
    cls.is_nonzero = lambda t: bool(t)  # type: ignore[attr-defined]
    for name in (
        "data_ptr",
        "storage",
        "untyped_storage",
        "share_memory_",
        "pin_memory",
        "__dlpack__",
        "_typed_storage",
    ):
        refusal = _refuse(name)
        setattr(cls, name, refusal)
        if hasattr(torch.Tensor, name):
            special[getattr(torch.Tensor, name)] = refusal


def _on_meta(answer: Callable[..., Any]) -> Callable[..., Any]:
    def method(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        return answer(tensor._meta, *args, **kwargs)

    return method


def _refuse(name: str) -> Callable[..., Any]:
    def method(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        raise needs_remote(f"t.{name}()")

    return method
