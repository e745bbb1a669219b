"""A process with the worker's modules imported and nothing run; forks workers on request.

It runs no op, starts no thread and touches no device: a child forked beside a thread would hang. Each worker is
forked twice, so that it becomes the agent's child (its subreaper) and the agent alone collects it.

Speaks over one socket pair whose number is its argument: ZygoteSpec in, Ready out, then ForkWorker in, Forked or
ForkFailed out. It ends with the agent (parent-death signal, end of file).
"""

from __future__ import annotations

import gc
import importlib
import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import NoReturn

from monarch_lab.agent.worker_entry import become_worker
from monarch_lab.errors import ProtocolError
from monarch_lab.transport import platform
from monarch_lab.transport.stream import read_message, write_message
from monarch_lab.wire.codec import Decoder, encode
from monarch_lab.wire.supervision import Forked, ForkFailed, ForkWorker, Ready, ToZygote, WorkerSpec, ZygoteSpec

_decode = Decoder(ToZygote)
_decode_spec = Decoder(WorkerSpec)


def main(fd: int) -> None:
    for sig in (signal.SIGINT, signal.SIGHUP):
        signal.signal(sig, signal.SIG_IGN)
    first = read_message(fd)
    if first is None:
        return
    spec = _decode(first)
    platform.set_parent_death_signal()
    if not isinstance(spec, ZygoteSpec) or os.getppid() != spec.agent_pid:
        return
    write_message(fd, encode(_preload(spec)))
    while (order := read_message(fd)) is not None:
        write_message(fd, encode(_fork(_decode(order), fd)))


def _preload(spec: ZygoteSpec) -> Ready:
    began = time.monotonic()
    restore_priority = lower_priority() if spec.in_background else None
    gc.disable()  # a collection frees nothing of an import and walks all of it; the workers turn it on again
    _extend_path(spec.python_path)
    # By name: the agent's folder must not depend on torch or on the worker, and this process alone loads both.
    for name in (*spec.preload, spec.worker_module):
        importlib.import_module(name)
    _drop_threads()
    if restore_priority is not None:
        restore_priority()
    # What is here now lives for ever: taken out of the collector's sight, its pages stay shared with the workers.
    gc.freeze()
    torch = sys.modules.get("torch")
    return Ready(torch=str(getattr(torch, "__version__", "")), seconds=time.monotonic() - began)


def lower_priority(by: int = 10) -> Callable[[], None] | None:
    """Let others go first on the processor, until what is returned is called.

    None, and nothing changed, where the user may not undo it. Asked of a fork: it would be too late to ask oneself.
    """
    before = os.getpriority(os.PRIO_PROCESS, 0)
    trial = os.fork()
    if trial == 0:
        try:
            os.setpriority(os.PRIO_PROCESS, 0, before + by)
            os.setpriority(os.PRIO_PROCESS, 0, before)
        except BaseException:
            os._exit(1)
        os._exit(0)
    if os.waitpid(trial, 0)[1] != 0:
        return None
    os.setpriority(os.PRIO_PROCESS, 0, before + by)
    return partial(os.setpriority, os.PRIO_PROCESS, 0, before)


def _drop_threads() -> None:
    """A trial fork: libraries that look after forks (numpy's OpenBLAS) end their threads at the first one."""
    trial = os.fork()
    if trial == 0:
        os._exit(0)
    os.waitpid(trial, 0)
    if (threads := platform.thread_count()) > 1:
        print(f"{threads} threads run after the imports: a worker that needs what they hold may hang", file=sys.stderr)


def _extend_path(python_path: list[str]) -> None:
    sys.path[:] = [*python_path, *(entry for entry in sys.path if entry not in python_path)]


def _fork(order: ForkWorker, fd: int) -> Forked | ForkFailed:
    try:
        read_end, write_end = os.pipe()
        try:
            between = os.fork()
            if between == 0:
                _fork_again(order, fd, read_end, write_end)
            os.close(write_end)
            write_end = -1
            text = os.read(read_end, 64)
            os.waitpid(between, 0)
        finally:
            os.close(read_end)
            if write_end >= 0:
                os.close(write_end)
    except OSError as e:
        return ForkFailed(order.process, f"fork: {e}")
    if not text.isdigit():
        return ForkFailed(order.process, f"fork: {text.decode(errors='replace') or 'the child ended at once'}")
    return Forked(order.process, int(text))


def _fork_again(order: ForkWorker, fd: int, read_end: int, write_end: int) -> NoReturn:
    """Runs in the process between: forks the worker, tells its pid, ends."""
    try:
        worker = os.fork()
    except OSError as e:
        os.write(write_end, str(e).encode())
        os._exit(1)
    if worker == 0:
        for inherited in (fd, read_end, write_end):
            os.close(inherited)
        become_worker(_spec_of(order))
    os.write(write_end, b"%d" % worker)
    os._exit(0)


def _spec_of(order: ForkWorker) -> WorkerSpec:
    try:
        return _decode_spec(order.spec)
    except ProtocolError:
        os._exit(1)
