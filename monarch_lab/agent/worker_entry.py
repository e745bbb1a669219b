"""A freshly forked child of the zygote becomes a worker: own session, own output files, own environment.

Runs in the worker, on its main thread, and never returns.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import os
import signal
import sys
import time
import traceback
from typing import NoReturn

from monarch_lab.transport import platform
from monarch_lab.wire.supervision import WorkerSpec

_OUTPUT_MODE = 0o600


def become_worker(spec: WorkerSpec) -> NoReturn:
    code = 1
    try:
        _reset_signals()
        _bind_to_agent(spec)
        os.setsid()  # a signal to the group reaches what the user's code starts
        _redirect_output(spec)
        _adopt_surroundings(spec)
        # By name, and imported by the zygote before: the agent's folder must not depend on the worker's.
        importlib.import_module(spec.worker_module).run(spec)
        code = 0
    except SystemExit as e:
        code = _exit_code(e)
    except BaseException:
        traceback.print_exc()
    finally:
        _flush()
        # Not sys.exit: the interpreter below is a copy of the zygote's, whose frames must not be unwound twice.
        os._exit(code)


def _reset_signals() -> None:
    for sig in (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(sig, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


def _bind_to_agent(spec: WorkerSpec) -> None:
    """Wait to become the agent's child, then die with it."""
    deadline = time.monotonic() + spec.hello_s
    while os.getppid() != spec.agent_pid:
        # The process between us and the zygote ends within microseconds; where there is no subreaper init takes us.
        if os.getppid() == 1 and spec.agent_pid != 1 and not platform.LINUX:
            return
        if time.monotonic() > deadline or not platform.is_alive(spec.agent_pid):
            os._exit(1)
        os.sched_yield()
    platform.set_parent_death_signal()
    if os.getppid() != spec.agent_pid:
        os._exit(1)


def _redirect_output(spec: WorkerSpec) -> None:
    append = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    for fd, path, flags, inherited in (
        (0, os.devnull, os.O_RDONLY, -1),
        (1, spec.stdout_path, append, spec.output_fds[0]),
        (2, spec.stderr_path, append, spec.output_fds[1]),
    ):
        opened = _opened(path, flags) if path else inherited
        os.dup2(opened, fd)
        os.close(opened)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    # A crash in C leaves a stack in last_lines; with those of all threads its first lines would be cut off.
    faulthandler.enable(all_threads=False)


def _opened(path: str, flags: int) -> int:
    try:
        return os.open(path, flags, _OUTPUT_MODE)
    except OSError as e:  # a full disk: the worker's work does not hang on its log
        print(f"{path} cannot be written: {e.strerror}; what goes there is lost", file=sys.stderr)
        return os.open(os.devnull, flags)


def _adopt_surroundings(spec: WorkerSpec) -> None:
    for name in spec.without:
        os.environ.pop(name, None)
    os.environ.update(spec.env)
    sys.path[:] = spec.python_path or sys.path
    sys.argv[:] = [""]
    try:
        os.chdir(spec.cwd)
    except OSError as e:
        print(f"rank {spec.rank} stays in {os.getcwd()}: {e}", file=sys.stderr)
    gc.enable()


def _exit_code(e: SystemExit) -> int:
    if e.code is None:
        return 0
    if isinstance(e.code, int):
        return e.code & 0xFF
    print(e.code, file=sys.stderr)
    return 1


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            pass
