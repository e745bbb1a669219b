"""One line from the user for a worker that waits for it: its debugger, its ``input()``, its ``getpass()``.

The wait is ours, not that of the kernel's input(): a worker that dies at its prompt would leave the cell waiting for
ever. Runs on: the thread that waits (in a kernel the main one).
"""

from __future__ import annotations

import builtins
import getpass
import sys
from collections import deque
from collections.abc import Callable
from typing import Any

# Between two looks at whether the worker still lives.
LOOK_MS = 50
# Questions that are over: JupyterLab leaves the box of one that was interrupted on the page.
_ended: deque[str] = deque(maxlen=1000)
END_OF_INPUT = "\x04"  # what Jupyter sends for Ctrl-D


class CannotAskError(Exception):
    """The front end has no input box (nbclient, nbconvert, papermill)."""


class WorkerGoneError(Exception):
    """Nobody waits for the line any more."""


def ask(shell: Any, question: str, alive: Callable[[], bool], *, password: bool = False) -> str:
    """The line that the user types. ``password``: hidden as it is typed.

    Raises EOFError at the end of input, CannotAskError, WorkerGoneError once ``alive()`` is False, and
    KeyboardInterrupt when the user interrupts the prompt.
    """
    kernel = getattr(shell, "kernel", None)
    if kernel is None:
        return _ask_builtin(question, password)
    if not getattr(kernel, "_allow_stdin", True):
        raise CannotAskError
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        request = _request(kernel, question, password)
    except AttributeError:  # another ipykernel: its own input() cannot end when the worker does, but asks
        return _ask_builtin(question, password)
    try:
        answer = _await_reply(kernel, alive)
    finally:
        _ended.append(request)
    if answer == END_OF_INPUT:
        raise EOFError
    return answer


def _ask_builtin(question: str, password: bool) -> str:
    return getpass.getpass(question) if password else builtins.input(question)


def _request(kernel: Any, question: str, password: bool) -> str:
    """What ipykernel's input() does before it waits; the message's id."""
    import zmq

    ident = kernel._get_shell_context_var(kernel._shell_parent_ident)  # noqa: SLF001
    while True:  # an answer to a prompt that is gone would answer this one
        try:
            kernel.stdin_socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            break
    content = {"prompt": question, "password": password}
    parent = kernel.get_parent("shell")
    sent = kernel.session.send(kernel.stdin_socket, "input_request", content, parent, ident=ident)
    return str(sent["header"]["msg_id"])


def _await_reply(kernel: Any, alive: Callable[[], bool]) -> str:
    import zmq

    poller = zmq.Poller()
    poller.register(kernel.stdin_socket, zmq.POLLIN)
    while alive():
        if poller.poll(LOOK_MS):
            _, reply = kernel.session.recv(kernel.stdin_socket)
            if reply is not None and reply["parent_header"].get("msg_id") not in _ended:
                return str(reply["content"]["value"])
    raise WorkerGoneError
