"""``input()`` and ``getpass.getpass()`` on a worker: the prompt is shown in the notebook cell, with the rank.

A worker has no terminal, and its own standard input is empty. Runs on: any thread of the worker, which waits without a
time-out while the user thinks; ``reply`` on the reader thread.
"""

from __future__ import annotations

import builtins
import getpass
import itertools
import queue
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

    def install(self) -> None:
        builtins.input = self._input
        getpass.getpass = self._getpass

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


def _wait(replies: queue.SimpleQueue[InputReply]) -> InputReply:
    if threading.current_thread() is threading.main_thread():
        return replies.get()  # a signal wakes it
    while True:
        try:
            return replies.get(timeout=_LOOK_S)
        except queue.Empty:
            continue
