"""What is printed on this worker, sent to the notebook with the cell that caused it, in the order it was printed.

Two ways lead here: ``sys.stdout`` and ``sys.stderr`` (CellStream), and the log files that file descriptors 1 and 2 are
(log_tail.py), where C code, child processes and ``os.write`` print. What is more than a cell can show goes to a file
(output_cap.py).

Runs on: any thread prints; the flusher's thread sends every tenth of a second, the main thread at the end of an op.
"""

from __future__ import annotations

import io
import os
import re
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from monarch_lab.wire import engine as wire
from monarch_lab.worker.log_tail import LogTail, flush_c
from monarch_lab.worker.output_cap import CellCap

FDS = {"stdout": 1, "stderr": 2}
INTERVAL_S = 0.1
_MAX_PENDING = 65_536
# So many lines of a cell are in exact order with what was written to the descriptors.
_EXACT_LINES = 1_000
_LOOK_S = 0.001
# Caps of cells that may still print: a stream or a thread goes on with an earlier one.
_KEPT_CAPS = 8
# Versions of a line that the next one replaces within the same tick: nobody would see them.
_REPLACED = re.compile(r"\r(?:(?!\x1b\[A)[^\r\n])*(?=\r)")


class Recorder:
    """Takes text, keeps its order over both streams, sends it. ``flush`` sends all, ``tick`` whole lines (and begun
    ones that their writer flushed). In a process that user code forks it writes to the descriptors instead."""

    def __init__(
        self,
        cell: Callable[[], int],
        send: Callable[[Any], None],
        stdout_path: str = "",
        stderr_path: str = "",
    ) -> None:
        self._cell = cell
        self._send_message = send
        self._tails = [LogTail(name, path) for name, path in (("stdout", stdout_path), ("stderr", stderr_path)) if path]
        self._stem = f"{stdout_path.removesuffix('.out')}.{os.getpid()}" if stdout_path else ""
        self._caps: dict[int, CellCap] = {}
        self._runs: list[tuple[int, str, list[str]]] = []  # cell, stream, pieces
        self._size = 0
        self._sent_at = self._looked_at = 0.0
        self._looked_in, self._looks = -1, 0
        self._is_at_begin = True
        self._shows_begun = False
        self._is_forked = False
        # Guards all of it. Again by the same thread: a destructor may print while text is taken in.
        self._lock = threading.RLock()

    def watch_forks(self) -> None:
        os.register_at_fork(after_in_child=self._on_fork)

    def _on_fork(self) -> None:
        # The socket, and what is pending, are the parent's.
        self._is_forked = True
        self._lock = threading.RLock()
        self._runs, self._size = [], 0

    def write(self, stream: str, text: str) -> None:
        if self._is_forked:
            _write_all(FDS[stream], text)
            return
        with self._lock:
            cell = self._cell()
            if self._is_at_begin and text != "\n":
                self._look(cell)
            self._add(cell, stream, text)
            if text[-1] == "\n":
                self._is_at_begin = True
                if self._size > _MAX_PENDING or time.monotonic() - self._sent_at > INTERVAL_S:
                    self._send()
            else:
                self._is_at_begin = False
                if self._size > 2 * _MAX_PENDING:
                    self._send()

    def _look(self, cell: int) -> None:
        """What the descriptors wrote before this line stands before it. A look costs more than a print does: of a cell
        that prints without end, only one a millisecond."""
        if cell != self._looked_in:
            self._looked_in, self._looks = cell, _EXACT_LINES
        if self._looks > 0:
            self._looks -= 1
        elif time.monotonic() - self._looked_at < _LOOK_S:
            return
        self._take_logs()
        self._looked_at = time.monotonic()

    def show_begun(self) -> None:
        """The writer flushed: the next tick sends the unfinished line too."""
        self._shows_begun = True

    def tick(self) -> None:
        with self._lock:
            self._take_logs()
            shows_begun, self._shows_begun = self._shows_begun, False
            self._send(begun=shows_begun)

    def flush(self) -> None:
        with self._lock:
            if self._tails:
                flush_c()
            self._take_logs(all_of_it=True)
            self._send(begun=True)

    def _take_logs(self, all_of_it: bool = False) -> None:
        for tail in self._tails:
            while text := tail.read():
                self._add(self._cell(), tail.stream, text)
                if self._size > _MAX_PENDING:
                    self._send()
                if not all_of_it:
                    break

    def _add(self, cell: int, stream: str, text: str) -> None:
        runs = self._runs
        if runs and runs[-1][0] == cell and runs[-1][1] == stream:
            runs[-1][2].append(text)
        else:
            runs.append((cell, stream, [text]))
        self._size += len(text)

    def _send(self, begun: bool = False) -> None:
        runs, self._runs, self._size = self._runs, [], 0
        unfinished: dict[tuple[int, str], str] = {}
        for cell, stream, pieces in runs:
            text = unfinished.pop((cell, stream), "") + "".join(pieces)
            whole, newline, rest = text.rpartition("\n")
            if newline:
                self._report(cell, stream, whole + "\n")
            if rest:
                unfinished[cell, stream] = rest
        for (cell, stream), rest in unfinished.items():
            if begun or len(rest) > _MAX_PENDING:
                self._report(cell, stream, rest)
            else:
                self._add(cell, stream, rest)
        if runs:
            self._sent_at = time.monotonic()
        for cap in self._caps.values():
            if (tail := cap.news()) is not None:
                self._send_message(tail)

    def _report(self, cell: int, stream: str, text: str) -> None:
        text = _sendable(_REPLACED.sub("", text) if "\r" in text else text)
        if cell:  # a script has no cells, and shows all
            text = self._cap(cell).add(stream, text)
        if text:
            self._send_message(wire.Output(cell, stream, text))

    def _cap(self, cell: int) -> CellCap:
        if cell not in self._caps:
            self._caps[cell] = CellCap(cell, f"{self._stem}.cell{cell}.txt" if self._stem else "")
            for old in sorted(self._caps)[:-_KEPT_CAPS]:
                self._caps.pop(old).close()
        return self._caps[cell]


class CellStream(io.TextIOBase):
    """``sys.stdout`` or ``sys.stderr`` of a worker. May be used from any thread."""

    encoding = "utf-8"
    errors = "backslashreplace"

    def __init__(self, name: str, recorder: Recorder) -> None:
        super().__init__()
        self._name = name
        self._recorder = recorder

    @property
    def name(self) -> str:
        return f"<{self._name}>"

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return False

    def fileno(self) -> int:
        return FDS[self._name]

    def write(self, text: str) -> int:
        if not isinstance(text, str):
            raise TypeError(f"write() argument must be str, not {type(text).__name__}")
        if text:
            self._recorder.write(self._name, text)
        return len(text)

    def flush(self) -> None:
        # Sent with the next tick: a loop of print(..., flush=True) would otherwise cost a message each.
        self._recorder.show_begun()


class Flusher(threading.Thread):
    """Calls each of ``told`` every tenth of a second, also while user code computes or sleeps."""

    def __init__(self, told: Sequence[Callable[[], None]], interval_s: float = INTERVAL_S) -> None:
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


def _sendable(text: str) -> str:
    """A bare surrogate cannot travel: it is shown as Python's stderr shows it."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()


def _write_all(fd: int, text: str) -> None:
    left = memoryview(text.encode("utf-8", "backslashreplace"))
    while left:
        left = left[os.write(fd, left) :]
