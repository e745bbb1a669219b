"""Workers that wait at ``input()``, and who asks for them: the thread that waits for the mesh."""

from __future__ import annotations

from collections.abc import Callable

from monarch_lab.controller.front import Front, InputPrompt, NobodyToAskError
from monarch_lab.wire.engine import InputRead, InputReply


class Inputs:
    """The I/O thread adds, a thread that waits serves; ``quitting`` interrupts whoever comes to wait."""

    def __init__(
        self, reply: Callable[[int, InputReply], None], label: Callable[[int], str], is_gone: Callable[[int], bool]
    ) -> None:
        self.quitting = False
        self.serving = False
        self._reply = reply
        self._label = label
        self._is_gone = is_gone
        self._waiting: list[tuple[int, InputRead]] = []

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def is_waiting(self, rank: int) -> bool:
        return any(r == rank for r, _ in list(self._waiting))

    def add(self, rank: int, read: InputRead) -> None:
        if self.quitting:
            self._interrupt(rank, read)
        else:
            self._waiting.append((rank, read))

    def serve(self, front: Front) -> None:
        """Ask the user for each that waits, one at a time, lower ranks first. KeyboardInterrupt leaves them waiting,
        for who stops the cell to end."""
        if self.serving:
            return
        self.serving = True
        try:
            while waiting := list(self._waiting):
                rank, read = min(waiting, key=lambda entry: entry[0])
                reply = self._asked(front, rank, read)
                # It stays in the list meanwhile: an interrupt ends its wait too.
                if self._take((rank, read)):
                    self._reply(rank, reply)
        finally:
            self.serving = False

    def forget(self, rank: int) -> None:
        """Its process is gone: nobody waits for a line any more."""
        for entry in list(self._waiting):
            if entry[0] == rank:
                self._take(entry)

    def leave_all(self) -> None:
        for entry in list(self._waiting):
            if self._take(entry):
                self._interrupt(*entry)

    def _take(self, entry: tuple[int, InputRead]) -> bool:
        """Whether it waited still: two threads may end its wait."""
        try:
            self._waiting.remove(entry)
        except ValueError:
            return False
        return True

    def _asked(self, front: Front, rank: int, read: InputRead) -> InputReply:
        prompt = InputPrompt(rank, self._label(rank), read.prompt, read.hidden, lambda: not self._is_gone(rank))
        try:
            return InputReply(read.number, front.ask_input(prompt))
        except EOFError:
            return InputReply(read.number)
        except NobodyToAskError as e:
            return InputReply(read.number, refused=str(e))

    def _interrupt(self, rank: int, read: InputRead) -> None:
        self._reply(rank, InputReply(read.number, interrupted=True))
