"""Small functions that notebooks call on every process: logging and timers."""

from __future__ import annotations

import logging
import sys
from typing import Any

import torch

from monarch_lab.tensors.timer import ExecutionTimer

logger = logging.getLogger("monarch_lab.remote")


class _Stderr(logging.StreamHandler[Any]):
    """Writes to what sys.stderr is now: the worker's goes to the cell."""

    @property
    def stream(self) -> Any:
        return sys.stderr

    @stream.setter
    def stream(self, value: Any) -> None:
        pass


def log(level: int, message: Any, *args: Any) -> None:
    if not logger.handlers:
        handler = _Stderr()
        handler.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
        logger.addHandler(handler)
        logger.propagate = False
    logger.log(level, message, *args)


def set_logging_level(level: int | str) -> None:
    logger.setLevel(level)


def start_timer(name: str, use_cpu: bool) -> None:
    ExecutionTimer.start(name, use_cpu=use_cpu)


def stop_timer(name: str) -> None:
    ExecutionTimer.stop(name)


def reset_timer(name: str | None) -> None:
    ExecutionTimer.reset(name)


def latest_time(name: str) -> torch.Tensor:
    return torch.tensor(ExecutionTimer.latest(name), dtype=torch.float64)


def mean_time(name: str) -> torch.Tensor:
    taken = ExecutionTimer.measurements(name)
    return torch.tensor(sum(taken) / len(taken), dtype=torch.float64)
