"""Small remote functions that are often wanted: logging on the workers."""

from __future__ import annotations

import logging
from typing import Any

from monarch_lab.controller.remote_functions import remote

__all__ = ["log_remote", "set_logging_level_remote"]

_log = remote("monarch_lab.worker.builtins.log", propagate=lambda *a: None)
_set_level = remote("monarch_lab.worker.builtins.set_logging_level", propagate=lambda level: None)


def log_remote(message: Any, *args: Any, level: int = logging.WARNING) -> None:
    """Log ``message % args`` on each process of the mesh (the arguments', or the active one), by its logger
    "monarch_lab.remote"; it appears in the cell with the rank. Mesh tensors among ``args`` are each process's own."""
    _log(level, message, *args)


def set_logging_level_remote(level: int | str) -> None:
    """From now on that logger lets through what is of this level or above. ValueError, there, for an unknown name."""
    _set_level(level)
