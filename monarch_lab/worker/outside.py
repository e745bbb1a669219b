"""A port of this process for another debugger (VS Code, PyCharm): debugpy, on the loopback interface, on request.

debugpy's adapter has no key for who connects to it (its access token guards the way between its own parts): every
user of this machine can, and run code as you. That is why nothing listens until it is asked for.
"""

from __future__ import annotations

import os
import threading

NOT_THERE = "debugpy is not installed where the workers run: pip install debugpy"
_PORT = ("127.0.0.1", 0)


def listen() -> tuple[int, str]:
    """(the port, ""), or (0, why not)."""
    os.environ.setdefault("PYDEVD_DISABLE_FILE_VALIDATION", "1")  # a warning about frozen modules
    try:
        import debugpy
    except ImportError:
        return 0, NOT_THERE
    for thread in threading.enumerate():
        if thread.name.startswith("monarch-"):  # ours go on while the user's stand still
            thread.pydev_do_not_trace = thread.is_pydev_daemon_thread = True  # type: ignore[attr-defined]
    try:
        _, port = debugpy.listen(_PORT)
    except (RuntimeError, OSError) as error:
        return 0, f"debugpy cannot listen: {error}"
    return port, ""
