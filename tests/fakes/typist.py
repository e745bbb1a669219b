"""Who answers the prompts of the workers' debuggers in tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from monarch_lab.controller.front import DebugPrompt, TerminalFront
from tests.kernel import Kernel

Line = str | type[BaseException]


class Typist(TerminalFront):
    """Without a kernel: answers every prompt with ``line``, which may be a function of it; an exception is raised."""

    def __init__(self, line: Line | Callable[[DebugPrompt], Line]) -> None:
        self.line = line
        self.asked: list[DebugPrompt] = []
        self.told: list[str] = []
        self.printed: list[str] = []

    def ask(self, prompt: DebugPrompt) -> str:
        self.asked.append(prompt)
        line = self.line if isinstance(self.line, str | type) else self.line(prompt)
        if isinstance(line, str):
            return line
        raise line

    def output(self, cell: int, rank: int, label: str, stream: str, text: str) -> None:
        self.printed.append(text)

    def tell(self, text: str) -> None:
        self.told.append(text)

    @property
    def text(self) -> str:
        return "".join(prompt.text for prompt in self.asked)


@contextmanager
def typing(mesh: Any, line: Line | Callable[[DebugPrompt], Line]) -> Iterator[Typist]:
    """The mesh's debuggers ask this one; what stands in one at the end is ended."""
    client, front = mesh.client, Typist(line)
    before, client.front = client.front, front
    try:
        yield front
    finally:
        client.front = before
        client.breakpoints.clear()
        client.prompts.leave_all()


class Typed:
    """Of a real kernel: answers the prompts in order, and notes them. ``gathered``: once these ranks have all stopped,
    from rank 0 on."""

    def __init__(self, *lines: str, gathered: str = "", kernel: Kernel | None = None) -> None:
        self.lines = list(lines)
        self.asked: list[str] = []
        self._gathered = gathered
        self._kernel = kernel

    def __call__(self, prompt: str) -> str:
        if self._kernel is not None and self._gathered:
            if f"ranks {self._gathered} at " not in self._kernel.text():
                return "ranks"
            first = self._gathered[0] + ("/copy" if "/" in self._gathered else "")
            self._gathered = ""
            return f"rank {first}"
        self.asked.append(prompt)
        return self.lines.pop(0) if self.lines else "q"
