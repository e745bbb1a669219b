"""What torch does not route through its function layer, hooked once, when the first mesh starts.

Each hook does what torch did wherever no mesh tensor and no active mesh is involved.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import torch
import torch.utils.data
from torch.utils.data import dataloader

from monarch_lab.controller.messages import needs_remote
from monarch_lab.controller.state import active_mesh

_installed = False


def install() -> None:
    global _installed
    if _installed:
        return
    _installed = True
    _patch_manual_seed()
    _patch_autograd_function()
    _patch_data_loader()
    os.register_at_fork(after_in_child=_disarm)


def _patch_manual_seed() -> None:
    """``torch.manual_seed`` in a %%mesh cell seeds the workers, and this process as always (rule 9)."""
    original = torch.manual_seed

    @functools.wraps(original)
    def manual_seed(seed: Any) -> torch._C.Generator:
        generator = original(seed)
        if active_mesh.get() is not None:
            from monarch_lab.controller.random import seed_active

            seed_active(int(seed))
        return generator

    torch.manual_seed = manual_seed
    torch.random.manual_seed = manual_seed


def _patch_autograd_function() -> None:
    """``autograd.Function.apply`` with a mesh tensor would run here, on no data: refused (rule 12)."""
    original = torch.autograd.Function.apply.__func__

    @functools.wraps(original)
    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        for a in (*args, *kwargs.values()):
            if getattr(a, "is_mesh_tensor", False):
                raise needs_remote(f"autograd.Function {cls.__name__}")
        return original(cls, *args, **kwargs)

    torch.autograd.Function.apply = classmethod(apply)


def _patch_data_loader() -> None:
    """Loading data runs with no mesh active, else host batches would become mesh tensors (rule 18)."""
    base = dataloader._BaseDataLoaderIter
    original_next, original_iter = base.__next__, torch.utils.data.DataLoader.__iter__

    @functools.wraps(original_next)
    def local_next(self: Any) -> Any:
        token = active_mesh.set(None)
        try:
            return original_next(self)
        finally:
            active_mesh.reset(token)

    @functools.wraps(original_iter)
    def local_iter(self: Any) -> Any:
        token = active_mesh.set(None)
        try:
            return original_iter(self)
        finally:
            active_mesh.reset(token)

    base.__next__ = local_next
    torch.utils.data.DataLoader.__iter__ = local_iter


def _disarm() -> None:
    """A forked child (a loader process) has no part in the mesh: nothing in it may reach the workers."""
    active_mesh.set(None)
