"""A tiny process beside the agent. When kernel or agent has ended it ends what carries the mesh's mark.

It covers what the agent cannot: its own SIGKILL, with grandchildren in sessions of their own. Started with
``python -I -S``: standard library and transport.platform only. It carries no mark itself, or it would be swept.
"""

from __future__ import annotations

import shutil
import signal
import sys
import time

from monarch_lab.transport import platform

# Between two passes over /proc: a killed process needs a moment to go, and its children to show up.
_BETWEEN_SWEEPS_S = 0.01


def main() -> None:
    """argv: kernel pid, its pidfd (or -1), agent pid, its pidfd (or -1), mark variable, mark, directory."""
    kernel, kernel_fd, agent, agent_fd = (int(text) for text in sys.argv[1:5])
    variable, mark, directory = sys.argv[5:8]
    for sig in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(sig, signal.SIG_IGN)
    platform.wait_for_end((kernel, agent), [fd for fd in (kernel_fd, agent_fd) if fd >= 0])
    # The agent ends by itself when the kernel is gone; one that is stopped or stuck would stay.
    if agent_fd >= 0:
        try:
            signal.pidfd_send_signal(agent_fd, signal.SIGKILL)
        except ProcessLookupError:
            pass
    while platform.kill_marked(variable, mark):
        time.sleep(_BETWEEN_SWEEPS_S)
    shutil.rmtree(directory, ignore_errors=True)
