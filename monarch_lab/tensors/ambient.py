"""State around an op that changes what it does: captured in the controller, applied on the worker.

``capture()`` is called only when the cheap test in controller/dispatch.py sees a change.
"""

from __future__ import annotations

from typing import Any

import torch

from monarch_lab.tensors import saved, switches
from monarch_lab.tensors.meta import dtype_name, dtype_named

_AUTOCAST_DEVICES = ("cpu", "cuda")


def anomaly() -> int:
    """0: off; 1: on; 2: on, and gradients are looked at for NaN."""
    return 1 + torch.is_anomaly_check_nan_enabled() if torch.is_anomaly_enabled() else 0


def capture() -> dict[str, Any]:
    """The ambient state of this thread, as plain data."""
    state: dict[str, Any] = {
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "dtype": dtype_name(torch.get_default_dtype()),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "deterministic_warn_only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "anomaly": anomaly(),
        "saved": saved.kind(),
        **switches.read(),
    }
    for device in _AUTOCAST_DEVICES:
        if torch.is_autocast_enabled(device):
            state["autocast_" + device] = dtype_name(torch.get_autocast_dtype(device))
    return state


class Applied:
    """Keeps a thread in one ambient state until the next ``apply``. Runs on: the worker's main thread."""

    def __init__(self) -> None:
        self._inference: Any = None
        self._switches = switches.Switches()
        # Its cache of cast weights is dropped at the end of a block, of which nothing is heard here when no op
        # follows: a weight changed between two blocks would be used as it was.
        torch.set_autocast_cache_enabled(False)

    def restore(self, state: dict[str, Any]) -> None:
        """After code that may have changed what is not its own."""
        self._switches.look()
        self.apply(state)

    def apply(self, state: dict[str, Any]) -> None:
        if self._inference is not None:
            self._inference.__exit__(None, None, None)
            self._inference = None
        if state["inference"]:
            self._inference = torch.inference_mode(True)
            self._inference.__enter__()
        torch.set_grad_enabled(state["grad"])
        torch.set_default_dtype(dtype_named(state["dtype"]))
        if torch.are_deterministic_algorithms_enabled() != state["deterministic"] or state["deterministic"]:
            torch.use_deterministic_algorithms(state["deterministic"], warn_only=state["deterministic_warn_only"])
        if anomaly() != state["anomaly"]:
            torch.autograd.set_detect_anomaly(state["anomaly"] > 0, check_nan=state["anomaly"] == 2)
        if not state["saved"] and saved.held() is not None:
            saved.hold(None)
        self._switches.apply(state)
        for device in _AUTOCAST_DEVICES:
            wanted = state.get("autocast_" + device)
            torch.set_autocast_enabled(device, wanted is not None)
            if wanted is not None:
                torch.set_autocast_dtype(device, dtype_named(wanted))
