"""Exceptions as data, and the mark that a failed op leaves in the cells of its outputs."""

from __future__ import annotations

import linecache
import os
import pickle
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

from monarch_lab.errors import DeviceException
from monarch_lab.wire.engine import Failure, Related

_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_GENERATED = "<monarch_lab call>"
_SEVERED = "monarch_lab_severed"
own_rank = -1  # set once by the worker
on_described: Callable[[BaseException], None] = lambda error: None  # noqa: E731  set once, by the debugger
_MAX_PICKLED_BYTES = 1 << 20
_MAX_TEXT = 20_000
_FIRST_FRAMES, _LAST_FRAMES = 40, 60  # of more, those between are left out
_MAX_RELATED = 20


class DependentOnError(Exception):
    """An op read a value whose own op had failed. Never shown: the first cause is."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.text)
        self.failure = failure


class Cells(dict[int, Any]):
    """Of a process that took another one's rank: what that one held is gone, and reading it says so."""

    def __init__(self, lost: str, rank: int) -> None:
        super().__init__()
        self._lost = lost
        self._rank = rank

    def __missing__(self, ref: int) -> NoReturn:
        raise DeviceException(self._lost, (self._rank,))


class PredictionError(Exception):
    """An op gave something else than it gave the first time; ``entry`` is what the controller must forget."""

    def __init__(self, message: str, entry: int) -> None:
        super().__init__(message)
        self.entry = entry


class Failed:
    """Stands in a cell for a value that does not exist. torch functions given one raise DependentOnError."""

    __slots__ = ("failure",)

    def __init__(self, failure: Failure) -> None:
        self.failure = failure

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        raise DependentOnError(_find(args, kwargs))

    def __getattr__(self, name: str) -> NoReturn:
        raise DependentOnError(self.failure)


def _find(args: Any, kwargs: Any) -> Failure:
    todo = [args, kwargs]
    while todo:
        item = todo.pop()
        if type(item) is Failed:
            return item.failure
        if isinstance(item, (tuple, list)):
            todo.extend(item)
        elif isinstance(item, dict):
            todo.extend(item.values())
    return Failure("InternalError", "a failed value without its failure", [])


@contextmanager
def severed_when_it_fails() -> Iterator[None]:
    """Around the wait for other ranks: what it raises is marked, so that the kernel asks whether one has died."""
    try:
        yield
    except RuntimeError as e:
        setattr(e, _SEVERED, True)
        raise


def is_our_text(text: str) -> bool:
    """Whether a file name, or a frame as text, is of code that users did not write."""
    return _OURS in text or _GENERATED in text


def describe(error: BaseException, *, skip_ours: bool = True) -> Failure:
    """The exception with its frames, ours left out (they would hide the user's), and those it was raised from."""
    on_described(error)
    frames = _frames(error, skip_ours)
    related = _earlier(error, skip_ours) + _parts(error, skip_ours)
    return Failure(
        type_name=type(error).__name__,
        text=text_of(error),
        frames=frames,
        pickled=_pickled(error),
        interrupted=isinstance(error, KeyboardInterrupt),
        entry=error.entry if isinstance(error, PredictionError) else 0,
        rank=own_rank,
        severed=getattr(error, _SEVERED, False) is True,
        related=related,
        notes=_notes(error),
    )


def _frames(error: BaseException, skip_ours: bool) -> list[tuple[str, int, str, str]]:
    frames = []
    for frame, line in traceback.walk_tb(error.__traceback__):
        if not (is_ours(frame) if skip_ours else frame.f_code.co_filename == _GENERATED):
            frames.append(told_frame(frame, line))
    if isinstance(error, SyntaxError) and error.filename and error.lineno:
        # It was raised by the compiler: the line it speaks of is no frame's.
        source = (error.text or _line_of(error.filename, error.lineno, None)).strip()
        frames.append((str(error.filename), error.lineno, "<module>", source))
    left_out = len(frames) - _FIRST_FRAMES - _LAST_FRAMES
    if left_out > 0:  # of a recursion without end
        frames[_FIRST_FRAMES:-_LAST_FRAMES] = [("", 0, "", f"[{left_out} frames left out]")]
    return frames


def is_ours(frame: FrameType) -> bool:
    """Whether its lines would hide the user's."""
    name = frame.f_code.co_filename
    return name == _GENERATED or name.startswith(_OURS)


def told_frame(frame: FrameType, line: int) -> tuple[str, int, str, str]:
    """(file, line, function, source line)"""
    name = frame.f_code.co_filename
    return name, line, frame.f_code.co_qualname, _line_of(name, line, frame.f_globals)


def _line_of(filename: str, line: int, names: dict[str, Any] | None) -> str:
    try:
        return linecache.getline(filename, line, names).strip()
    except Exception:  # a loader of the user's
        return ""


def text_of(error: BaseException) -> str:
    try:
        text = str(error)
    except BaseException as e:
        return f"<its text cannot be had: __str__ raised {type(e).__name__}>"
    return text if len(text) <= _MAX_TEXT else text[:_MAX_TEXT] + " …"


def _notes(error: BaseException) -> list[str]:
    notes = getattr(error, "__notes__", None)
    told = [str(note)[:_MAX_TEXT] for note in notes if isinstance(note, str)] if isinstance(notes, list) else []
    if isinstance(error, SystemExit):
        told.append(
            "(exit() and sys.exit() end the cell on this rank; its process lives on: %mesh restart gives another)"
        )
    return told


def _related(relation: str, error: BaseException, skip_ours: bool) -> Related:
    return Related(relation, type(error).__name__, text_of(error), _frames(error, skip_ours), _notes(error))


def _earlier(error: BaseException, skip_ours: bool) -> list[Related]:
    """What it was raised from, the earliest first."""
    chain: list[Related] = []
    seen = {id(error)}
    while len(chain) < _MAX_RELATED:
        relation = "cause" if error.__cause__ is not None else "context"
        earlier = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
        if earlier is None or id(earlier) in seen or isinstance(earlier, DependentOnError):
            break
        chain.append(_related(relation, earlier, skip_ours))
        seen.add(id(earlier))
        error = earlier
    return chain[::-1]


def _parts(error: BaseException, skip_ours: bool) -> list[Related]:
    parts: list[Related] = []
    todo = list(error.exceptions) if isinstance(error, BaseExceptionGroup) else []
    while todo and len(parts) < _MAX_RELATED:
        part = todo.pop(0)
        parts.append(_related("part", part, skip_ours))
        if isinstance(part, BaseExceptionGroup):
            todo[:0] = part.exceptions
    return parts


def _pickled(error: BaseException) -> bytes:
    cause, context, is_suppressed = error.__cause__, error.__context__, error.__suppress_context__
    try:
        import cloudpickle

        bare = error.with_traceback(None)  # which would also keep the frames, and what they hold
        bare.__cause__ = bare.__context__ = None
        data = cloudpickle.dumps(bare)
        pickle.loads(data)  # some exceptions pickle and do not come back
    except BaseException:
        return b""  # its name and text travel all the same
    finally:
        error.__cause__, error.__context__, error.__suppress_context__ = cause, context, is_suppressed
    return data if len(data) <= _MAX_PICKLED_BYTES else b""
