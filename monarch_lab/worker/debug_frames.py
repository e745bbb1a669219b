"""Whose code a frame is: the user's, ours, or that of a library."""

from __future__ import annotations

import functools
import linecache
import os
import sysconfig
from types import FrameType, TracebackType

from monarch_lab.wire.debugging import Place

_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_GENERATED = "<monarch_lab call>"
_LIBRARIES = tuple({sysconfig.get_paths()[key] + os.sep for key in ("stdlib", "platlib", "purelib")})


def is_ours(frame: FrameType) -> bool:
    """Stepping never stops there."""
    name = frame.f_code.co_filename
    return name.startswith(_OURS) or name == _GENERATED


def is_of_user(frame: FrameType | None) -> bool:
    """Whether it is the user's, or a library's that the user's calls with nothing of ours in between."""
    while frame is not None and not is_users_file(frame.f_code.co_filename):
        if is_ours(frame):
            return False
        frame = frame.f_back
    return frame is not None


@functools.lru_cache(4096)
def is_users_file(name: str) -> bool:
    # "<string>" is how the process was started; what the user runs by exec() has callers that are the user's.
    return not (name.startswith((_OURS, "<frozen ", *_LIBRARIES)) or name in (_GENERATED, "<string>"))


def users_frame(frame: FrameType | None) -> FrameType | None:
    """The innermost frame of the user's at or above this one."""
    while frame is not None and not is_users_file(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def users_traceback(trace: TracebackType | None) -> TracebackType | None:
    """From the first frame of the user's on: what is above it is how we came there."""
    while trace is not None and not is_users_file(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    return trace


def place_of(frame: FrameType, line: int) -> Place:
    code = frame.f_code
    source = linecache.getline(code.co_filename, line, frame.f_globals).strip()
    return Place(code.co_filename, line, code.co_name, source)
