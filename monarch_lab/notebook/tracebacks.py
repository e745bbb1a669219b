"""How errors look in a cell: the user's lines, then the worker's, never ours (unless ``%xmode Verbose``).

IPython asks an exception for ``_render_traceback_`` before it formats one itself; ``install`` gives our error tree
that method, so that errors.py knows nothing of Jupyter.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from IPython.core.getipython import get_ipython

import monarch_lab
from monarch_lab.errors import BETWEEN, MeshError, RankFailure, RelatedError, RemoteException, RemoteFrame
from monarch_lab.notebook.painting import Painter

_OURS = str(Path(monarch_lab.__file__).parent)
# What a "%%mesh" line and a "%mesh" line call; what else of ours is on the stack came by the user's own line.
_ENTRANCES = tuple(str(Path(__file__).with_name(name)) for name in ("cell.py", "magics.py", "spmd.py"))
_METHOD = "_render_traceback_"
# Parts of a worker's file names; bdb is there when a debugger was left with q.
_FAR_MACHINERY = ("/site-packages/torch/", "/monarch_lab/worker/", "/bdb.py")


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
    if shell.InteractiveTB.mode == "Minimal":
        return [Painter(shell).error(error)]
    if isinstance(error, RemoteException):
        local = _by_ipython(shell, error, trace) if is_verbose else []
        return [*local, "\n".join(_remote(Painter(shell), error, is_verbose))]
    if is_verbose:
        return _by_ipython(shell, error, trace)
    paint = Painter(shell)
    kept = users_frames(trace)
    if kept is None or _is_notebooks_own(trace):
        return [paint.error(error)]
    if any(entry.tb_lineno != entry.tb_frame.f_lineno for entry in _entries(kept)):
        # Raised again at the cell's end; IPython would point at where each frame ended.
        return ["\n".join(_plain(paint, error))]
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


def _is_far_machinery(filename: str) -> bool:
    """The same of a worker's file; its host may have Python elsewhere."""
    return _is_machinery(filename) or any(part in filename for part in _FAR_MACHINERY)


def _is_hidden(frame: types.FrameType) -> bool:
    return _is_machinery(frame.f_code.co_filename) or bool(frame.f_locals.get("__tracebackhide__"))


def users_frames(trace: types.TracebackType | None) -> types.TracebackType | None:
    """The same traceback with the user's frames only; None if there is none."""
    entries = list(_entries(trace))
    # A line that calls straight into the notebook is the cell's "%%mesh".
    into_ours = {id(a) for a, b in itertools.pairwise(entries) if b.tb_frame.f_code.co_filename.startswith(_ENTRANCES)}
    kept = [entry for entry in entries if not _is_hidden(entry.tb_frame) and id(entry) not in into_ours]
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
        elif entry.tb_frame.f_code.co_filename.startswith(_ENTRANCES):
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


def _remote(paint: Painter, error: RemoteException, is_verbose: bool) -> Iterator[str]:
    yield from paint.header(type(error).__name__)
    issued = [frame for frame in error.issued if not _is_machinery(frame.filename)]
    if not issued and not _is_notebooks_own(error.__traceback__):  # waited for where it was issued
        issued = _frames(error)
    for frame in issued:
        yield from paint.frame(frame)
        yield ""
    is_cells_own = any(frame.filename == error.cell for failed in error.by_rank.values() for frame in failed.frames)
    if not issued and error.cell is not None and not is_cells_own:  # a %%spmd cell's lines are among the worker's
        cell = " ".join(paint.name(error.cell) or [error.cell])
        yield f"{cell}, line {error.line}" if error.line is not None else cell
        yield ""
    for ranks, failure in error.groups:
        yield f"On rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}:"
        for related in failure.related:
            if related.relation != "part":
                yield from _far(paint, related, is_verbose)
                yield f"\n{BETWEEN[related.relation]}\n"
        yield from _far(paint, failure, is_verbose)
        for related in failure.related:
            if related.relation == "part":
                yield "\nOne of its parts:"
                yield from _far(paint, related, is_verbose)
        yield ""
    yield paint.message(type(error).__name__, _with_names(str(error), error.issued, paint))


def _far(paint: Painter, error: RankFailure | RelatedError, is_verbose: bool) -> Iterator[str]:
    """An exception of a worker as it was there."""
    for frame in error.frames:
        if _is_far_machinery(frame.filename) and not is_verbose:
            continue
        if not frame.line:  # a remark
            yield f"  {frame.source}"
            continue
        yield paint.place(frame)
        if frame.source:
            yield from paint.lines(frame.line, {frame.line: frame.source.strip("\n")})
    yield paint.message(error.type_name, error.text)
    yield from error.notes


def _with_names(text: str, frames: tuple[RemoteFrame, ...], paint: Painter) -> str:
    """The text with cells called as the notebook calls them: a kernel's file names of cells hold its pid."""
    for frame in frames:
        known = paint.name(frame.filename)
        if known is not None:
            text = text.replace(frame.filename, " ".join(known))
    return text


def _plain(paint: Painter, error: BaseException) -> Iterator[str]:
    yield from paint.header(type(error).__name__)
    for frame in _frames(error):
        yield from paint.frame(frame)
        yield ""
    yield paint.error(error)


def _frames(error: BaseException) -> list[RemoteFrame]:
    """The user's frames that an error came through."""
    return [
        RemoteFrame(entry.tb_frame.f_code.co_filename, entry.tb_lineno, entry.tb_frame.f_code.co_qualname)
        for entry in _entries(users_frames(error.__traceback__))
    ]
