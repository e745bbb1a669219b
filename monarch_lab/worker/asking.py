"""``input()``, ``getpass.getpass()`` and ``sys.stdin`` on a worker: the notebook cell asks for a line, with the rank.

A worker has no terminal, and its own standard input is empty. Runs on: any thread of the worker, which waits without a
time-out while the user thinks; ``reply`` on the reader thread.
"""

from __future__ import annotations

import builtins
import getpass
import io
import itertools
import os
import queue
import sys
import threading
from collections.abc import Callable
from typing import Any

from monarch_lab.errors import StdinNotImplementedError
from monarch_lab.wire.engine import InputRead, InputReply

_LOOK_S = 0.2  # a thread beside the main one is interrupted between two waits


class Asking:
    def __init__(self, report: Callable[[Any], None], before_prompt: Callable[[], None]) -> None:
        self._report = report
        self._before_prompt = before_prompt
        self._numbers = itertools.count(1)
        self._waiting: dict[int, queue.SimpleQueue[InputReply]] = {}
        self._pid = 0

    def install(self) -> None:
        self._pid = os.getpid()
        builtins.input = self._input
        getpass.getpass = self._getpass
        sys.stdin = Stdin(lambda: self._ask("sys.stdin", "", hidden=False))

    def reply(self, message: InputReply) -> None:
        waiting = self._waiting.get(message.number)
        if waiting is not None:  # else an interrupt has ended it
            waiting.put(message)

    def _input(self, prompt: object = "", /) -> str:
        """Read a line from the user, whose notebook asks for it with this process's rank before the prompt.

        Raises EOFError at the end of input (Ctrl-D), StdinNotImplementedError where the front end cannot ask.
        """
        return self._ask("input()", str(prompt), hidden=False)

    def _getpass(self, prompt: str = "Password: ", stream: object = None, **_: object) -> str:
        """As input(), hidden as it is typed. ``stream`` (and ``echo_char``) are for terminals, and not looked at."""
        return self._ask("getpass()", str(prompt), hidden=True)

    def _ask(self, name: str, prompt: str, *, hidden: bool) -> str:
        __tracebackhide__ = True
        if os.getpid() != self._pid:
            raise StdinNotImplementedError(
                f"{name}: a process that a worker has started cannot ask: ask before it starts"
            )
        number = next(self._numbers)
        replies = self._waiting[number] = queue.SimpleQueue()
        try:
            self._before_prompt()
            self._report(InputRead(number, prompt, hidden))
            reply = _wait(replies)
        finally:
            del self._waiting[number]
        if reply.interrupted:
            raise KeyboardInterrupt
        if reply.refused:
            raise StdinNotImplementedError(f"{name}: {reply.refused}")
        if reply.line is None:
            raise EOFError(f"{name}: end of input")
        return reply.line


class Stdin(io.TextIOBase):
    """``ask()`` gives a line without its end, and raises EOFError where there is none."""

    encoding = "utf-8"

    def __init__(self, ask: Callable[[], str]) -> None:
        self._ask = ask
        self._rest = ""  # of a line of which a part was asked for

    def readable(self) -> bool:
        return True

    def fileno(self) -> int:
        return 0  # what a child process has, which is empty

    def readline(self, size: int | None = -1, /) -> str:  # type: ignore[override]
        __tracebackhide__ = True
        try:
            line = self._rest or self._ask() + "\n"
        except EOFError:
            return ""
        count = len(line) if size is None or size < 0 else size
        self._rest = line[count:]
        return line[:count]

    def read(self, size: int | None = -1, /) -> str:
        """To the end of input, or a part of the next line."""
        __tracebackhide__ = True
        return "".join(self) if size is None or size < 0 else self.readline(size)


def _wait(replies: queue.SimpleQueue[InputReply]) -> InputReply:
    if threading.current_thread() is threading.main_thread():
        return replies.get()  # a signal wakes it
    while True:
        try:
            return replies.get(timeout=_LOOK_S)
        except queue.Empty:
            continue
