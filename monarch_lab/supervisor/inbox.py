"""Where letters wait until a user takes them, in the order they came; and views of it that see only some of them.

Runs on: any thread may put (the supervisor's loop, a process's reader), any may take. A letter is opened by the
thread that looks at it, outside the lock, since unpickling and filters run the user's code.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from monarch_lab.errors import ClosedError, UsageTypeError
from monarch_lab.supervisor.letters import Letter, open_letter
from monarch_lab.transport.held_interrupt import HeldInterrupt

Test = Callable[[Letter], bool]


class Entry:
    """A letter as it arrived: opened at the first look, and only once."""

    __slots__ = ("_letter", "_data", "sender", "size")

    def __init__(self, sender: Any, message: Any = None, data: bytes | None = None) -> None:
        self.sender = sender
        self.size = 0 if data is None else len(data)
        self._data = data
        self._letter = Letter(sender, message) if data is None else None

    def open(self) -> Letter:
        letter, data = self._letter, self._data
        if letter is None:
            assert data is not None
            letter = self._letter = Letter(self.sender, open_letter(data))
            self._data = None
        return letter


class Inbox:
    """``on_taken(sender, size)`` is told of each letter of a process that was taken, so that it may send more."""

    def __init__(self, name: str, on_taken: Callable[[Any, int], None]) -> None:
        self._name = name
        self._on_taken = on_taken
        self._changed = threading.Condition()  # guards all below
        self._entries: dict[int, Entry] = {}  # by number of arrival; taken ones are gone
        self._first = 0  # no entry has a lower number
        self._next = 0
        self._sleepers: set[Callable[[], None]] = set()  # asynchronous waits
        self._why_closed: str | None = None

    def put(self, entries: list[Entry]) -> None:
        with self._changed:
            for entry in entries:
                self._entries[self._next] = entry
                self._next += 1
            self._wake()

    def close(self, why: str) -> None:
        """What is here can still be taken; then waits end with ClosedError."""
        with self._changed:
            self._why_closed = why
            self._wake()

    def __len__(self) -> int:
        with self._changed:
            return len(self._entries)

    def _wake(self) -> None:
        self._changed.notify_all()
        for wake in self._sleepers:
            wake()

    def take(self, view: View, deadline: float | None) -> Letter:
        """The next letter that ``view`` lets through. TimeoutError at the deadline (monotonic; None waits for ever)."""
        while True:
            letter = self.look(view)
            if letter is not None:
                return letter
            with self._changed:
                if view.cursor < self._next:
                    continue
                self._check_open()
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    raise TimeoutError(f"no letter came to {self._name} in time")
                self._changed.wait(left)

    async def take_async(self, view: View, deadline: float | None) -> Letter:
        import asyncio  # heavy: a process that never waits this way does without

        loop = asyncio.get_running_loop()
        while True:
            woken = asyncio.Event()

            def wake(woken: asyncio.Event = woken) -> None:
                loop.call_soon_threadsafe(woken.set)

            with self._changed:
                self._sleepers.add(wake)
            try:
                letter = self.look(view)
                if letter is not None:
                    return letter
                self._check_open()
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    raise TimeoutError(f"no letter came to {self._name} in time")
                try:
                    await asyncio.wait_for(woken.wait(), left)
                except TimeoutError:
                    pass  # one more look
            finally:
                with self._changed:
                    self._sleepers.discard(wake)

    def look(self, view: View) -> Letter | None:
        """The next letter for ``view`` among those that are here; what it skips it does not look at again."""
        while True:
            with self._changed:
                number = self._next_number(view)
                if number is None:
                    return None
                entry = self._entries[number]
            if view.test is not None and not view.test(entry.open()):
                view.cursor = number + 1
                continue
            letter = entry.open()
            taken = False
            try:
                with HeldInterrupt():
                    with self._changed:
                        taken = self._entries.pop(number, None) is not None
                    if taken and entry.size:
                        self._on_taken(entry.sender, entry.size)
            except BaseException:
                if taken:  # interrupted: as if we had not been here
                    with self._changed:
                        self._entries[number] = entry
                        self._first = min(self._first, number)
                raise
            view.cursor = number + 1
            if taken:  # else another thread was faster
                return letter

    def _next_number(self, view: View) -> int | None:
        while self._first < self._next and self._first not in self._entries:
            self._first += 1
        number = max(view.cursor, self._first) if view.test is not None else self._first
        while number < self._next:
            if number in self._entries:
                return number
            number += 1
        view.cursor = number
        return None

    def _check_open(self) -> None:
        if self._why_closed is not None:
            raise ClosedError(self._why_closed)


class View:
    """What a user receives from: all letters, or those that pass a filter."""

    def __init__(self, inbox: Inbox, test: Test | None = None) -> None:
        self._inbox = inbox
        self.test = test
        self.cursor = 0  # this view has seen, and left, what has a lower number

    def recv(self, timeout: float | None = None) -> Letter:
        """The next letter, or TimeoutError after so many seconds."""
        return self._inbox.take(self, _deadline(timeout))

    async def recv_async(self, timeout: float | None = None) -> Letter:
        return await self._inbox.take_async(self, _deadline(timeout))

    def recvready(self, timeout: float | None = 0) -> list[Letter]:
        """Every letter that is here; waits for the first one only, at most ``timeout``."""
        letters: list[Letter] = []
        try:
            letters.append(self._inbox.take(self, _deadline(timeout)))
        except TimeoutError:
            return letters
        while (letter := self._inbox.look(self)) is not None:
            letters.append(letter)
        return letters

    def recvloop(self, timeout: float | None = None) -> Iterator[Letter]:
        """``recv(timeout)`` again and again."""
        while True:
            yield self.recv(timeout)

    def messagefilter(self, wanted: type | tuple[type, ...] | Test) -> Filter:
        """A view of the letters whose message is of a type, or for which ``wanted(letter)`` is true.

        What it skips stays where it is, in order, for others.
        """
        test, outer = _test_for(wanted), self.test
        return Filter(self._inbox, test if outer is None else lambda letter: outer(letter) and test(letter))


class Filter(View):
    """Made by ``messagefilter``. It keeps its place: repeated reads look at nothing twice."""


def _test_for(wanted: type | tuple[type, ...] | Test) -> Test:
    if isinstance(wanted, type) or (isinstance(wanted, tuple) and all(isinstance(t, type) for t in wanted)):
        types = wanted
        return lambda letter: isinstance(letter.message, types)
    if callable(wanted):
        return wanted
    raise UsageTypeError(f"messagefilter takes a type, types, or a function of a letter, not {wanted!r}")


def _deadline(timeout: float | None) -> float | None:
    return None if timeout is None else time.monotonic() + timeout
