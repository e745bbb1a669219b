"""What the controller asks of whoever shows things to the user: a notebook, a terminal, a test."""

from __future__ import annotations

import getpass
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from monarch_lab.wire.engine import OutputTail
from monarch_lab.wire.showing import Cleared, Displayed


@dataclass(frozen=True, slots=True)
class DebugPrompt:
    """A worker's debugger wants a line. ``text`` is what it printed since its last prompt."""

    rank: int
    label: str
    text: str
    prompt: str
    alive: Callable[[], bool]  # False once its worker is gone or was answered from elsewhere: stop asking


@dataclass(frozen=True, slots=True)
class InputPrompt:
    """``input()`` of a worker wants a line; ``hidden``: a password."""

    rank: int
    label: str
    prompt: str
    hidden: bool
    alive: Callable[[], bool]  # False once its worker is gone: stop asking


class NobodyToAskError(Exception):
    """What is said to the code that asks."""


class Front(Protocol):
    def output(self, cell: int, rank: int, label: str, stream: str, text: str) -> None:
        """A worker printed. Called on the I/O thread: must not block."""

    def output_tail(self, rank: int, label: str, tail: OutputTail) -> None:
        """A worker prints more than can be shown. Called on the I/O thread: must not block."""

    def ask(self, prompt: DebugPrompt) -> str | None:
        """A line for the debugger, or None where nobody can be asked. Called on the thread that waits."""

    def tell(self, text: str) -> None:
        """Lines of the debugger that are no rank's own. Called on the thread that waits."""

    def debugger_news(self, mesh: str, session: str, text: str, prompt: str) -> None:
        """Of a debugger that the panel holds; see prompts.News. Any thread: must not block."""

    def move_here(self) -> None:
        """What no cell of the mesh caused is shown where the calling thread prints now."""

    def place(self, file: str) -> str:
        """A file as the user knows it: a notebook's cell by its number. Any thread."""

    def show(self, rank: int, message: Displayed | Cleared) -> None:
        """A worker displayed something. Called on the I/O thread: must not block."""

    def ask_input(self, prompt: InputPrompt) -> str | None:
        """A line for ``input()``; None at the end of input. Raises NobodyToAskError where nobody can be
        asked. Called on the thread that waits."""


class TerminalFront:
    """Prints to this process's own streams, and asks where these are a terminal: what scripts and tests get."""

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
        if not _is_terminal():
            return None
        for line in prompt.text.splitlines():
            print(f"[{prompt.label}] {line}")
        try:
            return input(f"[{prompt.label}] {prompt.prompt}")
        except EOFError:
            return None

    def tell(self, text: str) -> None:
        print(text, flush=True)

    def debugger_news(self, mesh: str, session: str, text: str, prompt: str) -> None:
        """A script has no panel."""

    def move_here(self) -> None:
        pass

    def place(self, file: str) -> str:
        return file

    def show(self, rank: int, message: Displayed | Cleared) -> None:
        if isinstance(message, Displayed):
            data, _ = json.loads(message.bundle)
            sys.stdout.write(f"rank {rank}: {data.get('text/plain', '')}\n")
            sys.stdout.flush()

    def ask_input(self, prompt: InputPrompt) -> str | None:
        if not _is_terminal():
            raise NobodyToAskError("the program that drives the mesh has no terminal to ask in")
        question = f"[{prompt.label}] {prompt.prompt}"
        return getpass.getpass(question) if prompt.hidden else input(question)


def _is_terminal() -> bool:
    return bool(sys.stdin) and sys.stdin.isatty()


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
