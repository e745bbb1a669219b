"""How errors look in a cell: the user's lines, then the worker's, never ours (unless ``%xmode Verbose``).

IPython asks an exception for ``_render_traceback_`` before it formats one itself; ``install`` gives our error tree
that method, so that errors.py knows nothing of Jupyter.
"""

from __future__ import annotations

import contextlib
import functools
import linecache
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from IPython.core.getipython import get_ipython
from pygments import highlight  # type: ignore[import-untyped]
from pygments.formatters.terminal256 import Terminal256Formatter  # type: ignore[import-untyped]
from pygments.lexers.python import PythonLexer  # type: ignore[import-untyped]
from pygments.token import Token  # type: ignore[import-untyped]

import monarch_lab
from monarch_lab.errors import MeshError, RankFailure, RemoteException, RemoteFrame

CONTEXT_LINES = 2  # above and below the line that an arrow points at
WIDTH = 75

_OURS = str(Path(monarch_lab.__file__).parent)
_NOTEBOOK = str(Path(__file__).parent)
_METHOD = "_render_traceback_"


def install() -> None:
    """Until ``remove``, errors of monarch_lab are shown as here."""
    setattr(MeshError, _METHOD, lambda error: render(error))


def remove() -> None:
    if _METHOD in vars(MeshError):
        delattr(MeshError, _METHOD)


def render(error: BaseException) -> list[str]:
    """The error as IPython shows it: a list of texts."""
    shell: Any = get_ipython()
    trace = error.__traceback__
    is_verbose = shell.InteractiveTB.mode == "Verbose"
    if isinstance(error, RemoteException):
        local = _by_ipython(shell, error, trace) if is_verbose else []
        return [*local, "\n".join(_remote(_Painter(shell), error))]
    if is_verbose:
        return _by_ipython(shell, error, trace)
    kept = users_frames(trace)
    if kept is None or _is_notebooks_own(trace):
        return [_Painter(shell).error(error)]
    with _chain_without_ours(error):
        return _by_ipython(shell, error, kept)


def leave_out_our_frames(error: BaseException, always: bool = False) -> None:
    """Have an error that is not ours shown without our frames; ``always``: they are yet to come."""
    if isinstance(error, MeshError) or hasattr(error, _METHOD):
        return
    if always or any(_is_ours(entry.tb_frame.f_code.co_filename) for entry in _entries(error.__traceback__)):
        with contextlib.suppress(AttributeError):  # an exception class with slots is shown as it is
            setattr(error, _METHOD, functools.partial(render, error))


def print_before(failure: BaseException, headline: str) -> None:
    """Show an error beside the one the cell ends with."""
    print(headline, "\n".join(render(failure)), sep="\n", file=sys.stderr)


# frames


def _entries(trace: types.TracebackType | None) -> Iterator[types.TracebackType]:
    while trace is not None:
        yield trace
        trace = trace.tb_next


def _is_ours(filename: str) -> bool:
    return filename.startswith(_OURS)


def _is_machinery(filename: str) -> bool:
    """Whether no line of this file tells a user what to change: ours, torch's and IPython's."""
    files = [getattr(sys.modules.get(name), "__file__", None) for name in ("IPython", "ipykernel", "torch")]
    folders = (_OURS, *(str(Path(file).parent) for file in files if file))
    return filename == contextlib.__file__ or filename.startswith(folders)


def _is_hidden(frame: types.FrameType) -> bool:
    return _is_machinery(frame.f_code.co_filename) or bool(frame.f_locals.get("__tracebackhide__"))


def users_frames(trace: types.TracebackType | None) -> types.TracebackType | None:
    """The same traceback with the user's frames only; None if there is none."""
    kept = [entry for entry in _entries(trace) if not _is_hidden(entry.tb_frame)]
    chain: types.TracebackType | None = None
    for entry in reversed(kept):
        chain = types.TracebackType(chain, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return chain


def _is_notebooks_own(trace: types.TracebackType | None) -> bool:
    """Whether a magic or a cell's start raised it: its sentence says all, the line would be the magic itself."""
    is_own = False
    for entry in _entries(trace):
        if not _is_hidden(entry.tb_frame):
            is_own = False
        elif entry.tb_frame.f_code.co_filename.startswith(_NOTEBOOK):
            is_own = True
    return is_own


@contextlib.contextmanager
def _chain_without_ours(error: BaseException) -> Iterator[None]:
    """Hide what an error was raised from, if that happened in our own code."""
    cause, context, is_suppressed = error.__cause__, error.__context__, error.__suppress_context__
    earlier = cause or context
    last = list(_entries(earlier.__traceback__))[-1:] if earlier is not None else []
    if last and _is_hidden(last[0].tb_frame):
        error.__cause__ = None  # sets __suppress_context__ too
    try:
        yield
    finally:
        error.__cause__, error.__context__, error.__suppress_context__ = cause, context, is_suppressed


def _by_ipython(shell: Any, error: BaseException, trace: types.TracebackType | None) -> list[str]:
    texts = shell.InteractiveTB.structured_traceback(type(error), error, trace, tb_offset=0)
    return list(texts)


# a remote error


def _remote(paint: _Painter, error: RemoteException) -> Iterator[str]:
    yield from paint.header(type(error).__name__)
    issued = [frame for frame in error.issued if not _is_machinery(frame.filename)]
    for frame in issued:
        yield paint.place(frame)
        yield from paint.lines(frame.line, _context(frame))
        yield ""
    if not issued and error.cell is not None:
        yield f"{error.cell}, line {error.line}" if error.line is not None else error.cell
        yield ""
    for ranks, failure in _fold(error.by_rank):
        yield f"On rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}:"
        for frame in failure.frames:
            yield paint.place(frame)
            if frame.source:
                yield from paint.lines(frame.line, {frame.line: frame.source.strip("\n")})
        yield paint.message(failure.type_name, failure.text)
        yield ""
    yield paint.message(type(error).__name__, _with_names(str(error), error.issued, paint))


def _with_names(text: str, frames: tuple[RemoteFrame, ...], paint: _Painter) -> str:
    """The text with cells called as the notebook calls them: a kernel's file names of cells hold its pid."""
    for frame in frames:
        known = paint.name(frame.filename)
        if known is not None:
            text = text.replace(frame.filename, " ".join(known))
    return text


def _fold(by_rank: dict[int, RankFailure]) -> list[tuple[list[int], RankFailure]]:
    """Equal failures with their ranks, in the order of their first rank."""
    folded: dict[tuple[object, ...], tuple[list[int], RankFailure]] = {}
    for rank, failure in sorted(by_rank.items()):
        key = (failure.type_name, failure.text, failure.frames)
        folded.setdefault(key, ([], failure))[0].append(rank)
    return list(folded.values())


def _context(frame: RemoteFrame) -> dict[int, str]:
    """Lines around a line of this kernel, by number."""
    lines = linecache.getlines(frame.filename)
    if not 0 < frame.line <= len(lines):
        return {frame.line: frame.source} if frame.source else {}
    first = max(1, frame.line - CONTEXT_LINES)
    last = min(len(lines), frame.line + CONTEXT_LINES)
    return {number: lines[number - 1].rstrip("\n") for number in range(first, last + 1)}


class _Painter:
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
