"""Lines of source and messages in the colours of IPython's theme, as its own tracebacks have them."""

from __future__ import annotations

import contextlib
import linecache
from collections.abc import Callable, Iterator
from typing import Any

from pygments import highlight  # type: ignore[import-untyped]
from pygments.formatters.terminal256 import Terminal256Formatter  # type: ignore[import-untyped]
from pygments.lexers.python import PythonLexer  # type: ignore[import-untyped]
from pygments.token import Token  # type: ignore[import-untyped]

from monarch_lab.errors import RemoteFrame

CONTEXT_LINES = 2  # above and below the line that an arrow points at
WIDTH = 75


class Painter:
    """Text in the colours of IPython's theme; plain where it has none."""

    def __init__(self, shell: Any) -> None:
        self._shell = shell
        self._format: Callable[[Any], str] = lambda tokens: "".join(text for _, text in tokens)
        self._highlight: Callable[[str], str] = lambda source: source
        with contextlib.suppress(ImportError, AttributeError, KeyError):  # private in IPython, and new in 9
            from IPython.utils.PyColorize import theme_table

            name = shell.InteractiveTB._theme_name  # noqa: SLF001
            self._format = theme_table[name].format
            if name != "nocolor":
                style = theme_table[name].as_pygments_style()
                formatter = Terminal256Formatter(style=style)
                self._highlight = lambda source: highlight(source, PythonLexer(stripnl=False), formatter)[:-1]

    def header(self, name: str) -> Iterator[str]:
        yield self._format([(Token.Topline, "-" * WIDTH)])
        title = "Traceback (most recent call last)"
        yield self._format([(Token.ExcName, name), (Token, title.rjust(WIDTH - len(name)))])

    def name(self, filename: str) -> tuple[str, str] | None:
        """What a cell is called, as ("Cell", "In[3]")."""
        known: tuple[str, str] | None = self._shell.compile.format_code_name(filename)
        return known

    def place(self, frame: RemoteFrame) -> str:
        known = self.name(frame.filename)
        function = f", in {frame.function}" if frame.function not in ("", "<module>") else ""
        if known is None:
            return self._format(
                [(Token.NormalEm, "File "), (Token.FilenameEm, f"{frame.filename}:{frame.line}"), (Token, function)]
            )
        label, name = known
        return self._format(
            [(Token.NormalEm, f"{label} "), (Token.FilenameEm, f"{name}, line {frame.line}"), (Token, function)]
        )

    def frame(self, frame: RemoteFrame) -> Iterator[str]:
        """A frame with the lines around its own, where this kernel has them."""
        yield self.place(frame)
        yield from self.lines(frame.line, _context(frame))

    def lines(self, current: int, lines: dict[int, str]) -> Iterator[str]:
        texts = self._highlight("\n".join(lines.values())).split("\n")
        if len(texts) != len(lines):  # the lexer takes "\r" for a line's end
            texts = list(lines.values())
        for number, text in zip(lines, texts, strict=True):
            # As IPython's own: numbers end in column 7, the arrow takes what is free before them.
            mark = f"{'-' * (5 - len(str(number)))}> {number}" if number == current else f"{number:>7}"
            yield self._format([(Token.LinenoEm, mark)]) + f" {text}"

    def message(self, name: str, text: str) -> str:
        return self._format([(Token.ExcName, name), (Token, f": {text}" if text else "")])

    def error(self, error: BaseException) -> str:
        return self.message(type(error).__name__, str(error))


def _context(frame: RemoteFrame) -> dict[int, str]:
    """Lines around a line of this kernel, by number."""
    lines = linecache.getlines(frame.filename)
    if not 0 < frame.line <= len(lines):
        return {frame.line: frame.source} if frame.source else {}
    first = max(1, frame.line - CONTEXT_LINES)
    last = min(len(lines), frame.line + CONTEXT_LINES)
    return {number: lines[number - 1].rstrip("\n") for number in range(first, last + 1)}
