"""Objects to bytes and back. The only unpickler of the package: called for authenticated peers alone.

Tensors and arrays travel as out-of-band buffers (pickle protocol 5); functions of a notebook travel by value,
under their own file name and with their source, so that tracebacks and pdb show the lines the user wrote.
"""

from __future__ import annotations

import ctypes
import importlib
import io
import linecache
import mmap
import pickle
import sys
import types
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import cloudpickle
import numpy as np
import torch
from cloudpickle import cloudpickle as _cloudpickle

from monarch_lab.errors import UsageTypeError

# No function mode: with a mesh active, torch's factories would make mesh tensors of what is packed here.
_plain = torch._C.DisableTorchFunction

_REFUSED = (
    "a mesh tensor cannot be pickled or captured by value: pass it as an argument, "
    "or take its value first with ml.inspect(t) or ml.fetch_all(t)"
)


def _rebuild(
    buffer: Any, dtype: torch.dtype, size: tuple[int, ...], stride: tuple[int, ...], flags: tuple[bool, bool, bool]
) -> torch.Tensor:
    # A buffer of the wire is read-only, unaligned and cannot be resized; a tensor's own memory is none of these. (Not
    # through flat.numpy(): a storage that numpy has seen cannot be resized any more.)
    if isinstance(buffer, mmap.mmap):  # private to us, aligned and writable: used where it is
        flat = torch.frombuffer(buffer, dtype=torch.uint8)
    else:
        flat = torch.empty(len(buffer), dtype=torch.uint8)
    if len(buffer) and not isinstance(buffer, mmap.mmap):
        ctypes.memmove(flat.data_ptr(), np.frombuffer(buffer, np.uint8).ctypes.data, len(buffer))
    out = torch.empty(0, dtype=dtype).set_(flat.untyped_storage(), 0, size, stride)
    requires_grad, conj, neg = flags
    if conj:
        out = torch._conj(out)
    if neg:
        out = torch._neg_view(out)
    return out.requires_grad_(True) if requires_grad else out


def _reduce_tensor(tensor: torch.Tensor) -> Any:
    """A dense CPU tensor as one buffer that spans its elements; NotImplemented for the rest."""
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested or tensor.device.type == "meta":
        return NotImplemented
    flags = (tensor.requires_grad, tensor.is_conj(), tensor.is_neg())
    plain = tensor.detach()
    if flags[1]:
        plain = plain.conj()
    if flags[2]:
        plain = torch._neg_view(plain)
    if plain._is_zerotensor():  # a gradient that is known zero, without memory behind it
        plain = plain.clone()
    plain = plain.cpu()
    span = 1 + sum((n - 1) * s for n, s in zip(plain.shape, plain.stride(), strict=True)) if plain.numel() else 0
    raw = torch.empty(0, dtype=torch.uint8).set_(
        plain.untyped_storage(), plain.storage_offset() * plain.element_size(), (span * plain.element_size(),), (1,)
    )
    buffer = pickle.PickleBuffer(raw.numpy())
    return _rebuild, (buffer, plain.dtype, tuple(plain.shape), plain.stride(), flags)


class _Pickler(cloudpickle.Pickler):
    def __init__(self, file: io.BytesIO, buffers: list[pickle.PickleBuffer], tensors: bool) -> None:
        super().__init__(file, protocol=5, buffer_callback=buffers.append)
        self.sources: dict[str, str] = {}
        self._tensors = tensors

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, torch.Tensor):
            if getattr(type(obj), "is_mesh_tensor", False):
                raise UsageTypeError(_REFUSED)
            if not self._tensors:
                raise UsageTypeError(
                    "a remote function gives its tensors in tuples, lists, dicts and named tuples, not in other objects"
                )
            if type(obj) is torch.Tensor:
                return _reduce_tensor(obj)
        if isinstance(obj, types.ModuleType) and type(obj) is not types.ModuleType:
            # torch.backends and its parts, lazy modules of other libraries: cloudpickle knows none but plain ones.
            name = next((name for name, module in sys.modules.items() if module is obj), "")
            if name:
                return importlib.import_module, (name,)
        if isinstance(obj, types.CodeType):
            # cloudpickle calls every file <dynamic-code>; keep the name and take the lines along.
            name = obj.co_filename
            if not name.startswith(sys.prefix) and (lines := linecache.getlines(name)):
                self.sources[name] = "".join(lines)
            make, arguments = _cloudpickle._code_reduce(obj)[:2]
            return make, tuple(name if a == "<dynamic-code>" else a for a in arguments)
        return super().reducer_override(obj)


def dumps(value: Any, *, tensors: bool = True, copy: bool = True) -> tuple[list[bytes | memoryview], dict[str, str]]:
    """(frames, sources): the pickle and its buffers, and the sources of the functions in it.

    Large frames leave the process some time after they were handed over. So they are copies; without ``copy`` they are
    the memory of the tensors and arrays, for who copies it before these can be written to.

    Raises UsageTypeError for what cannot be sent, a mesh tensor or, without ``tensors``, any tensor.
    """
    file, buffers = io.BytesIO(), []  # type: ignore[var-annotated]
    pickler = _Pickler(file, buffers, tensors)
    try:
        with _plain():
            pickler.dump(value)
    except UsageTypeError:
        raise
    except (pickle.PicklingError, TypeError, AttributeError) as e:
        raise UsageTypeError(f"this value cannot be sent to the workers: {e}") from e
    frames: list[bytes | memoryview] = [file.getvalue()]
    frames += [bytes(b.raw()) if copy else b.raw() for b in buffers]
    return frames, pickler.sources


def fill(memory: mmap.mmap, frame: bytes | memoryview) -> None:
    """Copy a writable frame to the beginning of ``memory``, on all cores and without the interpreter's lock."""
    with _plain():
        source = torch.frombuffer(frame, dtype=torch.uint8)
        torch.frombuffer(memory, dtype=torch.uint8, count=len(source)).copy_(source)


class _InBand(tuple):
    """The frames of a pickle, in one pickle."""


def pack(value: Any, *, tensors: bool = True) -> tuple[bytes, dict[str, str]]:
    """As dumps, in one frame: for small things."""
    frames, sources = dumps(value, tensors=tensors)
    if len(frames) > 1:
        frames = [pickle.dumps(_InBand((frames[0], *(bytes(f) for f in frames[1:]))))]
    return bytes(frames[0]), sources


def unpack(frame: bytes | memoryview) -> Any:
    value = pickle.loads(frame)
    return loads(value) if type(value) is _InBand else value


def loads(frames: Sequence[bytes | memoryview | mmap.mmap]) -> Any:
    """Opens what :func:`dumps` made. Only for frames of a peer that has proved the mesh's key."""
    with _plain():
        return pickle.loads(frames[0], buffers=frames[1:])


class _AroundPickler(_Pickler):
    """Leaves places where the mesh tensors of an object were."""

    def __init__(self, file: io.BytesIO, buffers: list[pickle.PickleBuffer]) -> None:
        super().__init__(file, buffers, tensors=True)
        self.left_out: list[Any] = []
        self._places: dict[int, int] = {}

    def persistent_id(self, obj: Any) -> Any:
        if not getattr(type(obj), "is_mesh_tensor", False):
            return None
        place = self._places.setdefault(id(obj), len(self.left_out))
        if place == len(self.left_out):
            self.left_out.append(obj)
        return place, obj._is_param


class _AroundUnpickler(pickle.Unpickler):
    def __init__(self, frames: Sequence[bytes | memoryview], tensors: Sequence[Any]) -> None:
        super().__init__(io.BytesIO(frames[0]), buffers=frames[1:])
        self._given = tensors

    def persistent_load(self, pid: Any) -> Any:
        place, is_param = pid
        tensor = self._given[place]
        if is_param:
            tensor._is_param = True  # what makes isinstance(t, nn.Parameter) hold
        return tensor


def dumps_around(value: Any) -> tuple[tuple[bytes, ...], list[Any], dict[str, str]]:
    """(frames, tensors, sources) of an object, a module for one, without the mesh tensors in it.

    Raises UsageTypeError for what cannot be sent.
    """
    file, buffers = io.BytesIO(), []  # type: ignore[var-annotated]
    pickler = _AroundPickler(file, buffers)
    try:
        with _plain():
            pickler.dump(value)
    except UsageTypeError:
        raise
    except (pickle.PicklingError, TypeError, AttributeError) as e:
        raise UsageTypeError(f"this value cannot be sent to the workers: {e}") from e
    return (file.getvalue(), *(bytes(b.raw()) for b in buffers)), pickler.left_out, pickler.sources


def loads_around(frames: Sequence[bytes | memoryview], tensors: Sequence[Any]) -> Any:
    """Opens what :func:`dumps_around` made, with ``tensors`` in the places of those left out. As :func:`loads`."""
    with _plain():
        return _AroundUnpickler(frames, tensors).load()


_MOST_SOURCES = 4096
_remembered: OrderedDict[str, None] = OrderedDict()  # the files whose lines came from the kernel, the oldest first


def remember_sources(sources: dict[str, str]) -> None:
    """Let tracebacks, inspect and pdb find these files' lines. No time stamp: linecache then never drops them; the
    oldest go where there are too many."""
    for name, text in sources.items():
        _remembered.pop(name, None)
        _remembered[name] = None
        linecache.cache[name] = (len(text), None, text.splitlines(True), name)
    while len(_remembered) > _MOST_SOURCES:
        linecache.cache.pop(_remembered.popitem(last=False)[0], None)
