"""Hooks for the tensors that autograd saves, and checkpoints made of them, over ops of a mesh (rule 12).

The graph is on the workers, so they have the hooks (worker/saving.py). The notebook's pack hook is called once for each
tensor saved, and each such op is waited for. A checkpoint (``use_reentrant=False``) needs no call in its forward: the
workers drop what they would save, and ask for its function to be run again when a pass wants it.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils.checkpoint
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from monarch_lab.controller import random
from monarch_lab.controller.callbacks import Packed
from monarch_lab.controller.calling import Named
from monarch_lab.controller.functions import Saved, is_far
from monarch_lab.controller.mode import run_on_active
from monarch_lab.controller.state import active_mesh, recorder
from monarch_lab.errors import ClosedError, DeviceException, UsageError
from monarch_lab.tensors import saved

_WORKER = "monarch_lab.worker.saving."
_ENTER_REGION = Named(_WORKER + "enter_region", shown="torch.utils.checkpoint")
_ENTER_RECORDING = Named(_WORKER + "enter_recording", shown="torch.utils.checkpoint")
_ENTER_ASKED = Named(_WORKER + "enter_asked", shown="saved_tensors_hooks")
_LEAVE = Named(_WORKER + "leave", shown="saved_tensors_hooks")
_INPUTS = Named(_WORKER + "inputs", shown="torch.utils.checkpoint")
_INPUTS_OF_INNER = Named(_WORKER + "inputs_of_inner", shown="torch.utils.checkpoint")


@dataclass(frozen=True, slots=True)
class _Around:
    """``number`` is that of the handler here, and of the hooks on the workers; 0 where they have none."""

    mesh: Any
    number: int
    kind: int


class _Stack(threading.local):
    def __init__(self) -> None:
        self.entries: list[_Around] = []


_stack = _Stack()


def _on(mesh: Any, func: Named, *args: Any) -> Any:
    token = active_mesh.set(mesh)
    try:
        return run_on_active(func, *args)
    finally:
        active_mesh.reset(token)


@contextlib.contextmanager
def _around(entry: _Around, enter: Named | None, *args: Any) -> Iterator[None]:
    """The workers of the mesh have these hooks, and no others, for the ops in between."""
    if entry.number and (noted := recorder.get()) is not None:
        raise noted.refuse("a checkpoint or a hook for saved tensors", "leave it outside of the function")
    outer = saved.kind()
    _stack.entries.append(entry)
    saved.set_kind(entry.kind)
    try:
        if enter is not None:
            _on(entry.mesh, enter, float(entry.number), *args)
        yield
    finally:
        _stack.entries.remove(entry)
        saved.set_kind(outer)
        if enter is not None:
            same = [e.number for e in _stack.entries if e.number and e.mesh.client is entry.mesh.client]
            with contextlib.suppress(ClosedError, DeviceException):  # the mesh went meanwhile: no hooks are left there
                _on(entry.mesh, _LEAVE, float(entry.number), float(same[-1] if same else 0))


def check(call: Any) -> None:
    """Raises UsageError for a call that would save tensors past the notebook's hooks."""
    kind = saved.kind()
    if kind not in (saved.ASKED, saved.ELSEWHERE) or not torch.is_grad_enabled():
        return
    around = _stack.entries[-1]
    if around.kind == saved.ASKED and around.mesh.client is call.mesh.client and not call.mesh.stream_number:
        return
    if call.func is not torch.Tensor.detach and any(t.requires_grad for t in call.tensors):
        where = "was entered with no mesh active" if kind == saved.ELSEWHERE else f"is for {around.mesh}"
        raise UsageError(
            f"a hook for saved tensors {where}, and would not see what an op on {call.mesh} saves: enter it in the "
            "%%mesh cell of that mesh, on the default stream"
        )


# --- hooks of the notebook


def _asked(mesh: Any, hooks: Any) -> contextlib.AbstractContextManager[None]:
    if mesh is None or mesh.stream_number:
        return _around(_Around(mesh, 0, saved.ELSEWHERE), None)
    client = mesh.client
    # The hooks alone: the object itself may be entered again, and refer to this.
    pack_hook, unpack_hook = hooks.pack_hook, hooks.unpack_hook

    def pack(arguments: list[Any], split: int) -> Packed:
        packed = pack_hook(arguments[0])

        def unpack(arguments: list[Any], split: int) -> list[Any]:
            return [unpack_hook(packed)]

        return Packed(client.callbacks.add(unpack, mesh))

    return _around(_Around(mesh, client.callbacks.add(pack, mesh), saved.ASKED), _ENTER_ASKED)


def _patch_hooks() -> None:
    """torch's hooks go on to be for the local tensors of the cell, as its ops among them are local."""
    hooks = torch.autograd.graph.saved_tensors_hooks
    enter, leave = hooks.__enter__, hooks.__exit__
    own = (torch.utils.checkpoint._checkpoint_hook, torch.utils.checkpoint._recomputation_hook)  # noqa: SLF001

    @functools.wraps(enter)
    def entered(self: Any) -> None:
        around: Any = contextlib.nullcontext()
        if not isinstance(self, own):  # a checkpoint of local tensors
            around = _asked(active_mesh.get(), self)
        around.__enter__()
        try:
            enter(self)
        except BaseException:
            around.__exit__(None, None, None)
            raise
        self.__dict__.setdefault("_monarch_arounds", []).append(around)

    @functools.wraps(leave)
    def left(self: Any, *args: object) -> None:
        leave(self, *args)
        self.__dict__["_monarch_arounds"].pop().__exit__(None, None, None)

    hooks.__enter__, hooks.__exit__ = entered, left


# --- checkpoints


def _mesh_of(values: Any) -> Any:
    found = next((t for t in tree_leaves(values) if is_far(t)), None)
    return active_mesh.get() if found is None else found._ref.mesh


class _Again:
    """What it takes to run a checkpointed function again, as it was run first."""

    def __init__(self, fn: Callable[..., Any], args: Any, kwargs: Any, preserve_rng_state: bool, context: Any) -> None:
        self._fn, self._kwargs, self._context = fn, kwargs, context
        self._far = [k for k, a in enumerate(args) if is_far(a)]
        self._saved = [Saved(args[k]) for k in self._far]
        self._args = [None if is_far(a) else a for a in args]
        self._kinds = repr([args[k]._meta.wire for k in self._far])
        self._is_inner = bool(_stack.entries)
        self._random = random.get_state() if preserve_rng_state else None
        self._autocast = [(d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cpu", "cuda")]
        self._cache = torch.is_autocast_cache_enabled()

    def run(self, mesh: Any, region: int) -> None:
        args = list(self._args)
        if self._far:
            if self._is_inner:
                given = _on(mesh, _INPUTS_OF_INNER, float(region), self._kinds)[0]
            else:
                given = _on(mesh, _INPUTS, float(region), self._kinds)
            for k, known, handle in zip(self._far, self._saved, given, strict=True):
                args[k] = known.again(handle)
        number = mesh.client.callbacks.add(_nothing, mesh)
        entry = _Around(mesh, number, saved.CHECKPOINT)
        with contextlib.ExitStack() as stack:
            stack.callback(mesh.client.callbacks.forget, [number])
            stack.enter_context(torch.enable_grad())
            if self._random is not None:
                stack.callback(random.set_state, random.get_state())
                random.set_state(self._random)
            for device, enabled, dtype in self._autocast:
                stack.enter_context(torch.autocast(device, dtype, enabled, self._cache))
            stack.enter_context(_around(entry, _ENTER_RECORDING, float(region)))
            stack.enter_context(self._context)
            self._fn(*args, **self._kwargs)


def _nothing(arguments: list[Any], split: int) -> None:
    return None


def _patch_checkpoint() -> None:
    module = torch.utils.checkpoint
    original = module._checkpoint_without_reentrant_generator  # noqa: SLF001  the one that builds the hooks

    @functools.wraps(original)
    def generator(
        fn: Callable[..., Any],
        preserve_rng_state: bool = True,
        context_fn: Any = module.noop_context_fn,
        determinism_check: str = "default",
        debug: bool = False,
        early_stop: bool = True,
        *args: Any,
        **kwargs: Any,
    ) -> Iterator[None]:
        mesh = _mesh_of((args, kwargs))
        if mesh is None:
            yield from original(
                fn, preserve_rng_state, context_fn, determinism_check, debug, early_stop, *args, **kwargs
            )
            return
        if debug:
            raise UsageError(
                "checkpoint(debug=True) follows the ops of this process, and those of a mesh run elsewhere"
            )
        if determinism_check not in ("default", "none"):
            raise ValueError(f'determinism_check is "default" or "none", not {determinism_check!r}')
        with contextlib.ExitStack() as stack:
            if active_mesh.get() is not mesh:
                stack.enter_context(mesh.activate())
            forward, again = (
                contextlib.nullcontext() if isinstance(c, TorchDispatchMode) else c for c in context_fn()
            )  # a policy of which ops to keep would see none of them: all are run again
            if torch.is_grad_enabled() and not mesh.stream_number:
                stack.enter_context(
                    _region(mesh, _Again(fn, args, kwargs, preserve_rng_state, again), args, determinism_check)
                )
            stack.enter_context(forward)
            yield

    module._checkpoint_without_reentrant_generator = generator  # noqa: SLF001


def _region(mesh: Any, again: _Again, args: Any, check: str) -> contextlib.AbstractContextManager[None]:
    number = 0

    def run_again(arguments: list[Any], split: int) -> list[Any]:
        token = active_mesh.set(mesh)
        try:
            again.run(mesh, number)
        finally:
            active_mesh.reset(token)
        return []

    number = mesh.client.callbacks.add(run_again, mesh)
    inputs = tuple(a for a in args if is_far(a))
    return _around(_Around(mesh, number, saved.CHECKPOINT), _ENTER_REGION, inputs, check == "default")


def install() -> None:
    _patch_hooks()
    _patch_checkpoint()
