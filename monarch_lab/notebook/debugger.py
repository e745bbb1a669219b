"""The prompt of a worker's debugger, in the cell that waits for the worker.

Runs on: the thread that waits (in a kernel the main one).
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from monarch_lab.controller.debug_console import with_names
from monarch_lab.notebook import asking

if TYPE_CHECKING:
    from monarch_lab.controller.front import DebugPrompt

DECLINED = "debugger declined: this front end cannot ask for input"


def ask(shell: Any, prompt: DebugPrompt) -> str | None:
    """Show what the debugger printed, then ask for one command.

    None: no command will come (end of input, a front end without an input box, the worker is gone). Raises
    KeyboardInterrupt when the user interrupts the prompt.
    """
    for line in with_names(prompt.text, partial(cell_name, shell)).splitlines():
        print(f"[{prompt.label}] {line}")
    try:
        return asking.ask(shell, f"[{prompt.label}] {prompt.prompt}", prompt.alive)
    except asking.CannotAskError:
        print(f"[{prompt.label}] {DECLINED}")
    except asking.WorkerGoneError:
        print(f"[{prompt.label}] the worker is gone, or was answered from elsewhere: this prompt ended")
    except EOFError:
        pass
    return None


def cell_name(shell: Any, file: str) -> str:
    """``In[3]`` for the file name that the kernel gives a cell."""
    known = shell.compile.format_code_name(file)
    return known[1] if known else file
