"""Output of workers in one cell, from its first line on.

In a notebook it is one display, painted again while it grows, with the text of all ranks in their order (folding.py).
Where a display cannot change (a terminal, an Output widget) lines are written as they come; under ``%%capture``, once,
at the end.

Runs on: the I/O thread adds; the painter's thread and the main thread paint.
"""

from __future__ import annotations

import threading
import time
import uuid
from enum import Enum, auto

from monarch_lab.notebook.folding import Row, folded, label_of, plain, text_of
from monarch_lab.notebook.output_html import html
from monarch_lab.notebook.place import Place
from monarch_lab.notebook.screen import Line, Screen
from monarch_lab.wire.engine import OutputTail

DISPLAY_ID = "monarch-output-"
# Beyond this the display is plain text alone: the page would crawl.
_MOST_HTML = 400_000


class Way(Enum):
    DISPLAY = auto()
    LINES = auto()
    CAPTURED = auto()


class Block:
    def __init__(self, place: Place) -> None:
        self._place = place
        self._way = Way.DISPLAY if place.can_update else Way.CAPTURED if place.is_captured else Way.LINES
        self._screens: dict[int, Screen] = {}
        self._lock = threading.Lock()  # guards the screens
        self._painting = threading.Lock()  # guards what was shown of them
        self._display_id = ""
        self._shown = ""
        self._is_written = False  # under %%capture: the text of all ranks; what comes now is late
        self.is_dirty = False
        self.has_ended = False  # its cell has: what comes is late
        self.paint_s = 0.0  # what the last painting took

    @property
    def is_append_only(self) -> bool:
        """Each line is written as it comes."""
        return self._way is Way.LINES

    @property
    def has_begun(self) -> bool:
        """It has its place in the cell."""
        return self._display_id != ""

    def add(self, rank: int, label: str, stream: str, text: str) -> None:
        with self._lock:
            self._screen(rank, label).write(stream, text)
            self.is_dirty = True

    def set_tail(self, rank: int, label: str, tail: OutputTail) -> None:
        with self._lock:
            self._screen(rank, label).tail = tail
            self.is_dirty = True

    def paint(self, at_end: bool = False) -> None:
        """Show what is new; ``at_end`` also lines that were begun and not ended, and the tails."""
        with self._painting:
            began = time.monotonic()
            with self._lock:
                if self._way is Way.DISPLAY:
                    at_end = False
                elif self._way is Way.CAPTURED:
                    at_end = at_end or self.has_ended
                    if not at_end:
                        return
                if not self.is_dirty and not at_end:
                    return
                self.is_dirty = False
                labels = {key: screen.label for key, screen in self._screens.items()}
                if self._way is Way.LINES or self._is_written:
                    written = self._new_lines(at_end)
                else:  # copied, so that whoever adds does not wait for us
                    copies = {key: _copied(screen.shown_lines()) for key, screen in self._screens.items()}
                    written = []
                    if self._way is Way.CAPTURED:
                        self._new_lines(at_end)
            if self._way is Way.DISPLAY:
                self._show(folded(copies), labels)
            elif self._way is Way.CAPTURED and not self._is_written and copies:
                self._is_written = True
                written = [
                    (row.line.stream, f"[{label_of(row.ranks, labels)}] {text_of(row, labels)}\n")
                    for row in folded(copies)
                ]
            for stream, text in written:
                self._place.write(stream, text)
            self.paint_s = time.monotonic() - began

    def _show(self, rows: list[Row], labels: dict[int, str]) -> None:
        text = "\n".join(f"[{label_of(row.ranks, labels)}] {plain(text_of(row, labels))}" for row in rows)
        if not rows or text == self._shown:
            return
        bundle = {"text/plain": text}
        if len(text) <= _MOST_HTML:
            bundle["text/html"] = html(rows, labels)
        ident = self._display_id or DISPLAY_ID + uuid.uuid4().hex
        self._place.show(bundle, ident, update=self.has_begun)
        self._display_id = ident  # not before it is shown: what is to stand below it may come now, on another thread
        self._shown = text

    def _screen(self, rank: int, label: str) -> Screen:
        # What is said of a whole mesh has rank 0 and the mesh's name: it is no line of rank 0.
        key = rank
        while key in self._screens and self._screens[key].label != label:
            key = -1_000_000 if key >= 0 else key - 2
        return self._screens.setdefault(key, Screen(label))

    def _new_lines(self, at_end: bool) -> list[tuple[str, str]]:
        """(stream, text) of the lines that were not written yet; they are forgotten."""
        found = []
        for _, screen in sorted(self._screens.items()):
            begun: list[Line] = []
            for line in screen.shown_lines() if at_end else screen.lines:
                if not (at_end or line.is_ended):
                    begun.append(line)
                elif line.text.strip() or not line.is_rewritten:
                    found.append((line.stream, f"[{screen.label}] {line.text}\n"))
            screen.lines = begun
            if at_end:
                screen.end()
        return found


def _copied(lines: list[Line]) -> list[Line]:
    return [Line(line.stream, line.text, line.is_rewritten) for line in lines]
