"""Exceptions as data, and the mark that a failed op leaves in the cells of its outputs."""

from __future__ import annotations

import linecache
import os
import pickle
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from monarch_lab.errors import DeviceException
from monarch_lab.wire.engine import Failure

_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_GENERATED = "<monarch_lab call>"
_SEVERED = "monarch_lab_severed"
own_rank = -1  # set once by the worker
_MAX_PICKLED_BYTES = 1 << 20
_MAX_TEXT = 20_000


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


def is_ours(text: str) -> bool:
    """Whether a file name, or a frame as text, is of code that users did not write."""
    return _OURS in text or _GENERATED in text


def describe(error: BaseException, *, skip_ours: bool = True) -> Failure:
    """The exception with its frames, ours left out (they would hide the user's)."""
    frames = []
    for frame, line in traceback.walk_tb(error.__traceback__):
        name = frame.f_code.co_filename
        if name == _GENERATED or (skip_ours and name.startswith(_OURS)):
            continue
        frames.append((name, line, frame.f_code.co_qualname, linecache.getline(name, line, frame.f_globals).strip()))
    text = str(error)
    return Failure(
        type_name=type(error).__name__,
        text=text if len(text) <= _MAX_TEXT else text[:_MAX_TEXT] + " …",
        frames=frames,
        pickled=_pickled(error),
        interrupted=isinstance(error, KeyboardInterrupt),
        entry=error.entry if isinstance(error, PredictionError) else 0,
        rank=own_rank,
        severed=getattr(error, _SEVERED, False),
    )


def _pickled(error: BaseException) -> bytes:
    try:
        import cloudpickle

        bare = error.with_traceback(None)
        bare.__cause__ = bare.__context__ = None
        data = cloudpickle.dumps(bare)
        pickle.loads(data)  # some exceptions pickle and do not come back
    except Exception:
        return b""  # its name and text travel all the same
    return data if len(data) <= _MAX_PICKLED_BYTES else b""
