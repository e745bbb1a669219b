"""What the proxies of controller/opaque.py call on the workers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from monarch_lab.errors import UsageTypeError
from monarch_lab.tensors import naming
from monarch_lab.tensors.opaque import OpaqueRef


def _made(maker: Callable[..., Any] | str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    found = naming.resolve(f"user:{maker}", {}) if isinstance(maker, str) else maker
    return found(*args, **kwargs)


def construct(maker: Callable[..., Any] | str, *args: Any, **kwargs: Any) -> OpaqueRef:
    return OpaqueRef(_made(maker, args, kwargs))


def construct_module(maker: Callable[..., Any] | str, *args: Any, **kwargs: Any) -> Any:
    """(the module, its parameters, their names)."""
    module = _made(maker, args, kwargs)
    if not isinstance(module, torch.nn.Module):
        raise UsageTypeError(f"ml.OpaqueModule: {maker} made a {type(module).__name__}, which is no nn.Module")
    named = list(module.named_parameters())
    return OpaqueRef(module), [p for _, p in named], [name for name, _ in named]


def call_method(ref: OpaqueRef, name: str, *args: Any, **kwargs: Any) -> Any:
    return getattr(ref.value, name)(*args, **kwargs)
