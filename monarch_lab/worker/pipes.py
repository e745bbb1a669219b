"""Pipes of this worker: each has a side process, started here and ended with its last reference."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import weakref
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

from monarch_lab.tensors import payload
from monarch_lab.tensors.opaque import OpaqueRef
from monarch_lab.transport.interpreter import code_with_ours
from monarch_lab.worker import children
from monarch_lab.worker.groups import current
from monarch_lab.worker.pipe_end import PipeEnd

_MAIN = "from monarch_lab.worker.pipe_process import main"  # not loaded here
_STOP_S = 2.0


def open_pipe(
    function: Callable[..., Any] | str, is_generator: bool, max_messages: int, mesh: int, args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> OpaqueRef:  # fmt: skip
    """Starts the side process and returns a reference to this side's end."""
    ranks, sizes = current().place(mesh)
    ours, theirs = Pipe()
    with theirs:
        fd = theirs.fileno()
        process = subprocess.Popen(
            [sys.executable, "-c", code_with_ours(f"{_MAIN}; main({fd}, {os.getpid()})")],
            pass_fds=[fd],
            stdin=subprocess.DEVNULL,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        )
    children.spare(process.pid)
    order, sources = payload.pack((function, is_generator, args, kwargs))
    ours.send((max_messages, ranks, sizes))
    ours.send_bytes(order)
    ours.send(sources)
    end = PipeEnd(ours, max_messages, ranks, sizes)
    weakref.finalize(end, _stop, ours, process)
    return OpaqueRef(end)


def _stop(link: Connection, process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(OSError):
        link.close()
    process.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_STOP_S)


def send(ref: OpaqueRef, value: Any) -> None:
    ref.value.send(value)


def recv(ref: OpaqueRef) -> Any:
    return ref.value.recv()
