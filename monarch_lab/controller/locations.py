"""Which line of the user's code issued an op: kept as (code object, instruction), turned into a line when asked."""

from __future__ import annotations

import linecache
import os
import sys
import sysconfig
from types import CodeType

import torch

from monarch_lab.errors import RemoteFrame

Location = tuple[CodeType, int]
_getframe = sys._getframe

_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_LIBRARIES = (
    _OURS,
    os.path.dirname(os.path.abspath(torch.__file__)) + os.sep,
    sysconfig.get_paths()["stdlib"] + os.sep + "contextlib.py",
)
# By id: the hash of a code object takes longer than the rest of ``here``. Kept, so that its id stays its own.
library: dict[int, bool] = {}
_kept: list[CodeType] = []


def here(depth: int) -> Location:
    """The innermost frame that is neither torch's nor ours, ``depth`` frames up at the least."""
    frame = _getframe(depth)
    while True:
        code = frame.f_code
        found = library.get(id(code))
        if not found:
            if found is None:
                is_library(code)
                continue
            return code, frame.f_lasti
        back = frame.f_back
        if back is None:
            return code, frame.f_lasti
        frame = back


def is_library(code: CodeType) -> bool:
    """Whether it is torch's code, ours, or made by either."""
    found = library.get(id(code))
    if found is None:
        _kept.append(code)
        found = library[id(code)] = code.co_filename.startswith(_LIBRARIES) or code.co_filename == "<string>"
    return found


def frame_of(location: Location | None) -> RemoteFrame | None:
    if location is None:
        return None
    code, instruction = location
    line = code.co_firstlineno
    for start, end, number in code.co_lines():
        if start <= instruction < end and number is not None:
            line = number
            break
    return RemoteFrame(code.co_filename, line, code.co_qualname, linecache.getline(code.co_filename, line).strip())
