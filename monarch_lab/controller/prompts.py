"""Debuggers of workers that wait for a line, and who answers them: the thread that waits for the mesh."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from monarch_lab.controller.front import DebugPrompt, Front
from monarch_lab.wire.engine import DebugRead, DebugReply

Reply = Callable[[int, DebugReply], None]


class Prompts:
    """The I/O thread adds, a thread that waits serves; ``quitting`` leaves every debugger that comes to wait."""

    def __init__(self, reply: Reply, label: Callable[[int], str], is_gone: Callable[[int], bool]) -> None:
        self.quitting = False
        self.serving = False
        self._reply = reply
        self._label = label
        self._is_gone = is_gone
        self._waiting: deque[tuple[int, DebugRead]] = deque()

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def is_waiting(self, rank: int) -> bool:
        return any(r == rank for r, _ in list(self._waiting))

    def add(self, rank: int, read: DebugRead) -> None:
        if self.quitting:
            self._leave(rank, read)
        else:
            self._waiting.append((rank, read))

    def serve(self, front: Front) -> None:
        """Ask the user for each that waits, one at a time. KeyboardInterrupt leaves the one that was asked."""
        if self.serving:
            return
        self.serving = True
        try:
            while self._waiting:
                rank, read = self._waiting.popleft()
                self._answer(front, rank, read)
        finally:
            self.serving = False

    def forget(self, rank: int) -> None:
        """Its process is gone: nobody waits for a line any more."""
        self._waiting = deque(entry for entry in self._waiting if entry[0] != rank)

    def leave_all(self) -> None:
        while self._waiting:
            self._leave(*self._waiting.popleft())

    def _answer(self, front: Front, rank: int, read: DebugRead) -> None:
        alive = self._is_gone
        prompt = DebugPrompt(rank, self._label(rank), read.text, read.prompt, lambda: not alive(rank))
        try:
            line = front.ask(prompt)
        except KeyboardInterrupt:
            self._leave(rank, read)  # the prompt ends, not the kernel: the debugger is left, and the op with it
            raise
        self._reply(rank, DebugReply(read.session, read.number, line, declined=line is None))

    def _leave(self, rank: int, read: DebugRead) -> None:
        self._reply(rank, DebugReply(read.session, read.number, "q"))
