"""Breakpoints that were set from the notebook: where they are, and whether one holds at a line.

Any number of threads ask; ``set`` runs on the reader thread and replaces the whole table at once.
"""

from __future__ import annotations

import os
from types import CodeType, FrameType

from monarch_lab.wire.debugging import BreakpointDef
from monarch_lab.worker.debug_frames import is_users_file


class Breakpoints:
    def __init__(self) -> None:
        self._all: list[BreakpointDef] = []
        self._of_code: dict[CodeType, dict[int, list[BreakpointDef]]] = {}

    def __bool__(self) -> bool:
        return bool(self._all)

    def set(self, breakpoints: list[BreakpointDef]) -> None:
        self._all, self._of_code = list(breakpoints), {}

    def are_in(self, code: CodeType) -> dict[int, list[BreakpointDef]]:
        """Those in a function, by line."""
        known = self._of_code.get(code)
        if known is None:
            known = {}
            lines = sorted({line for _, _, line in code.co_lines() if line})
            for point in self._all:
                if (line := _line_in(point, code, lines)) is not None:
                    known.setdefault(line, []).append(point)
            self._of_code[code] = known
        return known

    def why(self, frame: FrameType) -> str:
        """Why to stop at the line that the frame is at; "" where nothing asks for it."""
        for point in self.are_in(frame.f_code).get(frame.f_lineno, ()):
            if not point.condition:
                return f"breakpoint {point.number}"
            try:
                holds = eval(point.condition, frame.f_globals, frame.f_locals)
            except Exception as error:
                return f"breakpoint {point.number}: its condition raised {type(error).__name__}: {error}"
            if holds:
                return f"breakpoint {point.number}: {point.condition}"
        return ""


def _line_in(point: BreakpointDef, code: CodeType, lines: list[int]) -> int | None:
    """The line of this function where the breakpoint is; None: it is elsewhere."""
    if point.line:
        path = code.co_filename
        is_there = path == point.file or path.endswith("/" + point.file) or os.path.basename(path) == point.file
        return point.line if is_there and point.line in lines else None
    name = code.co_qualname.replace(".<locals>", "")
    if f".{name}".endswith(f".{point.function}"):
        is_there = is_users_file(code.co_filename)
    else:  # with its module, then of a library too
        module = code.co_filename.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        is_there = point.function.endswith(f".{name}") and f".{module}.{name}".endswith(f".{point.function}")
    if not is_there:
        return None
    body = [line for line in lines if line > code.co_firstlineno]
    return body[0] if body else code.co_firstlineno
