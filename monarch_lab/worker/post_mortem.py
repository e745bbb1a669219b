"""The frames of the last failure, kept for ``%mesh pm``.

One failure is kept, the last; it goes with the next one, and when it is told to. Its frames keep what their variables
hold: where the tensors among these are larger than ``MAX_KEPT_BYTES`` only its text is kept.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any

import torch

from monarch_lab.worker.debug_frames import users_traceback
from monarch_lab.worker.failures import text_of

MAX_KEPT_BYTES = 256 << 20


class LastFailure:
    """``cell`` is 0 where there was none. Any thread."""

    def __init__(self) -> None:
        self.cell = 0
        self.text = ""
        self.trace: TracebackType | None = None

    def note(self, error: BaseException, cell: int) -> None:
        trace = users_traceback(error.__traceback__)
        self.text = f"{type(error).__name__}: {text_of(error)}".splitlines()[0][:200]
        self.cell = max(cell, 1)
        self.trace = None
        if isinstance(error, KeyboardInterrupt):  # a loader's processes, say, end when its iterator goes
            self.text = f"{type(error).__name__}: nothing is kept of its frames"
        elif trace is None:
            self.text += ": raised by an op of torch, which has no Python frames on the worker"
        elif (size := _tensor_bytes(trace)) > MAX_KEPT_BYTES:
            self.text += (
                f": its frames held {size / 2**20:.0f} MiB of tensors, and up to {MAX_KEPT_BYTES >> 20} MiB are kept: "
                "run the cell again with %%spmd --debug or a breakpoint()"
            )
        else:
            self.trace = trace

    def forget(self) -> None:
        self.cell, self.text, self.trace = 0, "", None


def _tensor_bytes(trace: TracebackType | None) -> int:
    storages: dict[int, int] = {}
    while trace is not None:
        for value in list(trace.tb_frame.f_locals.values()):
            for tensor in _tensors(value):
                try:
                    storage = tensor.untyped_storage()
                    storages[storage.data_ptr()] = storage.nbytes()
                except (RuntimeError, NotImplementedError):  # sparse, and the like
                    continue
        trace = trace.tb_next
    return sum(storages.values())


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [v for v in value if isinstance(v, torch.Tensor)] if isinstance(value, (list, tuple)) else []
