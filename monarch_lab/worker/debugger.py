"""pdb whose terminal is the notebook cell.

Output is kept until the debugger wants a line, then both travel in one message; the answer comes through the
reader thread. Runs on: the worker's main thread, which waits here while the user thinks, without a time-out.
"""

from __future__ import annotations

import bdb
import io
import itertools
import pdb
import queue
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from monarch_lab.wire.engine import DebugEnded, DebugRead, DebugReply


class DebuggerQuit(bdb.BdbQuit):
    """The user left the debugger with ``q``: this op ends, the mesh lives."""

    def __str__(self) -> str:
        return "the debugger was left with q, so this call has no result"


class Terminal(io.TextIOBase):
    """Both ends of a debugger's terminal: writes are kept, a read asks the kernel."""

    def __init__(self, session: int, report: Callable[[Any], None], replies: queue.SimpleQueue[DebugReply]) -> None:
        super().__init__()
        self.session = session
        self.declined = False
        self._report = report
        self._replies = replies
        self._text: list[str] = []
        self._numbers = itertools.count()

    def writable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self._text.append(text)
        return len(text)

    def take(self) -> str:
        text = "".join(self._text)
        self._text.clear()
        return text

    def readline(self, size: int = -1) -> str:  # type: ignore[override]
        if self.declined:
            return "continue\n"
        text, newline, prompt = self.take().rpartition("\n")
        number = next(self._numbers)
        self._report(DebugRead(self.session, number, text + newline, prompt))
        while True:
            reply = self._replies.get()
            if (reply.session, reply.number) == (self.session, number):
                break  # an answer to a prompt that an interrupt ended is stale
        if reply.declined:
            self.declined = True
            return "continue\n"
        return "" if reply.line is None else reply.line + "\n"


class WorkerPdb(pdb.Pdb):
    def __init__(self, terminal: Terminal, ended: Callable[[], None]) -> None:
        streams: Any = terminal  # all that pdb uses of a file
        super().__init__(stdin=streams, stdout=streams, nosigint=True, readrc=False)
        self.use_rawinput = False
        self.prompt = "(Pdb) "
        self._ended = ended

    def set_continue(self) -> None:
        super().set_continue()
        if not self.breaks:
            self._ended()

    def dispatch_line(self, frame: FrameType) -> Any:
        try:
            return super().dispatch_line(frame)
        except bdb.BdbQuit:
            self._ended()
            raise DebuggerQuit from None

    def dispatch_return(self, frame: FrameType, arg: Any) -> Any:
        try:
            return super().dispatch_return(frame, arg)
        except bdb.BdbQuit:
            self._ended()
            raise DebuggerQuit from None


class Debugger:
    """Starts sessions; ``reply`` is called by the reader thread."""

    def __init__(self, report: Callable[[Any], None], before_prompt: Callable[[], None]) -> None:
        self._report = report
        self._before_prompt = before_prompt
        self._replies: queue.SimpleQueue[DebugReply] = queue.SimpleQueue()
        self._sessions = itertools.count(1)
        self._current: WorkerPdb | None = None

    def install(self) -> None:
        sys.breakpointhook = self._hook
        pdb.set_trace = lambda *, header=None, **_: self._start(sys._getframe(1), header)

    def reply(self, message: DebugReply) -> None:
        self._replies.put(message)

    def _hook(self, *args: Any, **kwargs: Any) -> None:
        self._start(sys._getframe(1), kwargs.get("header"))

    def _start(self, frame: FrameType, header: str | None) -> None:
        self._before_prompt()
        if self._current is not None:  # breakpoint() while stepping: the same session goes on
            self._current.set_trace(frame)
            return
        terminal = Terminal(next(self._sessions), self._report, self._replies)
        session = self._current = WorkerPdb(terminal, lambda: self._end(terminal))
        if header is not None:
            terminal.write(header + "\n")
        session.set_trace(frame)

    def _end(self, terminal: Terminal) -> None:
        if self._current is not None:
            self._current = None
            self._report(DebugEnded(terminal.session, terminal.take()))
