"""A tensor's metadata: TensorMeta on the wire, Meta in the controller (interned, so that equal is identical)."""

from __future__ import annotations

import torch

from monarch_lab.wire.engine import TensorMeta

_plain = torch._C.DisableTorchFunctionSubclass
_DTYPES = {str(v).removeprefix("torch."): v for v in vars(torch).values() if isinstance(v, torch.dtype)}
_LAYOUTS = {str(v).removeprefix("torch."): v for v in vars(torch).values() if isinstance(v, torch.layout)}
_DTYPE_NAMES = {v: str(v).removeprefix("torch.") for v in _DTYPES.values()}
_LAYOUT_NAMES = {v: str(v).removeprefix("torch.") for v in _LAYOUTS.values()}
STRIDED = torch.strided
LARGE_BYTES = 1 << 16  # the memory of what is larger is given back at the next op, of the rest at the next batch


def dtype_named(name: str) -> torch.dtype:
    return _DTYPES[name]


def dtype_name(dtype: torch.dtype) -> str:
    return _DTYPE_NAMES[dtype]


def is_leaf(tensor: torch.Tensor) -> bool:
    """``tensor.is_leaf``, which can raise."""
    try:
        return tensor.is_leaf
    except RuntimeError:  # a view made under no_grad of a leaf, since written: torch refuses to make its graph
        return False


def describe(tensor: torch.Tensor) -> TensorMeta:
    """The metadata of a real tensor."""
    strided = tensor.layout is STRIDED and not tensor.is_nested
    return TensorMeta(
        shape=() if tensor.is_nested else tuple(tensor.shape),
        stride=tensor.stride() if strided else (),
        dtype=_DTYPE_NAMES[tensor.dtype],
        layout="nested" if tensor.is_nested else _LAYOUT_NAMES[tensor.layout],
        device=str(tensor.device),
        requires_grad=tensor.requires_grad,
        is_leaf=is_leaf(tensor),
        is_conj=tensor.is_conj(),
        is_neg=tensor.is_neg(),
        is_view=tensor._is_view(),
        is_inference=tensor.is_inference(),
    )


class Meta:
    """What the controller knows of a tensor it does not have. Interned: compare with ``is``."""

    __slots__ = (
        "shape",
        "stride",
        "dtype",
        "layout",
        "device",
        "requires_grad",
        "is_leaf",
        "is_conj",
        "is_neg",
        "is_view",
        "is_inference",
        "wire",
        "wants_sig",
        "wrapper",
        "is_large",
        "takes_ints",
    )

    def __init__(self, wire: TensorMeta) -> None:
        self.wire = wire
        self.shape = torch.Size(wire.shape)
        self.stride = wire.stride
        self.dtype = _DTYPES[wire.dtype]
        self.layout = _LAYOUTS.get(wire.layout, STRIDED)
        self.device = torch.device(wire.device)
        self.requires_grad = wire.requires_grad
        self.is_leaf = wire.is_leaf
        self.is_conj = wire.is_conj
        self.is_neg = wire.is_neg
        self.is_view = wire.is_view
        self.is_inference = wire.is_inference
        self.wants_sig = wire.requires_grad
        self.is_large = self.shape.numel() * self.dtype.itemsize > LARGE_BYTES
        # Any int beside it is one of its values, or is made a float: see controller/operands.py.
        self.takes_ints = self.dtype.is_floating_point or self.dtype.is_complex or self.dtype is torch.int64
        # The arguments of torch.Tensor._make_wrapper_subclass, in its order.
        strided = self.layout is STRIDED and wire.layout != "nested"
        self.wrapper = (
            self.shape,
            self.stride if strided else None,
            0 if strided else None,
            None,
            self.dtype,
            self.layout,
            self.device,
        )

    @property
    def numel(self) -> int:
        return self.shape.numel()

    def __repr__(self) -> str:
        return f"Meta({tuple(self.shape)}, {self.dtype}, stride={self.stride})"


_interned: dict[TensorMeta, Meta] = {}


def intern(wire: TensorMeta) -> Meta:
    found = _interned.get(wire)
    if found is None:
        found = _interned.setdefault(wire, Meta(wire))
    return found


def is_contiguous(meta: Meta, memory_format: torch.memory_format = torch.contiguous_format) -> bool:
    """As ``Tensor.is_contiguous`` answers for a tensor with this metadata."""
    if meta.layout is not STRIDED:
        return False
    with _plain():
        proto = torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device="meta")
        return proto.is_contiguous(memory_format=memory_format)
