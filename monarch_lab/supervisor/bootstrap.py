"""What a process runs that was started with a FunctionCall. Runs on: its main thread."""

from __future__ import annotations

import sys

from monarch_lab.supervisor.child_queue import get_message_queue
from monarch_lab.supervisor.function_call import run_call


def main() -> None:
    """An exception of the function is the process's own: printed, exit code 1."""
    sys.argv[:] = [""]
    run_call(get_message_queue().wait_call())
