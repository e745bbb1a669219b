"""The processes of an agent that has ended. Its guard kills them: only one that was killed as well leaves any."""

from __future__ import annotations

import logging
import time

import zmq

from monarch_lab.config import MARK_VARIABLE
from monarch_lab.transport import platform
from monarch_lab.transport.frames import poll_ms

log = logging.getLogger(__name__)
_AGAIN_S = 0.003


def end_what_is_left(name: str, mark: str, lifeline: int, deadline: float) -> None:
    """Of mesh ``name``, whose processes have ``mark`` in their environment: once its guard has ended, or at the
    deadline (of ``time.monotonic``), when what does not end is named in the log."""
    _wait_for_guard(lifeline, deadline)
    while platform.kill_marked(MARK_VARIABLE, mark):
        if time.monotonic() >= deadline:
            _tell_unkillable(name, mark)
            return
        time.sleep(_AGAIN_S)


def _wait_for_guard(lifeline: int, deadline: float) -> None:
    """End of file on the lifeline: neither agent nor guard is left."""
    poller = zmq.Poller()
    poller.register(lifeline, zmq.POLLIN)
    poller.poll(poll_ms(deadline - time.monotonic()))


def _tell_unkillable(name: str, mark: str) -> None:
    for pid in platform.marked(MARK_VARIABLE, mark):
        used = platform.usage(pid)
        state = used[2] if used is not None else "?"
        log.warning("mesh %s: process %d does not end (SIGKILL was sent; its state is %s)", name, pid, state)
