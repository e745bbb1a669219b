"""A value that is on its way: result, exception, callbacks, await."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from monarch_lab.errors import ClosedError, DeviceException

if TYPE_CHECKING:
    from monarch_lab.controller.client import Client
    from monarch_lab.controller.waiting import Pending

T = TypeVar("T")
_LOOK_S = 0.02


class Future(Generic[T]):
    """The result of a fetch or a call on one process.

    Waiting needs nothing pumped and may happen on any thread; ``await`` works in any running event loop.
    """

    def __init__(self, client: Client, pending: Pending, finish: Callable[[Pending], T]) -> None:
        self._client = client
        self._pending = pending
        self._finish = finish
        self._outcome: tuple[T | None, BaseException | None] | None = None

    def done(self) -> bool:
        return self._outcome is not None or self._pending.done

    def result(self, timeout: float | None = None) -> T:
        """The value. Raises TimeoutError after ``timeout`` seconds, RemoteException or DeviceException where it
        does not exist."""
        value, error = self._wait(timeout)
        if error is not None:
            raise error
        return value  # type: ignore[return-value]

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """What ``result`` would raise, or None. Raises TimeoutError after ``timeout`` seconds."""
        return self._wait(timeout)[1]

    def _wait(self, timeout: float | None) -> tuple[T | None, BaseException | None]:
        if self._outcome is None:
            deadline = None if timeout is None else time.monotonic() + timeout
            try:
                self._client.wait(self._pending, deadline)
            except (ClosedError, DeviceException) as e:  # the mesh is gone: that is the outcome
                self._outcome = (None, e)
            self._settle()
        assert self._outcome is not None
        return self._outcome

    def _settle(self) -> None:
        if self._outcome is not None:
            return
        try:
            self._outcome = (self._finish(self._pending), None)
        except Exception as e:
            self._outcome = (None, e)

    def pause(self, seconds: float) -> None:
        """Wait so long or until it is done; debuggers are served meanwhile."""
        with contextlib.suppress(TimeoutError, ClosedError, DeviceException):
            self._client.wait(self._pending, time.monotonic() + seconds)

    def add_callback(self, fn: Callable[[Future[T]], Any]) -> None:
        """Call ``fn(self)`` once done: at once where it is, else on the thread that hears of it."""
        self._pending.add_callback(lambda: fn(self))

    def __await__(self) -> Generator[Any, None, T]:
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[None] = loop.create_future()

        def wake() -> None:
            if not waiter.done():
                waiter.set_result(None)

        def told(_: Future[T]) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(wake)

        self.add_callback(told)
        yield from waiter.__await__()
        return self.result(0)


def stream(futures: Iterable[Future[T]], timeout: float | None = None) -> Iterator[Future[T]]:
    """The futures, each once, as they are done. Raises TimeoutError where one is not ``timeout`` seconds after the
    first was asked for; what is done by then comes first."""
    waiting = list(futures)
    done: queue.SimpleQueue[Future[T]] = queue.SimpleQueue()
    for future in waiting:
        future.add_callback(done.put)
    last = None if timeout is None else time.monotonic() + timeout
    while waiting:
        try:
            found = done.get_nowait()
        except queue.Empty:
            if last is not None and time.monotonic() >= last:
                raise TimeoutError(f"{len(waiting)} futures were not done within {timeout} s") from None
            waiting[0].pause(_LOOK_S if last is None else min(_LOOK_S, last - time.monotonic()))
            continue
        waiting.remove(found)
        yield found
