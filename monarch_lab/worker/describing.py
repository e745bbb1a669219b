"""What a tensor is, in a line, beside its values: for the debugger."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

_LARGEST = 1 << 28  # elements; of larger ones only the shape is told


def headline(value: Any) -> str:
    """As in "tensor float32 (2, 3) cpu · min -1, max 3, mean 0.5, 1 NaN"; "" for what is no tensor."""
    if not isinstance(value, torch.Tensor):
        return ""
    with torch.no_grad(), _disable_current_modes():
        parts = [f"tensor {str(value.dtype).removeprefix('torch.')} {tuple(value.shape)} {value.device}"]
        if value.layout is not torch.strided:
            parts[0] += f" {str(value.layout).removeprefix('torch.')}"
        if value.requires_grad:
            parts[0] += ", requires grad"
        try:
            if numbers := _statistics(value.detach()):
                parts.append(numbers)
        except (RuntimeError, NotImplementedError, TypeError) as error:  # of a dtype or layout without arithmetic
            parts.append(f"no statistics ({str(error).splitlines()[0][:80]})")
        return " · ".join(parts)


def _statistics(value: torch.Tensor) -> str:
    if value.is_meta or value.layout is not torch.strided or not 1 < value.numel() <= _LARGEST or value.is_quantized:
        return ""
    if value.dtype is torch.bool:
        return f"{int(value.sum())} of {value.numel()} true"
    if value.is_complex():
        value = value.abs()
        sizes = "absolute values: "
    else:
        sizes = ""
    whole = value.to(torch.float64) if value.device.type == "cpu" else value.to(torch.float32)
    is_nan = whole.isnan()
    count = int(is_nan.sum())
    known = whole[~is_nan] if count else whole
    nan = f", {count} NaN" if count else ""
    if not known.numel():
        return f"all {count} NaN"
    infinite = int(known.isinf().sum())
    inf = f", {infinite} inf" if infinite else ""
    return (
        f"{sizes}min {known.min().item():.6g}, max {known.max().item():.6g}, mean {known.mean().item():.6g}{nan}{inf}"
    )
