"""The end of everything below the agent: by recorded process and descent, and by the mark for who escaped."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection

from monarch_lab.config import MARK_VARIABLE
from monarch_lab.transport import platform

_BETWEEN_SWEEPS_S = 0.002


def end_everything(mark: str, spare: Collection[int], within_s: float, collect: Callable[[], None]) -> bool:
    """SIGKILL and ``collect`` all descendants but ``spare``, until a pass finds none; False when time is up.

    Orphans come to the agent (it is their subreaper), so that a pass finds what the one before uncovered.
    """
    deadline = time.monotonic() + within_s
    while True:
        found = platform.kill_descendants(os.getpid(), spare) + platform.kill_marked(MARK_VARIABLE, mark)
        collect()
        if not found:
            return True
        if time.monotonic() > deadline:  # one that sits in an uninterruptible system call: the guard stays for it
            return False
        time.sleep(_BETWEEN_SWEEPS_S)
