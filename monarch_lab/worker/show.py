"""Values as text, for displays: made where the value is, so that only the text travels."""

from __future__ import annotations

import torch

from monarch_lab.tensors.meta import describe
from monarch_lab.wire.engine import TensorMeta

_MAX_CHARACTERS = 4_000


def text(tensor: torch.Tensor) -> str:
    """torch's own repr, cut at 4,000 characters."""
    shown = repr(tensor)
    return shown if len(shown) <= _MAX_CHARACTERS else shown[:_MAX_CHARACTERS] + " …"


def metadata(tensors: list[torch.Tensor]) -> list[TensorMeta]:
    return [describe(t) for t in tensors]


def storage_offset(tensor: torch.Tensor) -> int:
    return tensor.storage_offset()


def formatted(tensor: torch.Tensor, spec: str) -> str:
    return format(tensor, spec)


def grad_fn_name(tensor: torch.Tensor) -> str:
    return type(tensor.grad_fn).__name__


def storage_copy(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of the whole storage behind a tensor, as one flat tensor: deepcopy keeps sharing with it."""
    flat = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage().clone())
    return flat


def view_like(flat: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A tensor over the storage of ``flat``, shaped as ``like``, a leaf of its own."""
    out = torch.empty(0, dtype=like.dtype).set_(
        flat.untyped_storage(), like.storage_offset(), like.size(), like.stride()
    )
    if like.is_conj():
        out = torch._conj(out)
    if like.is_neg():
        out = torch._neg_view(out)
    return out.requires_grad_(like.requires_grad)


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """A deep copy of a tensor without a plain storage (sparse, quantised)."""
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)
