"""The mark that every process of a mesh carries in its environment, and the sweep of those whose kernel has ended.

A mark names the kernel for good: pid and start time, and where those numbers mean anything (boot, pid namespace). It is
no secret and proves nothing. The sweep is for what an agent and its guard, killed with their kernel, could not end.
"""

from __future__ import annotations

import os
import secrets
from functools import partial

from monarch_lab.config import MARK_VARIABLE
from monarch_lab.transport import platform

_PARTS = 5


def make_mark() -> str:
    """Of a mesh of this process."""
    started = platform.start_time(os.getpid())
    return "/".join(
        (secrets.token_hex(16), str(os.getpid()), str(started), platform.pid_namespace(), platform.boot_id())
    )


def is_orphaned(mark: str) -> bool:
    """Whether the kernel of a mark made on this boot, in this pid namespace, has ended. Of any other: False."""
    parts = mark.split("/")
    if len(parts) != _PARTS or parts[3:] != [platform.pid_namespace(), platform.boot_id()] or not parts[3]:
        return False
    if not (parts[1].isdecimal() and parts[2].isdecimal()):
        return False
    return platform.start_time(int(parts[1])) != int(parts[2])


def sweep_orphans() -> int:
    """SIGKILL the processes of this user whose mesh's kernel has ended; how many were found. Linux alone."""
    found = 0
    for pid in platform.all_pids():
        mark = platform.variable_of(pid, MARK_VARIABLE)
        if mark and is_orphaned(mark) and platform.is_own(pid):
            found += platform.kill_checked(pid, partial(_has_mark, pid, mark))
    return found


def _has_mark(pid: int, mark: str) -> bool:
    return platform.variable_of(pid, MARK_VARIABLE) == mark
