"""The terminal of a worker's debugger: what it prints is kept, and travels with its next question to the kernel.

Runs on: the thread that has stopped, which waits here while the user thinks, without a time-out; ``answer`` on the
reader thread.
"""

from __future__ import annotations

import bdb
import io
import itertools
import queue
import threading
from collections.abc import Callable
from typing import Any

from monarch_lab.wire.debugging import DebugRead, DebugReply, Place

ANY = -1  # a reply's number: to whichever prompt there is


class DebuggerQuit(bdb.BdbQuit):
    """The user left the debugger with ``q``, or (``was_interrupted``) ended all that stood in one: this op ends, the
    mesh lives."""

    def __init__(self, was_interrupted: bool = False) -> None:
        super().__init__()
        self.was_interrupted = was_interrupted

    def __str__(self) -> str:
        how = "was interrupted" if self.was_interrupted else "was left with q"
        return f"the debugger {how}, so this call has no result"


class Declined(Exception):
    """Nobody can answer: the debugger is to say where it stopped, and to go on."""


class Terminal(io.TextIOBase):
    """Both ends of a debugger's terminal. ``place`` tells where it stands, ``before_prompt`` sends what the process
    printed before."""

    def __init__(self, session: int, report: Callable[[Any], None], stream: int = 0) -> None:
        super().__init__()
        self.session = session
        self.why = ""
        self.place: Callable[[], Place] = Place
        self.is_asking = False
        self._report = report
        self._replies: queue.SimpleQueue[DebugReply] = queue.SimpleQueue()
        self._text: list[str] = []
        self._numbers = itertools.count()
        self._stream = stream
        thread = threading.current_thread()
        self._thread = "" if thread is threading.main_thread() or stream else thread.name
        self.before_prompt: Callable[[], None] = lambda: None

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

    def answer(self, reply: DebugReply) -> None:
        """Runs on: the reader thread."""
        self._replies.put(reply)

    def readline(self, size: int = -1) -> str:  # type: ignore[override]
        """A line with its end; "" at the end of input. Raises DebuggerQuit where the op is to end, and Declined."""
        text, newline, prompt = self.take().rpartition("\n")
        number = next(self._numbers)
        self.before_prompt()
        while not self._replies.empty():  # to a prompt that is gone
            self._replies.get()
        self.is_asking = True
        try:
            self._report(
                DebugRead(
                    self.session, number, text + newline, prompt, self.place(), self._thread, self._stream, self.why
                )
            )
            self.why = ""
            while True:
                reply = self._replies.get()
                if reply.number in (number, ANY):
                    break  # an answer to a prompt that is gone is stale
        finally:
            self.is_asking = False
        if reply.leave:
            raise DebuggerQuit(was_interrupted=True)
        if reply.declined:
            raise Declined
        return "" if reply.line is None else reply.line + "\n"

    def ask(self, prompt: str) -> str | None:
        """A line for ``prompt``, without its end; None at the end of input."""
        self.write(prompt)
        line = self.readline()
        return line.rstrip("\n") if line else None
