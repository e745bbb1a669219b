"""The worker's device: which GPU is its own, what is allocated there, and which backend carries a collective.

A worker of a GPU mesh sees one GPU, as ``cuda:0``. Workers that are more than the GPUs share them in turn. NCCL
refuses two ranks on one GPU, so groups of such ranks use gloo by way of host memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils._pytree import tree_iter, tree_map

from monarch_lab import config
from monarch_lab.wire import engine as wire
from monarch_lab.wire.supervision import WorkerSpec


def open_device(spec: WorkerSpec) -> None:
    """Before CUDA is touched: all hosts of a local mesh are this machine."""
    if spec.device == "cuda":
        config.narrow_to_gpu(spec.rank % spec.gpus)


def are_apart(ranks: Sequence[int], gpus: int) -> bool:
    """Whether no two of the ranks share a GPU."""
    return len({rank % gpus for rank in ranks}) == len(ranks) if gpus else False


def allocated_bytes() -> int:
    """What torch has reserved on this worker's GPU; 0 where CUDA was not used."""
    return torch.cuda.memory_reserved() if torch.cuda.is_initialized() else 0


class MemoryTeller:
    """Called ten times a second: reports what this worker's GPU holds, once a second and when it has changed."""

    def __init__(self, report: Callable[[Any], None]) -> None:
        self._report = report
        self._told = 0
        self._due = 0.0

    def __call__(self) -> None:
        now = time.monotonic()
        if now < self._due:
            return
        self._due = now + 1.0
        held = allocated_bytes()
        if held != self._told:
            self._told = held
            self._report(wire.DeviceMemory(held))


class Backend:
    """A group's collectives, each by the backend that its tensors need; the methods of torch's ProcessGroup.

    ``make_nccl`` is called at the first collective of tensors on a GPU, on every rank of the group alike; None where
    ranks of it share a GPU.
    """

    def __init__(self, gloo: Any, make_nccl: Callable[[], Any] | None) -> None:
        self.gloo = gloo
        self._make_nccl = make_nccl
        self._nccl: Any = None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)

        def run(*args: Any) -> Any:
            return self._run(name, args)

        self.__dict__[name] = run
        return run

    def _run(self, name: str, args: tuple[Any, ...]) -> Any:
        if not any(isinstance(a, torch.Tensor) and a.is_cuda for a in tree_iter(args)):
            return getattr(self.gloo, name)(*args)
        if self.nccl is None:
            return _Staged(getattr(self.gloo, name), args)
        return getattr(self.nccl, name)(*args)

    @property
    def nccl(self) -> Any:
        """Formed when it is first asked for, by every rank of the group at once; None where they share a GPU."""
        if self._nccl is None and self._make_nccl is not None:
            self._nccl = self._make_nccl()
        return self._nccl


class _Staged:
    """A collective of GPU tensors in host memory: copied there now, and back when it is waited for."""

    def __init__(self, call: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self._pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._work = call(*tree_map(self._host, args))

    def _host(self, leaf: Any) -> Any:
        if not (isinstance(leaf, torch.Tensor) and leaf.is_cuda):
            return leaf
        self._pairs.append((leaf, leaf.cpu()))
        return self._pairs[-1][1]

    def wait(self) -> bool:
        self._work.wait()
        for there, here in self._pairs:
            there.copy_(here)
        return True


def properties() -> SimpleNamespace:
    """``torch.cuda.get_device_properties`` of this worker's GPU, as something that travels."""
    found = torch.cuda.get_device_properties(0)
    names = [name for name in dir(found) if not name.startswith("_")]
    values = {name: getattr(found, name) for name in names}
    return SimpleNamespace(**{k: v if isinstance(v, (int, float, str)) else str(v) for k, v in values.items()})
