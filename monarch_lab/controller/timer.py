"""Timers on the workers: started and stopped in their place among the ops of the active mesh.

``ExecutionTimer`` is the class itself, for code that runs in a remote function or in the notebook.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from monarch_lab.controller.remote_functions import remote
from monarch_lab.tensors.timer import ExecutionTimer

__all__ = ["ExecutionTimer", "latest", "mean", "reset", "start", "stop", "time"]

_PLACE = "monarch_lab.worker.builtins"
_start, _stop, _reset = (
    remote(f"{_PLACE}.{name}_timer", propagate=lambda *a: None) for name in ("start", "stop", "reset")
)
_latest, _mean = (
    remote(f"{_PLACE}.{name}_time", propagate=lambda name: torch.empty((), dtype=torch.float64))
    for name in ("latest", "mean")
)


def start(name: str = "default", *, use_cpu: bool = False) -> None:
    """Start a timer on each process of the active mesh, after the ops issued so far. See ExecutionTimer."""
    _start(name, use_cpu)


def stop(name: str = "default") -> None:
    """Stop it, after the ops issued so far."""
    _stop(name)


@contextmanager
def time(name: str = "default", *, use_cpu: bool = False) -> Iterator[None]:
    """Times, on each process of the active mesh, the ops issued inside."""
    start(name, use_cpu=use_cpu)
    try:
        yield
    finally:
        stop(name)


def latest(name: str = "default") -> Any:
    """A 0-dim float64 mesh tensor: each process's last time, in milliseconds. Fails there with KeyError for none."""
    return _latest(name)


def mean(name: str = "default") -> Any:
    """A 0-dim float64 mesh tensor: the mean of each process's times, in milliseconds."""
    return _mean(name)


def reset(name: str | None = None) -> None:
    """Forget the times of one name, or of all, on each process of the active mesh."""
    _reset(name)
