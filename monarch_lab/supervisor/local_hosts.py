"""Agents on this machine, started by the supervisor itself.

Runs on: the supervisor's loop.
"""

from __future__ import annotations

import os
import subprocess
import sys

from monarch_lab.transport import platform
from monarch_lab.transport.interpreter import code_with_ours
from monarch_lab.transport.keys import Invitation
from monarch_lab.transport.stream import write_message
from monarch_lab.wire.codec import encode
from monarch_lab.wire.hosts import LocalOwner

# By name: the kernel never loads the agent's folder. The path is set inside, since PYTHONPATH would be inherited.
_CODE = code_with_ours("from monarch_lab.agent.host import local; local()")
_STDERR = 2
_TAIL_BYTES = 4096


class LocalAgent:
    """A running agent; ``close`` it after its end, or to make it end: its stdin is a leash."""

    def __init__(self, invitation: Invitation, directory: str) -> None:
        """Starts it; OSError when the system cannot."""
        self.peer = invitation.peer
        own_fd = platform.open_pidfd(os.getpid())
        stderr_fd = _copy_of_stderr()
        fds = [fd for fd in (own_fd, stderr_fd) if fd is not None]
        path = os.path.join(directory, f"agent{invitation.peer}.log")
        log_fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._log = open(log_fd, "rb", buffering=0)  # noqa: SIM115 - closed by close()
        try:
            self._popen = subprocess.Popen(
                # -P: a random.py in the current directory is not ours to load.
                [sys.executable, "-P", "-c", _CODE],
                stdin=subprocess.PIPE,
                stderr=log_fd,
                pass_fds=fds,
                start_new_session=True,
            )
        except BaseException:
            self._log.close()
            raise
        finally:
            for fd in fds:
                os.close(fd)
        owner = LocalOwner(
            invitation=encode(invitation),
            pid=os.getpid(),
            pid_fd=-1 if own_fd is None else own_fd,
            stderr_fd=-1 if stderr_fd is None else stderr_fd,
        )
        self.pid = self._popen.pid
        # Readable when it has ended; None where there is no such thing: then ask has_ended() now and then.
        self.end_fd = platform.open_pidfd(self.pid)
        assert self._popen.stdin is not None
        self._stdin = self._popen.stdin
        try:
            write_message(self._stdin.fileno(), encode(owner))
        except BrokenPipeError:
            pass  # it ended at once: seen, with its last lines

    def has_ended(self) -> bool:
        return self._popen.poll() is not None

    def kill(self) -> None:
        """SIGKILL; its guard ends what is below it."""
        if self._popen.poll() is None:
            self._popen.kill()

    def end_text(self) -> str:
        """How it ended, and what it printed last."""
        code = self._popen.wait()
        how = f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"
        self._log.seek(max(0, os.fstat(self._log.fileno()).st_size - _TAIL_BYTES))
        printed = self._log.read().decode(errors="replace").strip()
        return f"its agent (pid {self.pid}) {how}" + (f"\n{printed}" if printed else "")

    def close(self) -> None:
        try:
            self._stdin.close()
        except OSError:
            pass
        self._log.close()
        if self.end_fd is not None:
            os.close(self.end_fd)
            self.end_fd = None


def _copy_of_stderr() -> int | None:
    """What processes without a log file inherit; the agent's own stderr goes into its log."""
    try:
        return os.dup(_STDERR)
    except OSError:
        return None
