"""``breakpoint()`` in a process that has no way to the kernel: it says where it is, and goes on.

Such are those that the user's code forks (a DataLoader's), and those of pipes.
"""

from __future__ import annotations

import os
import pdb
import sys
import traceback
from typing import Any


def install() -> None:
    sys.breakpointhook = pdb.set_trace = _go_on


def _go_on(*_: Any, **__: Any) -> None:
    print(f"process {os.getpid()} runs beside its worker, so no debugger can ask for it: it goes on. It was at:")
    traceback.print_stack(sys._getframe(1), file=sys.stdout)
    sys.stdout.flush()
