"""Factory calls of a %%mesh cell (torch.rand and the like) become mesh tensors.

torch keeps function modes on a stack of the thread; which mesh is meant is a context variable, so that another
asyncio task of the thread, or a callback, is not caught (rule 15).
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from monarch_lab.controller import constants, dispatch
from monarch_lab.controller.learning import learn
from monarch_lab.controller.placing import replicate
from monarch_lab.controller.scanning import scan
from monarch_lab.controller.state import active_mesh, ambient_number, recorder
from monarch_lab.controller.tape import Traced, plain_within

_SHAPED = (
    "rand randn randint randperm zeros ones empty full arange range linspace logspace eye empty_strided "
    "empty_permuted normal tril_indices triu_indices bartlett_window blackman_window hamming_window hann_window "
    "kaiser_window complex polar"
).split()
_LITERALS = (
    "tensor as_tensor asarray scalar_tensor sparse_coo_tensor sparse_csr_tensor sparse_compressed_tensor".split()
)
FACTORIES = {getattr(torch, n) for n in _SHAPED if n not in ("complex", "polar")} | {
    torch.fft.fftfreq,
    torch.fft.rfftfreq,
}
LITERALS = {getattr(torch, n) for n in _LITERALS}
_CONSTANT_SHAPES = {torch.zeros, torch.ones, torch.full, torch.empty}


def _has_local(args: Any, kwargs: dict[str, Any]) -> bool:
    for a in (*args, *kwargs.values()):
        if isinstance(a, torch.Tensor):
            return True
        if isinstance(a, (list, tuple)) and any(isinstance(x, torch.Tensor) for x in a):
            return True
    return False


def create(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], mesh: Any) -> Any:
    """A factory call with ``mesh`` active."""
    if _has_local(args, kwargs) and func not in LITERALS:
        return func(*args, **kwargs)  # ops among local tensors stay local
    if str(kwargs.get("device", "")).startswith("meta"):
        return func(*args, **kwargs)
    if func in LITERALS:
        return _literal(func, args, kwargs, mesh)
    if mesh.torch_device and kwargs.get("device") is None:
        kwargs = {**kwargs, "device": mesh.torch_device}
    if recorder.get() is not None and func in _CONSTANT_SHAPES:
        args = tuple([plain_within(a) for a in args])
        kwargs = {k: plain_within(v) for k, v in kwargs.items()}
    if func in _CONSTANT_SHAPES and not kwargs.get("requires_grad") and _is_scalar_shape(args, kwargs):
        return constants.make(func(*args, **kwargs), mesh)
    call = scan(func, args, kwargs, ambient_number())
    call.mesh = mesh
    entry = mesh.client.cache.entries.get(call.key) if call.hashable else None
    if entry is None:
        return learn(call)
    return dispatch.replay(entry, call.tensors, call.numbers, call.ambient, mesh)


def _is_scalar_shape(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    size = args[0] if args else kwargs.get("size")
    return isinstance(size, (tuple, list)) and len(size) == 0 and kwargs.get("device") is None


def _literal(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], mesh: Any) -> Any:
    data = args[0] if args else kwargs.get("data", kwargs.get("obj"))
    if isinstance(data, torch.Tensor) and func is not torch.tensor:
        return func(*args, **kwargs)  # as_tensor of a local tensor is that tensor
    rest = {k: v for k, v in kwargs.items() if k != "device"}
    if type(data) is not Traced and recorder.get() is not None:
        args = tuple([plain_within(a) for a in args])
    local = func(*args, **rest)
    if isinstance(data, torch.Tensor):
        return local
    if local.dim() == 0 and not local.requires_grad and isinstance(data, (bool, int, float, complex)):
        made = constants.make(local, mesh)
        if type(data) is Traced:
            data.tape.own(made, data.tape.compute(func, args, rest, None))
        return made
    return replicate(mesh, local)


class MeshMode(TorchFunctionMode):
    """On the stack while a mesh is active on this thread."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if types and not dispatch.all_classes.isdisjoint(types):
            handler = dispatch.special.get(func)
            return dispatch.dispatch(func, args, kwargs) if handler is None else handler(*args, **(kwargs or {}))
        mesh = active_mesh.get()
        if mesh is not None and (func in FACTORIES or func in LITERALS):
            return create(func, args, kwargs or {}, mesh)
        if recorder.get() is not None:
            args = tuple([plain_within(a) for a in args])
            kwargs = {k: plain_within(v) for k, v in (kwargs or {}).items()}
        return func(*args, **(kwargs or {}))


def run_on_active(func: Any, *args: Any) -> Any:
    """Run a function of the worker's package on the active mesh."""
    call = scan(func, args, {}, ambient_number())
    entry = call.mesh.client.cache.entries.get(call.key)
    if entry is None:
        return learn(call)
    return dispatch.replay(entry, call.tensors, call.numbers, call.ambient, call.mesh)


_local = threading.local()
_used = False


def was_used() -> bool:
    """Whether a mesh was ever active in this process."""
    return _used


def push() -> None:
    """One mode for each thread, however many meshes are active on it in whatever order they end."""
    global _used
    _used = True
    depth = getattr(_local, "depth", 0)
    if depth == 0:
        _local.mode = MeshMode()
        _local.mode.__enter__()
    _local.depth = depth + 1


def pop() -> None:
    _local.depth -= 1
    if _local.depth == 0:
        _local.mode.__exit__(None, None, None)
