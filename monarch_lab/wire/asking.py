"""A line from the user for code on a worker: ``input()`` and ``getpass.getpass()``."""

from __future__ import annotations

from monarch_lab.wire.supervision import Message


class InputRead(Message, frozen=True):
    """Worker to kernel: code waits for a line. Answered by InputReply with the same number, once a thread of the
    kernel waits for the worker. ``hidden``: a password."""

    number: int
    prompt: str
    hidden: bool = False


class InputReply(Message, frozen=True):
    """Kernel to worker (control). None: the end of input; ``refused``: why nobody can be asked; ``interrupted``: the
    user pressed Ctrl-C instead."""

    number: int
    line: str | None = None
    refused: str = ""
    interrupted: bool = False
