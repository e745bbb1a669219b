"""Ctrl-C in a cell that awaits.

While such a cell runs, ipykernel's own handler only asks the event loop to cancel it. That is heard at the loop's
next wake-up, and never while the cell itself holds the main thread: waiting for workers, or in a Python loop.
"""

from __future__ import annotations

import asyncio
import signal
import threading
from types import CodeType, FrameType, TracebackType
from typing import Any

WAKE_S = 0.2


class AwaitInterrupts:
    """While entered, an interrupt is heard within ``WAKE_S``, whatever the cell does. ``cell`` is its code.

    Does nothing in a cell without ``await``, where Python's own handler raises KeyboardInterrupt at once.
    ``was_heard``: asyncio's CancelledError is then the user's interrupt.
    """

    def __init__(self, cell: CodeType) -> None:
        self._cell = cell
        self._previous: Any = None
        self._wake: asyncio.TimerHandle | None = None
        self.was_heard = False

    def __enter__(self) -> AwaitInterrupts:
        handler = signal.getsignal(signal.SIGINT)
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and callable(handler) and handler is not signal.default_int_handler:
            self._previous = handler
            signal.signal(signal.SIGINT, self._hear)
            try:
                self._keep_waking(asyncio.get_running_loop())
            except RuntimeError:  # no loop runs
                pass
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)
            self._previous = None
        if self._wake is not None:
            self._wake.cancel()

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self.was_heard = True
        # With the cell on the stack the main thread is the cell's; raised in an idle loop it would end the kernel.
        while frame is not None:
            if frame.f_code is self._cell:
                raise KeyboardInterrupt
            frame = frame.f_back
        self._previous(number, frame)

    def _keep_waking(self, loop: asyncio.AbstractEventLoop) -> None:
        self._wake = loop.call_later(WAKE_S, self._keep_waking, loop)
