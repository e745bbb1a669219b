"""The prompt of a worker's debugger, in the cell that waits for the worker.

Runs on: the thread that waits (in a kernel the main one).
"""

from __future__ import annotations

import builtins
import re
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from monarch_lab.controller.front import DebugPrompt

# Between two looks at whether the worker still lives.
LOOK_MS = 50
DECLINED = "debugger declined: this front end cannot ask for input"
END_OF_INPUT = "\x04"  # what Jupyter sends for Ctrl-D


def ask(shell: Any, prompt: DebugPrompt) -> str | None:
    """Show what the debugger printed, then ask for one command.

    None: no command will come (end of input, a front end without an input box, the worker is gone). Raises
    KeyboardInterrupt when the user interrupts the prompt.
    """
    for line in prompt.text.splitlines():
        print(f"[{prompt.label}] {_with_cell_names(shell, line)}")
    question = f"[{prompt.label}] {prompt.prompt}"
    kernel = getattr(shell, "kernel", None)
    if kernel is None:
        return _ask_builtin(question)
    if not getattr(kernel, "_allow_stdin", True):
        print(f"[{prompt.label}] {DECLINED}")
        return None
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        _request(kernel, question)
    except AttributeError:  # another ipykernel: its own input() cannot end when the worker does, but asks
        return _ask_builtin(question)
    answer = _await_reply(kernel, prompt)
    return None if answer == END_OF_INPUT else answer


def _with_cell_names(shell: Any, line: str) -> str:
    """``> In[3](4)f()``, where pdb prints a kernel's file name of that cell."""

    return re.sub(r"(?<=> )(?P<file>\S+)(?=\(\d+\))", lambda match: cell_name(shell, match["file"]), line)


def cell_name(shell: Any, file: str) -> str:
    """``In[3]`` for the file name that the kernel gives a cell."""
    known = shell.compile.format_code_name(file)
    return known[1] if known else file


def _ask_builtin(question: str) -> str | None:
    try:
        return builtins.input(question)
    except EOFError:
        return None


def _request(kernel: Any, question: str) -> None:
    """What ipykernel's input() does before it waits."""
    import zmq

    ident = kernel._get_shell_context_var(kernel._shell_parent_ident)  # noqa: SLF001
    while True:  # an answer to a prompt that is gone would answer this one
        try:
            kernel.stdin_socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            break
    content = {"prompt": question, "password": False}
    kernel.session.send(kernel.stdin_socket, "input_request", content, kernel.get_parent("shell"), ident=ident)


def _await_reply(kernel: Any, prompt: DebugPrompt) -> str | None:
    """The wait is ours, not input()'s: a worker that dies at its prompt would leave the cell waiting for ever."""
    import zmq

    poller = zmq.Poller()
    poller.register(kernel.stdin_socket, zmq.POLLIN)
    while prompt.alive():
        if poller.poll(LOOK_MS):
            _, reply = kernel.session.recv(kernel.stdin_socket)
            if reply is not None:
                return str(reply["content"]["value"])
    print(f"[{prompt.label}] the worker is gone: its debugger ended")
    return None
