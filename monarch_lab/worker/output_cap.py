"""How much of one cell's output travels: a head as it comes, then the newest lines and the path of a file with all."""

from __future__ import annotations

import os
from collections import deque
from typing import IO

from monarch_lab.wire.engine import OutputTail

HEAD_LINES = 1_000
HEAD_CHARACTERS = 1_000_000
TAIL_LINES = 50
TAIL_CHARACTERS = 2_000  # of one line of the tail
FILE_CHARACTERS = 1 << 30  # a loop that prints for ever must not fill the disk
UP = "\x1b[A"


class CellCap:
    """Of one cell on this rank. ``path``: the file for all of it, made (0600) once it is needed; "" for none.

    Not thread-safe: its Recorder's lock guards it.
    """

    def __init__(self, cell: int, path: str) -> None:
        self._cell = cell
        self._path = path
        self._head: list[str] | None = []  # what was sent; None once there is more than that
        self._lines = self._characters = 0
        self._begun: dict[str, str] = {}  # stream -> its unfinished line
        self._tail: deque[tuple[str, str]] = deque(maxlen=TAIL_LINES)
        self._more = 0  # lines after the head
        self._file: IO[str] | None = None
        self._written = 0
        self._note = ""
        self._is_news = False

    def add(self, stream: str, text: str) -> str:
        """Take text in; what of it is to be sent."""
        if self._head is None:
            self._add_more(stream, text)
            return ""
        if self._fits(stream, text):
            return text
        sent: list[str] = []
        pieces = text.splitlines(keepends=True) if "\r" not in text else [text]
        for n, piece in enumerate(pieces):
            if not self._fits(stream, piece):
                if not sent and self._lines == 0 and len(piece) > HEAD_CHARACTERS:  # a line too long for any head
                    sent.append(piece[: HEAD_CHARACTERS // 10])
                    piece = piece[HEAD_CHARACTERS // 10 :]
                    self._head.append(sent[0])
                self._overflow()
                self._add_more(stream, piece + "".join(pieces[n + 1 :]))
                break
            sent.append(piece)
        return "".join(sent)

    def news(self) -> OutputTail | None:
        """What replaces the tail that was sent last, if anything does."""
        if not self._is_news:
            return None
        self._is_news = False
        if self._file is not None:
            self._try(self._file.flush)
        begun = [(stream, _cut(text)) for stream, text in self._begun.items() if text.strip()]
        tail = [(stream, _cut(text)) for stream, text in self._tail] + begun
        return OutputTail(self._cell, self._more - len(self._tail), self._path, self._note, tail)

    def close(self) -> None:
        if self._file is not None:
            self._try(self._file.close)
            self._file = None

    def _fits(self, stream: str, text: str) -> bool:
        """Count it as sent, where it is not too much."""
        assert self._head is not None
        text = self._begun.get(stream, "") + text
        whole, newline, rest = text.rpartition("\n")
        if "\r" in text:  # of a line that is rewritten the last version counts
            whole = "\n".join(_last_version(line) for line in whole.split("\n"))
            rest = ("\r" if rest.startswith("\r") else "") + _last_version(rest)
        lines = whole.count("\n") + 1 - text.count(UP) if newline else 0
        if self._lines + lines > HEAD_LINES or self._characters + len(whole) + len(rest) > HEAD_CHARACTERS:
            return False
        self._lines += max(0, lines)
        self._characters += len(whole)
        if newline:
            self._head.append(whole + "\n")
        self._begun[stream] = rest
        return True

    def _overflow(self) -> None:
        """From now on the file has all: first what was sent."""
        head, self._head = self._head or [], None
        if not self._path:
            self._note = "no file has them, as the workers have no log files"
            return
        try:
            fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            self._file = open(fd, "w", encoding="utf-8")  # noqa: SIM115 - open for as long as its cell prints
        except OSError as e:
            self._fail(e)
        self._write("".join(head) + "".join(self._begun.values()))

    def _add_more(self, stream: str, text: str) -> None:
        self._write(text)
        *lines, rest = (self._begun.get(stream, "") + text).replace(UP, "").split("\n")
        self._more += len(lines)
        self._tail.extend((stream, _last_version(line)) for line in lines[-TAIL_LINES:])
        self._begun[stream] = _last_version(rest) if "\r" in rest else rest[-HEAD_CHARACTERS:]
        self._is_news = True

    def _write(self, text: str) -> None:
        if self._file is None:
            return
        if self._written > FILE_CHARACTERS:
            self._note = f"the file has the first {FILE_CHARACTERS:,} characters"
            return
        self._written += len(text)
        file = self._file
        self._try(lambda: file.write(text))

    def _try(self, act: object) -> None:
        try:
            act()  # type: ignore[operator]
        except OSError as e:
            self._fail(e)

    def _fail(self, error: OSError) -> None:
        self._note = f"the file {self._path} cannot be written: {error.strerror}"
        self._path, self._file = "", None


def _last_version(line: str) -> str:
    return line.rstrip("\r").rpartition("\r")[2]


def _cut(line: str) -> str:
    return line if len(line) <= TAIL_CHARACTERS else line[:TAIL_CHARACTERS] + " …"
