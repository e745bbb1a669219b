"""Which mesh is active, and the ambient state of the calling thread. Context variables: each task has its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import torch

from monarch_lab.tensors import ambient, saved, switches

if TYPE_CHECKING:
    from monarch_lab.controller.mesh import DeviceMesh
    from monarch_lab.controller.recorder import Recorder

# The Recorder of this thread, while a function given to ml.compile is recorded.
recorder: ContextVar[Recorder | None] = ContextVar("monarch_lab_recorder", default=None)
coalescing: ContextVar[bool] = ContextVar("monarch_lab_coalescing", default=False)  # inside such a block
active_stream: ContextVar[Any] = ContextVar("monarch_lab_active_stream", default=None)  # None: the default one
active_mesh: ContextVar[DeviceMesh | None] = ContextVar("monarch_lab_active_mesh", default=None)

_grad, _inference, _autocast = (
    torch.is_grad_enabled,
    torch.is_inference_mode_enabled,
    torch._C._is_any_autocast_enabled,
)
_default_dtype = torch.get_default_dtype
_deterministic = torch._C._get_deterministic_algorithms
_anomaly, _looks_for_nan = torch.is_anomaly_enabled, torch.is_anomaly_check_nan_enabled
_numbers: dict[tuple[Any, ...], int] = {}
_values: dict[int, dict[str, Any]] = {}
_fast: dict[tuple[Any, ...], int] = {}


@contextmanager
def standing_on(stream: Any) -> Iterator[None]:
    """The active stream of code that runs for what was issued on it, wherever it is asked for."""
    token = active_stream.set(stream)
    try:
        yield
    finally:
        active_stream.reset(token)


def ambient_number() -> int:
    """A number for the ambient state of this thread; equal states have equal numbers."""
    autocast = _autocast()
    switched = switches.number or switches.current()
    around = saved.was_used and saved.kind()
    wary = _anomaly() and 1 + _looks_for_nan()
    key = (_grad(), _inference(), autocast, _default_dtype(), _deterministic(), wary, switched, around)
    number = _fast.get(key)
    if number is not None and not autocast:
        return number
    values = ambient.capture()
    full = tuple(sorted(values.items()))
    number = _numbers.get(full)
    if number is None:
        number = _numbers[full] = len(_numbers) + 1
        _values[number] = values
    if not autocast:
        _fast[key] = number
    return number


def ambient_values(number: int) -> dict[str, Any]:
    return _values[number]


def is_process_wide(values: dict[str, Any]) -> bool:
    """Whether torch keeps some of this state for a whole process, where all streams of a worker would see it."""
    wide = values["deterministic"] or values["anomaly"] or values["dtype"] != "float32"
    return bool(wide) or not switches.are_initial(values)


def visible_gpus() -> int:
    """Number of GPUs that this process sees."""
    token = active_mesh.set(None)  # else they would answer for the mesh (devices.py)
    try:
        return torch.cuda.device_count() if torch.cuda.is_available() else 0
    finally:
        active_mesh.reset(token)
