r"""What one worker printed in one cell, as lines: what a terminal would show of it.

``\r`` goes back to the line's begin, ``ESC [ A`` to the line above: so progress bars, nested ones too, stay one line
each.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from monarch_lab.wire.engine import OutputTail

# A line longer than this is shown in pieces: a worker that never ends a line must not fill the kernel's memory.
LONGEST_LINE = 64 * 1024
_MOVES = re.compile(r"(\n|\r|\x1b\[A)")
# Lines that the cursor can go back to.
_ROWS = 64


@dataclass(slots=True, eq=False)
class Line:
    stream: str
    text: str
    is_rewritten: bool = False
    is_ended: bool = False


@dataclass(slots=True)
class _Cursor:
    """Of one stream: its last lines, and which of them is written to; a row beyond them is a line not yet begun."""

    rows: list[Line] = field(default_factory=list)
    row: int = 0
    is_returned: bool = False  # the next text replaces the line's
    moves: bool = False  # it has gone up: any of the rows may be written again


class Screen:
    """Of one rank. ``lines``: in the order they were begun."""

    def __init__(self, label: str) -> None:
        self.label = label
        self.lines: list[Line] = []
        self.tail: OutputTail | None = None
        self._cursors: dict[str, _Cursor] = {}

    def write(self, stream: str, text: str) -> None:
        cursor = self._cursors.setdefault(stream, _Cursor())
        if "\r" in text or "\x1b[A" in text or cursor.is_returned or cursor.row < len(cursor.rows) - 1:
            for piece in _MOVES.split(text):
                self._take(cursor, stream, piece)
            return
        first, *more = text.split("\n")
        self._put(cursor, stream, first)
        for line in more:
            self._end(cursor, stream)
            self._put(cursor, stream, line)

    def shown_lines(self) -> list[Line]:
        """With what is left out, and the tail."""
        # What a bar that has ended leaves behind is blank.
        lines = [line for line in self.lines if not line.is_rewritten or line.text.strip()]
        if self.tail is None:
            return lines
        note = [Line("stdout", note_of(self.tail))] if self.tail.left_out or self.tail.note else []
        return lines + note + [Line(stream, text) for stream, text in self.tail.lines]

    def end(self) -> None:
        """Nothing that is here is written to any more."""
        self.tail = None
        self._cursors.clear()

    def _take(self, cursor: _Cursor, stream: str, piece: str) -> None:
        if piece == "\n":
            self._end(cursor, stream)
        elif piece == "\r":
            cursor.is_returned = True
        elif piece == "\x1b[A":
            if not cursor.moves:
                cursor.moves = True
                for line in cursor.rows:
                    line.is_ended = False
            cursor.row = max(0, min(cursor.row, len(cursor.rows)) - 1)
        else:
            self._put(cursor, stream, piece)

    def _put(self, cursor: _Cursor, stream: str, text: str) -> None:
        if not text:
            return
        if cursor.row >= len(cursor.rows):
            line = Line(stream, text, cursor.is_returned)
            cursor.rows.append(line)
            self.lines.append(line)
            if len(cursor.rows) > 2 * _ROWS:
                del cursor.rows[:-_ROWS]
            cursor.row = len(cursor.rows) - 1
        else:
            line = cursor.rows[cursor.row]
            if cursor.is_returned:
                line.text, line.is_rewritten = text, True
            else:
                line.text += text
        cursor.is_returned = False
        if len(line.text) > LONGEST_LINE:
            self._end(cursor, stream)

    def _end(self, cursor: _Cursor, stream: str) -> None:
        if cursor.row >= len(cursor.rows):  # an empty line
            cursor.rows.append(Line(stream, ""))
            self.lines.append(cursor.rows[-1])
            cursor.row = len(cursor.rows) - 1
        cursor.rows[cursor.row].is_ended = not cursor.moves
        cursor.row += 1
        cursor.is_returned = cursor.row < len(cursor.rows)


def note_of(tail: OutputTail) -> str:
    where = tail.note or f"all of them are in {tail.path}"
    return f"… {tail.left_out:,} lines are left out; {where}" if tail.left_out else f"… {where}"
