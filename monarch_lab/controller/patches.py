"""What torch does not route through its function layer, hooked once, when the first mesh starts.

Each hook does what torch did wherever no mesh tensor and no active mesh is involved.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.profiler
import torch.utils.data
from torch.utils.data import dataloader

from monarch_lab.controller import devices, functions, hooks, interrupts, lazy, loading, mode, saving
from monarch_lab.controller.messages import needs_remote
from monarch_lab.controller.state import active_mesh
from monarch_lab.tensors import switches

_installed = False


def install() -> None:
    global _installed
    if _installed:
        return
    _installed = True
    _patch_manual_seed()
    _patch_autograd_function()
    _patch_data_loader()
    _patch_loading()
    _patch_parameter()
    lazy.install()
    loading.install()
    _patch_rng_state()
    _patch_threads()
    saving.install()
    hooks.install()
    _patch_compile()
    _patch_profiler()
    switches.watch()
    devices.install()
    interrupts.install()
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
    """``autograd.Function.apply`` with a mesh tensor would build its node here, over no data (rule 12)."""
    original = torch.autograd.Function.apply.__func__

    @functools.wraps(original)
    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        for a in (*args, *kwargs.values()):
            if getattr(a, "is_mesh_tensor", False):
                return functions.apply(cls, args, kwargs)
        return original(cls, *args, **kwargs)

    torch.autograd.Function.apply = classmethod(apply)
    made_by = torch.autograd.function._functions  # noqa: SLF001  once_differentiable looks there
    made_locally = made_by.DelayedError

    def delayed_error(message: bytes, count: int) -> Any:
        def call(*tensors: Any) -> Any:
            if any(getattr(t, "is_mesh_tensor", False) for t in tensors):
                return functions.delayed_error(message, tensors)
            return made_locally(message, count)(*tensors)

        return call

    made_by.DelayedError = delayed_error


def _local(function: Any) -> Any:
    """The function, run with no mesh active."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        token = active_mesh.set(None)
        try:
            return function(*args, **kwargs)
        finally:
            active_mesh.reset(token)

    return run


def _patch_data_loader() -> None:
    """Loading data runs with no mesh active, else host batches would become mesh tensors (rule 18)."""
    for owner, name in (
        (dataloader._BaseDataLoaderIter, "__next__"),
        (torch.utils.data.DataLoader, "__iter__"),
        (torch.utils.data.WeightedRandomSampler, "__init__"),
        (torch.utils.data, "random_split"),
        (torch.utils.data.dataset, "random_split"),
    ):
        setattr(owner, name, _local(getattr(owner, name)))


def _patch_loading() -> None:
    """What torch.load and pickle read is local: they fill a tensor of torch.empty with a storage of this process."""
    torch.load = torch.serialization.load = _local(torch.load)
    torch._utils._rebuild_tensor = _local(torch._utils._rebuild_tensor)  # noqa: SLF001  pickles name its callers


def _patch_parameter() -> None:
    """``nn.Parameter(p)`` of a mesh Parameter: torch wants detach() to keep the type, and ours makes a plain tensor."""
    original = torch.nn.Parameter.__new__

    @functools.wraps(original)
    def new(cls: Any, data: Any = None, requires_grad: bool = True) -> Any:
        if getattr(data, "is_mesh_tensor", False) and data._is_param:
            data = data.detach()
        return original(cls, data, requires_grad)

    torch.nn.Parameter.__new__ = new


def _patch_rng_state() -> None:
    """In a %%mesh cell the generator is the workers': its state is a mesh tensor (equal on all of them)."""
    get, put, fork = torch.random.get_rng_state, torch.random.set_rng_state, torch.random.fork_rng

    @functools.wraps(get)
    def get_rng_state() -> torch.Tensor:
        mesh = active_mesh.get()
        if mesh is None:
            return get()
        from monarch_lab.controller.random import get_state

        return get_state()[0]

    @functools.wraps(put)
    def set_rng_state(new_state: torch.Tensor) -> None:
        if getattr(new_state, "is_mesh_tensor", False):
            from monarch_lab.controller.random import set_state

            set_state(new_state)
        elif active_mesh.get() is not None:
            raise needs_remote("set_rng_state() with a state that torch.get_rng_state() gave outside a %%mesh cell")
        else:
            put(new_state)

    @functools.wraps(fork)
    @contextmanager
    def fork_rng(*args: Any, **kwargs: Any) -> Iterator[None]:
        if active_mesh.get() is None or not kwargs.get("enabled", True):
            with fork(*args, **kwargs):
                yield
            return
        state = get_rng_state()
        try:
            yield
        finally:
            set_rng_state(state)

    for module in (torch, torch.random):
        module.get_rng_state, module.set_rng_state = get_rng_state, set_rng_state
    torch.random.fork_rng = fork_rng


def _patch_threads() -> None:
    """A thread that runs in a copy of a context with an active mesh has that mesh (rule 15): torch keeps function modes
    for each thread, and only a thread's own start can put ours there. Without an active mesh it passes calls on."""
    original = threading.Thread.run

    @functools.wraps(original)
    def run(self: threading.Thread) -> None:
        if not mode.was_used():
            return original(self)
        mode.push()
        try:
            return original(self)
        finally:
            mode.pop()

    threading.Thread.run = run  # type: ignore[method-assign]


def _patch_profiler() -> None:
    """A profile taken here would show none of the workers' ops: refused."""
    for owner, name in ((torch.profiler.profile, "start"), (torch.autograd.profiler.profile, "__enter__")):
        original = getattr(owner, name)

        def start(self: Any, original: Any = original) -> Any:
            if active_mesh.get() is not None:
                raise needs_remote("A profile of torch.profiler")
            return original(self)

        setattr(owner, name, functools.wraps(original)(start))


def _patch_compile() -> None:
    """What torch.compile made would trace into our bookkeeping when called with mesh tensors: refused."""
    original = torch.compile

    @functools.wraps(original)
    def compile(model: Any = None, **options: Any) -> Any:
        if model is None:
            return lambda function: compile(function, **options)
        if isinstance(model, torch.nn.Module):
            if any(getattr(p, "is_mesh_tensor", False) for p in model.parameters()):
                raise needs_remote("torch.compile")
            return original(model, **options)
        made = original(model, **options)

        @functools.wraps(made)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            if active_mesh.get() is not None or any(
                getattr(a, "is_mesh_tensor", False) for a in (*args, *kwargs.values())
            ):
                raise needs_remote("torch.compile")
            return made(*args, **kwargs)

        return guarded

    torch.compile = compile


def _disarm() -> None:
    """A forked child (a loader process) has no part in the mesh: nothing in it may reach the workers."""
    active_mesh.set(None)
