"""The agent as the kernel's child: started with its spec on stdin, seen to end, ended if it must be."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

from monarch_lab.transport import platform
from monarch_lab.transport.stream import write_message
from monarch_lab.wire.codec import encode
from monarch_lab.wire.supervision import AgentSpec

_PACKAGE_PARENT = str(Path(__file__).resolve().parents[2])
_TAIL_BYTES = 4096


def launch_agent(spec: AgentSpec, environ: dict[str, str], fds: Sequence[int]) -> AgentProcess:
    """Start it, with these descriptors. ``environ`` is the kernel's own; the key is in nothing that others can see."""
    path = [entry for entry in (environ.get("PYTHONPATH"), _PACKAGE_PARENT) if entry]
    log = open(os.path.join(spec.directory, "agent.log"), "a+b", buffering=0)  # noqa: SIM115 - AgentProcess closes it
    try:
        popen = subprocess.Popen(
            [sys.executable, "-m", "monarch_lab.agent"],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            # An empty directory: -m searches the current one first, and a notebook's may hold a random.py.
            cwd=spec.directory,
            env={**environ, "PYTHONPATH": os.pathsep.join(path)},
            pass_fds=fds,
            start_new_session=True,
        )
    except BaseException:
        log.close()
        raise
    agent = AgentProcess(popen, log)
    assert popen.stdin is not None
    try:
        write_message(popen.stdin.fileno(), encode(spec))
    except BrokenPipeError:
        pass  # it ended at once: seen by end_fd, with its last lines
    return agent


class AgentProcess:
    """A running agent. ``close`` it after its end, or to make it end: its stdin is the leash."""

    def __init__(self, popen: subprocess.Popen[bytes], log: BinaryIO) -> None:
        self._popen = popen
        # Held open: the guard may remove the directory before the last lines are asked for.
        self._log = log
        self.pid = popen.pid
        # Readable when it has ended; None where there is no such thing: then ask has_ended() now and then.
        self.end_fd = platform.open_pidfd(self.pid)

    def activity(self) -> str:
        """The state letter of /proc; "?" where that does not say."""
        used = platform.usage(self.pid)
        return used[2] if used is not None else "?"

    def has_ended(self) -> bool:
        return self._popen.poll() is not None

    def wait(self, within_s: float) -> bool:
        try:
            self._popen.wait(max(0.0, within_s))
        except subprocess.TimeoutExpired:
            return False
        return True

    def kill(self) -> None:
        """SIGKILL; the guard ends what is below it."""
        if self._popen.poll() is None:
            self._popen.send_signal(signal.SIGKILL)

    def end_text(self) -> str:
        """How it ended: "was killed by SIGKILL"."""
        code = self._popen.poll()
        if code is None:
            return "runs"
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"

    def last_lines(self) -> str:
        self._log.seek(max(0, os.fstat(self._log.fileno()).st_size - _TAIL_BYTES))
        return self._log.read().decode(errors="replace").strip()

    def close(self) -> None:
        assert self._popen.stdin is not None
        try:
            self._popen.stdin.close()
        except OSError:
            pass
        self._log.close()
        if self.end_fd is not None:
            os.close(self.end_fd)
            self.end_fd = None
