"""Who answers the prompts of the workers' debuggers in tests without a kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from monarch_lab.controller.front import DebugPrompt, TerminalFront

Line = str | type[BaseException]


class Typist(TerminalFront):
    """Answers every prompt with the line that its rank is to get; an exception in place of one is raised there."""

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
