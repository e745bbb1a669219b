"""Our mesh for opinfo.py: two CPU workers, started once."""

from __future__ import annotations

import atexit
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

import monarch_lab as ml

_mesh: Any = None


def mesh() -> Any:
    global _mesh
    if _mesh is None:
        _mesh = ml.local_mesh(gpus_per_host=2, device="cpu")
        atexit.register(_mesh.exit)
    return _mesh


@contextmanager
def session() -> Iterator[None]:
    with mesh().activate():
        yield


def counts() -> dict[str, int]:
    """So far: calls that did not wait (ops and deletes aside), calls that waited to learn, and calls that waited though
    their kind was known, for their result hangs on values."""
    client = mesh().client
    cache = client.cache
    return {
        "went": client.ops,
        "learned": cache.misses - cache.asked,
        "asked": cache.asked - cache.dynamic,
        "dynamic": cache.dynamic,
    }


def to_mesh(tensor: torch.Tensor) -> Any:
    return mesh().replicate(tensor)


def to_local(value: Any, rank: int) -> torch.Tensor:
    return ml.inspect(value, host=0, gpu=rank) if getattr(value, "is_mesh_tensor", False) else value
