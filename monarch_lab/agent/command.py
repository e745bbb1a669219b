"""How a host's agent starts one process: its command, environment, output, and what ties it to the agent."""

from __future__ import annotations

import os
import signal
import string
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from monarch_lab.config import MARK_VARIABLE
from monarch_lab.transport import platform
from monarch_lab.transport.interpreter import code_with_ours
from monarch_lab.wire.hosts import LaunchProcesses

# By name: the agent must not load the supervisor's folder, and the process does.
_BOOTSTRAP = code_with_ours("from monarch_lab.supervisor.bootstrap import main; main()")
_LOG_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
_LOG_MODE = 0o600


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What all processes of one agent have in common."""

    environ: Mapping[str, str]
    mark: str
    pipe: str


def identity(order: LaunchProcesses, index: int, pipe: str) -> dict[str, str]:
    """The variables that say which process it is: nothing overrides them."""
    rank = order.rank + index
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(order.world_size),
        "LOCAL_RANK": str(rank % order.per_host),
        "LOCAL_WORLD_SIZE": str(order.per_host),
        "SUPERVISOR_PIPE": pipe,
        "SUPERVISOR_IDENT": str(order.first + index),
    }


def environment(order: LaunchProcesses, index: int, around: Surroundings) -> dict[str, str]:
    """The agent's, then the user's with ``$RANK`` and the like filled in, then who it is."""
    own = identity(order, index, around.pipe)
    asked = {name: string.Template(text).safe_substitute(own) for name, text in order.env.items()}
    return {**around.environ, **asked, **own, MARK_VARIABLE: around.mark}


def start_command(
    order: LaunchProcesses, index: int, around: Surroundings, open_stderr: Callable[[], int]
) -> tuple[int, str, str]:
    """(pid, path of its log or "", why the log cannot be written or ""). Raises what the system says of the command.

    ``open_stderr`` gives the descriptor for stderr where there is no log; it is closed here.
    """
    argv = order.argv or [sys.executable, "-c", _BOOTSTRAP]
    log_fd, trouble = _open_log(order.logs[index])
    output_fd = log_fd if log_fd >= 0 else open_stderr()
    try:
        child = subprocess.Popen(
            argv,
            env=environment(order, index, around),
            cwd=order.cwd or None,
            stdin=subprocess.DEVNULL,
            stdout=log_fd if log_fd >= 0 else None,
            stderr=output_fd,
            start_new_session=True,
            preexec_fn=_tie_to(os.getpid()),  # no other Python thread here holds a lock that it needs
        )
    finally:
        os.close(output_fd)
    # The agent collects its children itself; Popen must not try to.
    child.returncode = 0
    return child.pid, order.logs[index] if log_fd >= 0 else "", trouble


def _open_log(path: str) -> tuple[int, str]:
    if not path:
        return -1, ""
    try:
        os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
        return os.open(path, _LOG_FLAGS, _LOG_MODE), ""
    except OSError as e:
        return -1, f"its log {path} cannot be written ({e.strerror}); its output goes where its agent's goes"


def _tie_to(agent: int) -> Callable[[], None]:
    def tie() -> None:
        for sig in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGCHLD):
            signal.signal(sig, signal.SIG_DFL)
        platform.set_parent_death_signal()
        if os.getppid() != agent:
            os._exit(1)

    return tie
