"""A Ctrl-C that Python dropped, raised again.

What is raised in a destructor or in a weak reference's callback is dropped, and each op runs some: a Ctrl-C would
now and then do nothing. Runs on: the main thread, where Python runs signal handlers.
"""

from __future__ import annotations

import _thread
import os
import signal
import sys
import threading
import time
from typing import Any

_AGAIN_S = 0.05  # until it is raised by a signal again, where no op comes by before
_is_lost = False


def install() -> None:
    before = sys.unraisablehook

    def hook(dropped: Any) -> None:
        if dropped.exc_type is not KeyboardInterrupt:
            before(dropped)
            return
        raise_later()  # not from here: what a hook raises is dropped as well

    sys.unraisablehook = hook


def raise_later() -> None:
    """One that came at a bad moment: by ``raise_lost``, or in a moment wherever the main thread is."""
    global _is_lost
    _is_lost = True
    _thread.start_new_thread(_signal_again, ())  # no Thread: its start waits, and can be hit


def raise_lost() -> None:
    """Raises the KeyboardInterrupt that was dropped, if one was. Called between ops, without locks."""
    global _is_lost
    if _is_lost and threading.current_thread() is threading.main_thread():
        _is_lost = False
        raise KeyboardInterrupt


def _signal_again() -> None:
    global _is_lost
    time.sleep(_AGAIN_S)
    if _is_lost:
        _is_lost = False
        os.kill(os.getpid(), signal.SIGINT)
