"""What the agent knows of its children, and how it starts the two that are not workers. No sockets of the mesh here.

Runs on: the agent's only thread. Children are collected in one place, by ``collect``; nobody else waits for them.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from monarch_lab.transport import platform
from monarch_lab.transport.interpreter import code_with_ours
from monarch_lab.wire.supervision import ProcessExited, ProcessUsage

_TAIL_BYTES = 8192
_TAIL_LINES = 20


def spawn(
    module: str,
    call: str,
    *,
    args: Sequence[str] = (),
    flags: Sequence[str] = (),
    env: Mapping[str, str],
    fds: Sequence[int] = (),
    output: int | None = None,
) -> int:
    """Start our own ``module`` in a fresh interpreter; its pid.

    The path is set inside, not by PYTHONPATH: that one would be inherited by whatever the workers start.
    """
    code = code_with_ours(f"from {module} import main; {call}")
    child = subprocess.Popen(
        [sys.executable, *flags, "-c", code, *args],
        env=dict(env),
        pass_fds=[fd for fd in fds if fd >= 0],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        start_new_session=True,
    )
    # The agent collects its children itself; Popen must not try to.
    child.returncode = 0
    return child.pid


def start_zygote(env: Mapping[str, str], log_path: str, fds: Sequence[int] = ()) -> tuple[int, socket.socket]:
    """(pid, our end of the pair). It has ``fds`` too, for the workers."""
    ours, theirs = socket.socketpair()
    with theirs, open(log_path, "ab", buffering=0) as log:
        fd = theirs.fileno()
        pid = spawn("monarch_lab.agent.zygote", f"main({fd})", env=env, fds=[fd, *fds], output=log.fileno())
    return pid, ours


def start_guard(env: Mapping[str, str], args: Sequence[str], fds: Sequence[int]) -> int:
    return spawn("monarch_lab.agent.guard", "main()", args=args, flags=("-I", "-S"), env=env, fds=fds)


def size_of(path: str) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return 0


def last_lines(path: str, since: int = 0) -> str:
    """The end of a text file, of what was written after its byte ``since``; "" when it cannot be read."""
    try:
        with open(path, "rb") as file:
            file.seek(max(since, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
            text = file.read(_TAIL_BYTES).decode(errors="replace").replace("\0", "")
    except OSError:
        return ""
    return "\n".join(text.splitlines()[-_TAIL_LINES:])


@dataclass(slots=True)
class Child:
    process: int
    pid: int
    stderr_path: str
    stderr_since: int = 0  # where its own lines begin in that file
    ended_by_us: bool = False


class Children:
    """The workers that run, by number and by pid."""

    def __init__(self) -> None:
        self._by_process: dict[int, Child] = {}
        self._by_pid: dict[int, Child] = {}
        # A worker may end before the zygote's word of it is read: its end waits here for its name.
        self._early: dict[int, int] = {}
        # Of the last two beats: the count goes up before the end is seen, and a beat may fall between.
        self._memory_kills: deque[int | None] = deque([platform.count_out_of_memory_kills()], maxlen=2)

    def __len__(self) -> int:
        return len(self._by_process)

    def add(self, child: Child) -> ProcessExited | None:
        """Take note of a forked worker; its end, if that came first."""
        self._by_process[child.process] = child
        self._by_pid[child.pid] = child
        code = self._early.pop(child.pid, None)
        return None if code is None else self._exited(child, code)

    def collect(self, expecting: bool) -> tuple[list[ProcessExited], list[tuple[int, int]]]:
        """All children that have ended: workers, and (pid, code) of the others.

        ``expecting``: a fork was asked for and not answered, so that an unknown child may be a worker.
        """
        workers: list[ProcessExited] = []
        others: list[tuple[int, int]] = []
        if not expecting:
            self._early.clear()
        while True:
            pid = platform.peek_ended_child()
            if pid in self._by_pid:
                # What it had started goes with it, while its number still names its group.
                platform.send_signal(pid, signal.SIGKILL, group=True)
            found = platform.collect_child(-1 if pid is None else pid)
            if found is None:
                return workers, others
            pid, code = found
            child = self._by_pid.get(pid)
            if child is not None:
                workers.append(self._exited(child, code))
                continue
            others.append(found)
            if expecting:
                self._early[pid] = code

    def signal(self, process: int, sig: int, group: bool = False) -> None:
        child = self._by_process.get(process)
        if child is None:
            return
        child.ended_by_us = child.ended_by_us or sig == signal.SIGKILL
        # Before its setsid a new worker has no group of its own yet.
        if not (group and platform.send_signal(child.pid, sig, group=True)):
            platform.send_signal(child.pid, sig)

    def signal_all(self, sig: int) -> None:
        for process in self._by_process:
            self.signal(process, sig, group=True)

    def usage(self) -> list[ProcessUsage]:
        """For a beat."""
        self._memory_kills.append(platform.count_out_of_memory_kills())
        seen = ((child.process, platform.usage(child.pid)) for child in self._by_process.values())
        return [ProcessUsage(process, *used) for process, used in seen if used is not None]

    def _exited(self, child: Child, code: int) -> ProcessExited:
        del self._by_process[child.process], self._by_pid[child.pid]
        out_of_memory = False
        if code == -signal.SIGKILL and not child.ended_by_us:
            out_of_memory = self._memory_kills_went_up()
        return ProcessExited(
            child.process, child.pid, code, out_of_memory, last_lines(child.stderr_path, child.stderr_since)
        )

    def _memory_kills_went_up(self) -> bool:
        before, now = self._memory_kills[0], platform.count_out_of_memory_kills()
        return before is not None and now is not None and now > before
