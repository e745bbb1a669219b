"""What workers wrote to their log files, line by line with the worker's label: the end of it, and what comes.

A file is read as it is: one that is not there yet, or no more, has no lines.
"""

from __future__ import annotations

import itertools
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from monarch_lab.errors import UsageValueError

LINES = 20
_CHUNK_BYTES = 1 << 16
# A line longer than this is shown in pieces: a file without line ends must not fill the memory.
_LONGEST_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class LogFile:
    rank: int
    label: str  # "host.gpu", and the stream where it is not stdout
    path: str


def files_of(processes: Iterable[tuple[int, str, str, str]], ranks: Iterable[int] | None = None) -> list[LogFile]:
    """Of (rank, label, stdout path, stderr path); of all ranks where ``ranks`` is None."""
    wanted = None if ranks is None else set(ranks)
    found = []
    for rank, label, out, err in processes:
        if wanted is None or rank in wanted:
            named = ((label, out), (f"{label} stderr", err))
            found += [LogFile(rank, name, path) for name, path in named if path]
    return found


def compiled(pattern: str | None) -> Callable[[str], bool]:
    """Whether a line is wanted. UsageValueError for what is no pattern."""
    if pattern is None:
        return lambda line: True
    try:
        found = re.compile(pattern).search
    except re.error as e:
        raise UsageValueError(f"--grep: {pattern!r} is no pattern: {e}") from None
    return lambda line: found(line) is not None


class LogReader:
    """The end of some files, then what is added to them."""

    def __init__(self, files: Iterable[LogFile], wanted: Callable[[str], bool]) -> None:
        self._wanted = wanted
        self._tails = [_Tail(file) for file in files]

    def last(self, lines: int, to_the_end: bool = True) -> Iterator[str]:
        """The last so many wanted lines of each file, file by file; 0: all of them.

        ``to_the_end``: with a last line that has no end yet, which ``follow`` would bring.
        """
        for tail in self._tails:
            found: Iterator[str] = itertools.chain(tail.lines(), tail.rest() if to_the_end else ())
            wanted = (line for line in found if self._wanted(line))
            kept: Iterable[str] = deque(wanted, maxlen=lines) if lines else wanted
            yield from (f"[{tail.file.label}] {line}" for line in kept)

    def follow(self, wait: Callable[[], bool]) -> Iterator[str]:
        """What is written from now on; ``wait`` sleeps between two looks, and says whether to look again."""
        while True:
            goes_on = wait()
            for tail in self._tails:
                yield from (f"[{tail.file.label}] {line}" for line in tail.lines() if self._wanted(line))
            if not goes_on:
                break
        for tail in self._tails:
            yield from (f"[{tail.file.label}] {line}" for line in tail.rest() if self._wanted(line))


class _Tail:
    """Lines of a file from where the last look ended."""

    def __init__(self, file: LogFile) -> None:
        self.file = file
        self._at = 0
        self._begun = b""

    def lines(self) -> Iterator[str]:
        try:
            with open(self.file.path, "rb") as stream:
                stream.seek(self._at)
                while data := stream.read(_CHUNK_BYTES):
                    self._at += len(data)
                    *whole, self._begun = (self._begun + data).split(b"\n")
                    yield from map(_text, whole)
                    if len(self._begun) > _LONGEST_BYTES:
                        yield from self.rest()
        except OSError:
            return

    def rest(self) -> Iterator[str]:
        """A last line without its end."""
        begun, self._begun = self._begun, b""
        if begun:
            yield _text(begun)


def _text(line: bytes) -> str:
    return line.decode(errors="replace").rstrip("\r")
