"""torch's process-wide switches (precision of products, cuDNN, attention kernels ...), read and set by name.

They are no state of a thread, and reading two dozen of them at each op would cost more than the op. So each of torch's
setters is wrapped where the kernel's state is watched, and a number stands for the values since the last change.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.backends

# name -> (getter, setter) of torch._C, of those that this torch has.
_PAIRS = {
    "cudnn.enabled": ("_get_cudnn_enabled", "_set_cudnn_enabled"),
    "cudnn.benchmark": ("_get_cudnn_benchmark", "_set_cudnn_benchmark"),
    "cudnn.deterministic": ("_get_cudnn_deterministic", "_set_cudnn_deterministic"),
    "mkldnn.enabled": ("_get_mkldnn_enabled", "_set_mkldnn_enabled"),
    "mkldnn.deterministic": ("_get_mkldnn_deterministic", "_set_mkldnn_deterministic"),
    "linalg": ("_get_linalg_preferred_backend", "_set_linalg_preferred_backend"),
    "fp16_reduction": (
        "_get_cublas_allow_fp16_reduced_precision_reduction",
        "_set_cublas_allow_fp16_reduced_precision_reduction",
    ),
    "bf16_reduction": (
        "_get_cublas_allow_bf16_reduced_precision_reduction",
        "_set_cublas_allow_bf16_reduced_precision_reduction",
    ),
    "fp16_accumulation": ("_get_cublas_allow_fp16_accumulation", "_set_cublas_allow_fp16_accumulation"),
    "sdp.flash": ("_get_flash_sdp_enabled", "_set_sdp_use_flash"),
    "sdp.mem_efficient": ("_get_mem_efficient_sdp_enabled", "_set_sdp_use_mem_efficient"),
    "sdp.math": ("_get_math_sdp_enabled", "_set_sdp_use_math"),
    "sdp.cudnn": ("_get_cudnn_sdp_enabled", "_set_sdp_use_cudnn"),
    "sdp.overrideable": ("_get_overrideable_sdp_enabled", "_set_sdp_use_overrideable"),
    "sdp.reduction": ("_get_math_sdp_allow_fp16_bf16_reduction", "_set_math_sdp_allow_fp16_bf16_reduction"),
    "sdp.priority": ("_get_sdp_priority_order", "_set_sdp_priority_order"),
    "fill": ("_get_deterministic_fill_uninitialized_memory", "_set_deterministic_fill_uninitialized_memory"),
    # Old names first: where the new ones (fp32_precision) were mixed with them torch refuses to read the old.
    "cudnn.allow_tf32": ("_get_cudnn_allow_tf32", "_set_cudnn_allow_tf32"),
    "matmul.allow_tf32": ("_get_cublas_allow_tf32", "_set_cublas_allow_tf32"),
    "mkldnn.allow_tf32": ("_get_onednn_allow_tf32", "_set_onednn_allow_tf32"),
    "matmul.precision": ("_get_float32_matmul_precision", "_set_float32_matmul_precision"),
}
_KNOWN = {name: pair for name, pair in _PAIRS.items() if all(hasattr(torch._C, part) for part in pair)}
_FP32 = "_set_fp32_precision_setter"
_FP32_OF = [("generic", "all")] + [(b, op) for b in ("cuda", "mkldnn") for op in ("all", "matmul", "conv", "rnn")]
_UNREADABLE = "unreadable"

Value = bool | int | str | tuple[int, ...]
Values = dict[str, Value]
_PREFIX = "switch "

number = 0  # stands for the kernel's values of this moment; equal values have equal numbers. 0: ask ``current``
_numbers: dict[tuple[Value, ...], int] = {}
_watched = False
_initial: Values = {}


def read() -> Values:
    """Every switch by name, as plain data."""
    found = {_PREFIX + name: _plain(_get(getattr(torch._C, getter))) for name, (getter, _) in _KNOWN.items()}
    if hasattr(torch._C, _FP32):
        for backend, op in _FP32_OF:
            value = _get(getattr(torch._C, "_get_fp32_precision_getter"), backend, op)  # noqa: B009
            found[f"{_PREFIX}fp32.{backend}.{op}"] = _plain(value)
    return found


def _get(getter: Any, *args: str) -> Any:
    try:
        return getter(*args)
    except RuntimeError:  # the old and the new names of one switch were mixed
        return _UNREADABLE


def _plain(value: Any) -> Value:
    if value is None:
        return _UNREADABLE
    if isinstance(value, (list, tuple)):
        return tuple(int(v) for v in value)
    return value if isinstance(value, (bool, str)) else int(value)


class Switches:
    """Brings this process's switches to what another's are. Runs on: the worker's main thread."""

    def __init__(self) -> None:
        self._now = read()

    def look(self) -> None:
        """Somebody else's code may have set some."""
        self._now = read()

    def apply(self, values: dict[str, Any]) -> None:
        """Raises what torch does where it has no such choice here."""
        for name, value in values.items():
            if not name.startswith(_PREFIX) or value == _UNREADABLE or self._now.get(name) == value:
                continue
            _set(name.removeprefix(_PREFIX), value)
            self._now = read()  # one may move another


def _set(name: str, value: Any) -> None:
    if name.startswith("fp32."):
        _, backend, op = name.split(".")
        getattr(torch._C, _FP32)(backend, op, value)
        return
    setter = getattr(torch._C, _KNOWN[name][1])
    if name == "linalg":
        setter(next(backend for backend in _linalg_backends() if int(backend) == value))
    elif name == "sdp.priority":
        setter(list(value))
    elif isinstance(value, tuple):
        setter(*map(bool, value))
    else:
        setter(value)


def _linalg_backends() -> list[Any]:
    return list(getattr(torch._C, "_LinalgBackend").__members__.values())  # noqa: B009


def watch() -> None:
    """Keep ``number`` current from now on: once, in the kernel."""
    global _watched, _initial
    _watched, _initial = True, read()
    for name in [setter for _, setter in _KNOWN.values()] + [_FP32]:
        original = getattr(torch._C, name, None)
        if original is not None:
            setattr(torch._C, name, _noting(original))
    prop = torch.backends.ContextProp  # holds the setters themselves
    prop.__set__ = _noting(prop.__set__)
    _forget()


def are_initial(values: dict[str, Any]) -> bool:
    """Whether they are as they were when the first mesh started, in an ambient state of the kernel."""
    # torch leaves "ieee", which is what "none" means, where a precision was set and put back.
    return all(values.get(name) in (value, "ieee" if value == "none" else value) for name, value in _initial.items())


def _noting(setter: Any) -> Any:
    @functools.wraps(setter)
    def run(*args: Any) -> Any:
        try:
            return setter(*args)
        finally:
            _forget()

    return run


def _forget() -> None:
    global number
    number = 0


def current() -> int:
    """``number``, read afresh. Where nothing watches, each call reads."""
    global number
    found = _numbers.setdefault(tuple(read().values()), len(_numbers) + 1)
    if _watched:
        number = found
    return found
