"""What is printed on this worker, sent to the notebook with the cell that caused it, in the order it was printed.

Two ways lead here: ``sys.stdout`` and ``sys.stderr`` (CellStream), and the log files that file descriptors 1 and 2 are
(log_tail.py), where C code, child processes and ``os.write`` print. What is more than a cell can show goes to a file
(output_cap.py).

Runs on: any thread prints; the flusher's thread sends every tenth of a second, the main thread at the end of an op.
"""

from __future__ import annotations

import codecs
import io
import os
import re
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from monarch_lab.wire import engine as wire
from monarch_lab.worker.log_tail import LogTail, flush_c
from monarch_lab.worker.output_cap import CellCap

FDS = {"stdout": 1, "stderr": 2}
INTERVAL_S = 0.1
_MAX_PENDING = 65_536
_MOST_PIECES = 16_384
# So many lines of a cell are in exact order with what was written to the descriptors.
_EXACT_LINES = 1_000
_LOOK_LINES = 64
# Caps of cells that may still print: a stream or a thread goes on with an earlier one.
_KEPT_CAPS = 8
# Versions of a line that the next one replaces within the same tick: nobody would see them.
_REPLACED = re.compile(r"\r(?:(?!\x1b\[A)[^\r\n])*(?=\r)")

Piece = tuple[int, str, str]  # cell, stream, text


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
        # Appended to without the lock: taking it would cost more than all else that a print does.
        self._pieces: deque[Piece] = deque()
        self._looked_in, self._lines = -1, 0
        self._is_at_begin = True
        self._is_quiet = True  # nothing was sent since the last tick: the next line is at once
        self._shows_begun = False
        self._sender = 0  # the thread that sends; it holds the lock
        self._is_interrupted = False
        self._is_forked = False
        # Guards all but that. Again by the same thread: a destructor may print while text is taken in.
        self._lock = threading.RLock()

    def watch_forks(self) -> None:
        os.register_at_fork(after_in_child=self._on_fork)

    def _on_fork(self) -> None:
        # The socket, and what is pending, are the parent's.
        self._is_forked = True
        self._lock = threading.RLock()
        self._pieces.clear()
        self._sender = 0

    def write(self, stream: str, text: str) -> None:
        if self._is_forked:
            _write_all(FDS[stream], text)
            return
        cell = self._cell()
        if self._is_at_begin and text != "\n":
            self._look(cell)
        self._pieces.append((cell, stream, text))
        self._is_at_begin = text[-1] == "\n"
        if len(self._pieces) > _MOST_PIECES or len(text) > _MAX_PENDING or (self._is_quiet and self._is_at_begin):
            with self._lock:
                self._send()

    def _look(self, cell: int) -> None:
        """What the descriptors wrote before this line stands before it. A look costs more than a print does: a cell
        that prints without end has one only now and then."""
        if cell != self._looked_in:
            self._looked_in, self._lines = cell, 0
        self._lines += 1
        if self._lines < _EXACT_LINES or self._lines % _LOOK_LINES == 0:
            with self._lock:
                self._take_logs()

    def show_begun(self) -> None:
        """The writer flushed: the next tick sends the unfinished line too."""
        self._shows_begun = True

    def tick(self) -> None:
        with self._lock:
            self._take_logs()
            shows_begun, self._shows_begun = self._shows_begun, False
            self._send(begun=shows_begun)
            self._is_quiet = True

    def interrupt(self) -> None:
        """Raise KeyboardInterrupt; where text would be lost, as soon as it is sent. In a signal handler."""
        if self._sender == threading.get_ident():
            self._is_interrupted = True
        else:
            raise KeyboardInterrupt

    def flush(self) -> None:
        with self._lock:
            if self._tails:
                flush_c()
            self._take_logs(all_of_it=True)
            self._send(begun=True)

    def flush_pieces(self) -> None:
        """As ``flush``, without a look at what the descriptors wrote."""
        if self._pieces:
            with self._lock:
                self._send(begun=True)

    def _take_logs(self, all_of_it: bool = False) -> None:
        for tail in self._tails:
            while text := tail.read():
                self._pieces.append((self._cell(), tail.stream, text))
                if not all_of_it or self._sender:
                    break
                self._send()

    def _send(self, begun: bool = False) -> None:
        if self._sender:  # a destructor prints meanwhile: with the next tick
            return
        self._sender, self._is_quiet = threading.get_ident(), False
        try:
            self._send_pieces(begun)
        finally:
            self._sender = 0
        if self._is_interrupted:
            self._is_interrupted = False
            raise KeyboardInterrupt

    def _send_pieces(self, begun: bool) -> None:
        unfinished: dict[tuple[int, str], str] = {}
        for cell, stream, text in self._take_runs():
            text = unfinished.pop((cell, stream), "") + text
            whole, newline, rest = text.rpartition("\n")
            if newline:
                self._report(cell, stream, whole + "\n")
            if rest:
                unfinished[cell, stream] = rest
        kept = []
        for (cell, stream), rest in unfinished.items():
            if begun or len(rest) > _MAX_PENDING:
                self._report(cell, stream, rest)
            else:
                kept.append((cell, stream, rest))
        self._pieces.extendleft(reversed(kept))  # before what is printed meanwhile
        for cap in self._caps.values():
            if (tail := cap.news()) is not None:
                self._send_message(tail)

    def _take_runs(self) -> Iterator[Piece]:
        """What is pending, joined where it is of one cell and stream."""
        run: list[str] = []
        of = (0, "")
        for _ in range(len(self._pieces)):
            cell, stream, text = self._pieces.popleft()
            if (cell, stream) != of:
                if run:
                    yield *of, "".join(run)
                of, run = (cell, stream), []
            run.append(text)
        if run:
            yield *of, "".join(run)

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
        self.buffer = _Bytes(self)

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


class _Bytes(io.RawIOBase):
    """``sys.stdout.buffer``: UTF-8, a character of which may come in pieces."""

    def __init__(self, stream: CellStream) -> None:
        self._stream = stream
        self._decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._stream.fileno()

    def write(self, data: Any, /) -> int:
        view = memoryview(data)
        self._stream.write(self._decoder.decode(view.tobytes()))
        return view.nbytes

    def flush(self) -> None:
        self._stream.flush()


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
