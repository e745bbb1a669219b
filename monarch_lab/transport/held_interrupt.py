"""A KeyboardInterrupt that waits for the end of a block. Without zmq: processes that only send letters use it too."""

from __future__ import annotations

# The module below `signal`, whose functions turn numbers into enums and back: 9 us a message instead of 1.
import _signal  # type: ignore[import-not-found]
import threading
from types import FrameType

_SIGINT = int(_signal.SIGINT)


class HeldInterrupt:
    """On the main thread, SIGINT is delivered at the end of the block; on others it never arrives.

    By a handler of its own, not by the signal mask: a masked SIGINT goes to another thread, and Python runs the
    handler on the main one all the same.
    """

    __slots__ = ("_before", "_held")

    def __enter__(self) -> None:
        self._held: FrameType | None = None
        before = _signal.getsignal(_SIGINT) if threading.current_thread() is threading.main_thread() else None
        # SIG_DFL, SIG_IGN and handlers in C raise nothing.
        self._before = before if callable(before) else None
        if self._before is not None:
            _signal.signal(_SIGINT, self._hold)

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            _signal.signal(_SIGINT, self._before)
            if self._held is not None:
                self._before(_SIGINT, self._held)

    def _hold(self, _: int, frame: FrameType | None) -> None:
        self._held = frame
