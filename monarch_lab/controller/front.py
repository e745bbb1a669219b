"""What the controller asks of whoever shows things to the user: a notebook, a terminal, a test."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class DebugPrompt:
    """A worker's debugger wants a line. ``text`` is what it printed since its last prompt."""

    rank: int
    label: str
    text: str
    prompt: str
    alive: Callable[[], bool]  # False once its worker is gone or was answered from elsewhere: stop asking


class Front(Protocol):
    def output(self, cell: int, rank: int, label: str, stream: str, text: str) -> None:
        """A worker printed. Called on the I/O thread: must not block."""

    def ask(self, prompt: DebugPrompt) -> str | None:
        """A line for the debugger, or None where nobody can be asked. Called on the thread that waits."""

    def tell(self, text: str) -> None:
        """Lines of the debugger that are no rank's own. Called on the thread that waits."""

    def move_here(self) -> None:
        """What no cell of the mesh caused is shown where the calling thread prints now."""

    def place(self, file: str) -> str:
        """A file as the user knows it: a notebook's cell by its number. Any thread."""


class TerminalFront:
    """Prints to this process's own streams and declines debuggers: what scripts and tests get."""

    def output(self, cell: int, rank: int, label: str, stream: str, text: str) -> None:
        target = sys.stderr if stream == "stderr" else sys.stdout
        for line in text.splitlines(keepends=True):
            target.write(f"[{label}] {line}")
        target.flush()

    def ask(self, prompt: DebugPrompt) -> str | None:
        return None

    def tell(self, text: str) -> None:
        print(text, flush=True)

    def move_here(self) -> None:
        pass

    def place(self, file: str) -> str:
        return file


_default: Front = TerminalFront()


def set_default_front(front: Front | None) -> None:
    """The front of meshes started from now on, and of those without one; None brings the terminal's back."""
    global _default
    _default = front if front is not None else TerminalFront()


def get_default_front() -> Front:
    return _default
