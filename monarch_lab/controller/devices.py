"""What torch.cuda and torch's thread count say inside a %%mesh cell (rule 22).

They answer for the workers, in a kernel with CUDA or without.

Each worker sees one GPU, as ``cuda:0``, so a mesh of GPUs has one and a mesh of CPUs none. Numbers that the ranks may
differ in (memory) are given where all agree and refused, with the values, where not. What times or orders this
process's own GPU (streams, events, graphs) is refused: it would be about a device that runs nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from monarch_lab.controller.calling import send_call
from monarch_lab.controller.messages import needs_remote
from monarch_lab.controller.state import active_mesh
from monarch_lab.errors import UsageValueError

# Alike on all GPUs of a mesh that is worth having: rank 0's.
_OF_ONE = ("get_device_name", "get_device_capability", "is_bf16_supported", "get_arch_list")
# Each rank's own.
_OF_EACH = (
    "memory_allocated",
    "max_memory_allocated",
    "memory_reserved",
    "max_memory_reserved",
    "mem_get_info",
    "utilization",
)
_ON_EACH = ("synchronize", "empty_cache", "reset_peak_memory_stats", "reset_accumulated_memory_stats", "ipc_collect")
_REFUSED = ("Stream", "Event", "ExternalStream", "CUDAGraph", "stream", "graph", "current_stream", "set_stream")
_STATE = ("get_rng_state", "set_rng_state", "get_rng_state_all", "set_rng_state_all")


def install() -> None:
    """Once, by patches.install."""
    cuda: Any = torch.cuda
    answers: dict[str, Callable[..., Any]] = {
        "is_available": _is_available,
        "is_initialized": _is_available,
        "device_count": lambda mesh: int(_is_available(mesh)),
        "current_device": _current_device,
        "set_device": lambda mesh, device: _check_index(mesh, device),
        "init": lambda mesh: _check_index(mesh, 0),
        "get_device_properties": _properties,
        "manual_seed": lambda mesh, seed: _seed(seed),
        "manual_seed_all": lambda mesh, seed: _seed(seed),
    }
    answers |= {name: _ask_one(name) for name in _OF_ONE}
    answers |= {name: _ask_each(name) for name in _OF_EACH}
    answers |= {name: _run_on_each(name) for name in _ON_EACH}
    answers |= {name: _refuse(name) for name in _STATE}
    for name, answer in answers.items():
        if hasattr(cuda, name):
            patched = _answering(getattr(cuda, name), answer)
            for module in (cuda, cuda.memory, cuda.random):
                if hasattr(module, name):
                    setattr(module, name, patched)
    torch.set_num_threads = _answering(torch.set_num_threads, _set_threads)
    torch.get_num_threads = _answering(torch.get_num_threads, _get_threads)
    for name in _REFUSED:
        member = getattr(cuda, name, None)
        if isinstance(member, type):
            # A class stays one: others are derived from it, and isinstance is asked.
            member.__new__ = _refusing_new(name, member.__new__)  # type: ignore[method-assign]
        elif member is not None:
            setattr(cuda, name, _answering(member, _refuse(name)))


def _answering(original: Any, answer: Callable[..., Any]) -> Any:
    @functools.wraps(original)
    def run(*args: Any, **kwargs: Any) -> Any:
        mesh = active_mesh.get()
        return original(*args, **kwargs) if mesh is None else answer(mesh, *args, **kwargs)

    return run


def _refusing_new(name: str, original: Any) -> Any:
    def new(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if active_mesh.get() is not None:
            raise needs_remote(f"torch.cuda.{name}")
        return original(cls) if original is object.__new__ else original(cls, *args, **kwargs)

    return new


def _is_available(mesh: Any) -> bool:
    return bool(mesh.device == "cuda")


def _check_index(mesh: Any, device: Any) -> None:
    if not _is_available(mesh):
        raise RuntimeError(f"the workers of {mesh} are on the CPU: %mesh start gives a mesh of this machine's GPUs")
    index = device if isinstance(device, int) else torch.device(device).index
    if index not in (None, 0, -1):
        raise UsageValueError(f"cuda:{index}: each worker of {mesh} sees one GPU, as cuda:0")


def _current_device(mesh: Any) -> int:
    _check_index(mesh, 0)
    return 0


def _device_of(mesh: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    device = kwargs.get("device", args[0] if args else None)
    _check_index(mesh, 0 if device is None or isinstance(device, bool) else device)


def _asked(mesh: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    sent = [send_call(mesh, rank, f"torch.cuda.{name}", args, kwargs) for rank in mesh.ranks_key]
    return [future.result() for future in sent]


def _ask_one(name: str) -> Callable[..., Any]:
    def ask(mesh: Any, *args: Any, **kwargs: Any) -> Any:
        if name == "is_bf16_supported" and not _is_available(mesh):
            return False
        if name == "get_arch_list" and not _is_available(mesh):
            return []
        if name != "is_bf16_supported":
            _device_of(mesh, args, kwargs)
        return send_call(mesh, mesh.ranks_key[0], f"torch.cuda.{name}", args, kwargs).result()

    return ask


def _ask_each(name: str) -> Callable[..., Any]:
    def ask(mesh: Any, *args: Any, **kwargs: Any) -> Any:
        if not _is_available(mesh) and name.startswith(("memory", "max_memory")):
            return 0  # as torch's where CUDA was not used
        _device_of(mesh, args, kwargs)
        found = _asked(mesh, name, args, kwargs)
        if any(value != found[0] for value in found):
            listed = ", ".join(f"rank {rank}: {value}" for rank, value in zip(mesh.ranks_key, found, strict=True))
            raise UsageValueError(
                f"torch.cuda.{name} differs between the ranks ({listed}): ask one, with "
                f'ml.call_on_shard_and_fetch("torch.cuda.{name}", shard={{"gpu": 0}}).result(), or look at %mesh status'
            )
        return found[0]

    return ask


def _run_on_each(name: str) -> Callable[..., None]:
    def run(mesh: Any, *args: Any, **kwargs: Any) -> None:
        if _is_available(mesh):
            _device_of(mesh, args, kwargs)
            _asked(mesh, name, args, kwargs)

    return run


def _refuse(name: str) -> Callable[..., Any]:
    def refuse(mesh: Any, *args: Any, **kwargs: Any) -> Any:
        raise needs_remote(f"torch.cuda.{name}")

    return refuse


def _properties(mesh: Any, device: Any = None) -> Any:
    _check_index(mesh, 0 if device is None else device)
    return send_call(mesh, mesh.ranks_key[0], "monarch_lab.worker.devices.properties", ()).result()


def _set_threads(mesh: Any, count: int) -> None:
    for future in [send_call(mesh, rank, "torch.set_num_threads", (count,)) for rank in mesh.ranks_key]:
        future.result()


def _get_threads(mesh: Any) -> Any:
    return send_call(mesh, mesh.ranks_key[0], "torch.get_num_threads", ()).result()


def _seed(seed: int) -> None:
    """torch.manual_seed of the workers: each seeds its GPU with all its generators."""
    from monarch_lab.controller.random import seed_active

    seed_active(int(seed))
