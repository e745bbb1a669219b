"""Named timers of a process: how long the code, or the GPU, between start and stop took."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch

from monarch_lab.errors import UsageRuntimeError


class ExecutionTimer:
    """``with ExecutionTimer.time("forward"): ...`` and then ``ExecutionTimer.latest("forward")``, in milliseconds.

    On a GPU the time is between two events in its current stream, so that nothing waits before a time is read;
    ``use_cpu=True``, or a process without a GPU, takes the CPU's clock. One set of timers for the process.
    """

    _running: ClassVar[dict[str, tuple[Any, bool]]] = {}
    _done: ClassVar[dict[str, list[Any]]] = {}

    @classmethod
    def start(cls, name: str = "default", *, use_cpu: bool = False) -> None:
        """RuntimeError where it runs already."""
        if name in cls._running:
            raise UsageRuntimeError(f"timer {name!r} runs already: stop it first")
        on_gpu = torch.cuda.is_available() and not use_cpu
        cls._running[name] = (_event() if on_gpu else time.perf_counter(), on_gpu)

    @classmethod
    def stop(cls, name: str = "default") -> None:
        """RuntimeError where it does not run."""
        if name not in cls._running:
            raise UsageRuntimeError(f"timer {name!r} does not run: start it first")
        began, on_gpu = cls._running.pop(name)
        cls._done.setdefault(name, []).append((began, _event()) if on_gpu else 1e3 * (time.perf_counter() - began))

    @classmethod
    @contextmanager
    def time(cls, name: str = "default", *, use_cpu: bool = False) -> Iterator[None]:
        """Times what is inside."""
        cls.start(name, use_cpu=use_cpu)
        try:
            yield
        finally:
            cls.stop(name)

    @classmethod
    def measurements(cls, name: str = "default") -> list[float]:
        """Every time of this name, in milliseconds and in order. KeyError where there is none."""
        if name not in cls._done:
            raise KeyError(f"timer {name!r} was never stopped; there are {sorted(cls._done) or 'none'}")
        taken = cls._done[name] = [_read(m) for m in cls._done[name]]
        return list(taken)

    @classmethod
    def latest(cls, name: str = "default") -> float:
        """The last time, in milliseconds. KeyError where there is none."""
        return cls.measurements(name)[-1]

    @classmethod
    def summary(cls) -> dict[str, dict[str, float]]:
        """name -> count, total, mean, min and max, in milliseconds."""
        table = {}
        for name in cls._done:
            taken = cls.measurements(name)
            table[name] = {
                "count": float(len(taken)),
                "total": sum(taken),
                "mean": sum(taken) / len(taken),
                "min": min(taken),
                "max": max(taken),
            }
        return table

    @classmethod
    def reset(cls, name: str | None = None) -> None:
        """Forget the times of one name, or of all; running timers too."""
        for kept in (cls._running, cls._done):
            if name is None:
                kept.clear()
            else:
                kept.pop(name, None)


def _event() -> Any:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _read(measurement: Any) -> float:
    if isinstance(measurement, tuple):
        began, ended = measurement
        ended.synchronize()
        return float(began.elapsed_time(ended))
    return float(measurement)
