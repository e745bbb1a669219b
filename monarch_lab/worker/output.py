"""What user code prints, sent to the notebook with the cell that caused it.

Lines are sent whole where they can be; ``flush_all`` sends what is left, at the end of a cell and at a prompt.
What C code writes to file descriptors 1 and 2 goes to the worker's log files.
"""

from __future__ import annotations

import io
import threading
from collections.abc import Callable

_MAX_PENDING = 8_192


class CellStream(io.TextIOBase):
    """A text stream whose writes become Output reports. May be used from any thread."""

    def __init__(self, name: str, emit: Callable[[str, str], None]) -> None:
        super().__init__()
        self._name = name
        self._emit = emit
        self._pending: list[str] = []
        self._size = 0
        self._lock = threading.Lock()  # guards _pending and _size

    encoding = "utf-8"

    @property
    def name(self) -> str:
        return f"<{self._name}>"

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return False

    def fileno(self) -> int:
        return {"stdout": 1, "stderr": 2}[self._name]

    def write(self, text: str) -> int:
        if not isinstance(text, str):
            raise TypeError(f"write() argument must be str, not {type(text).__name__}")
        with self._lock:
            self._pending.append(text)
            self._size += len(text)
            # One message for many lines: a loop of prints would otherwise cost a message each.
            if self._size > _MAX_PENDING:
                self._send(complete_lines=True)
        return len(text)

    def flush(self) -> None:
        with self._lock:
            self._send(complete_lines=False)

    def flush_lines(self) -> None:
        with self._lock:
            self._send(complete_lines=True)

    def _send(self, *, complete_lines: bool) -> None:
        if not self._pending:
            return
        text = "".join(self._pending)
        rest = ""
        if complete_lines:
            cut = text.rfind("\n") + 1
            text, rest = text[:cut], text[cut:]
        self._pending = [rest] if rest else []
        self._size = len(rest)
        if text:
            self._emit(self._name, text)


class Flusher(threading.Thread):
    """Calls each of ``told`` every tenth of a second, also while user code computes or sleeps."""

    def __init__(self, told: list[Callable[[], None]], interval_s: float = 0.1) -> None:
        super().__init__(name="monarch-output", daemon=True)
        self._told = told
        self._interval_s = interval_s
        self._stop = threading.Event()

    def run(self) -> None:
        while not self._stop.wait(self._interval_s):
            for tell in self._told:
                tell()

    def stop(self) -> None:
        self._stop.set()
