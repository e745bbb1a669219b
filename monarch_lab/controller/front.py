"""What the controller asks of whoever shows things to the user: a notebook, a terminal, a test."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from monarch_lab.wire.engine import OutputTail


@dataclass(frozen=True, slots=True)
class DebugPrompt:
    """A worker's debugger wants a line. ``text`` is what it printed since its last prompt."""

    rank: int
    label: str
    text: str
    prompt: str
    alive: Callable[[], bool]  # False once its worker is gone: stop asking


class Front(Protocol):
    def output(self, cell: int, rank: int, label: str, stream: str, text: str) -> None:
        """A worker printed. Called on the I/O thread: must not block."""

    def output_tail(self, rank: int, label: str, tail: OutputTail) -> None:
        """A worker prints more than can be shown. Called on the I/O thread: must not block."""

    def ask(self, prompt: DebugPrompt) -> str | None:
        """A line for the debugger, or None where nobody can be asked. Called on the thread that waits."""


class TerminalFront:
    """Prints to this process's own streams and declines debuggers: what scripts and tests get."""

    def output(self, cell: int, rank: int, label: str, stream: str, text: str) -> None:
        target = sys.stderr if stream == "stderr" else sys.stdout
        *lines, begun = text.split("\n")
        target.write("".join(f"{_labelled(label, line)}\n" for line in lines))
        if begun:
            target.write(_labelled(label, begun))
        target.flush()

    def output_tail(self, rank: int, label: str, tail: OutputTail) -> None:
        """Only cells have limits, and a script has no cells."""

    def ask(self, prompt: DebugPrompt) -> str | None:
        return None


def _labelled(label: str, line: str) -> str:
    """The last version of a line that is rewritten; a terminal shows it in place of the one before."""
    _, returned, version = line.rstrip("\r").rpartition("\r")
    return f"{returned}[{label}] {version}"


_default: Front = TerminalFront()


def set_default_front(front: Front | None) -> None:
    """The front of meshes started from now on, and of those without one; None brings the terminal's back."""
    global _default
    _default = front if front is not None else TerminalFront()


def get_default_front() -> Front:
    return _default
