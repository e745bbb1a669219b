"""How much of a time is left."""

from __future__ import annotations

import math
import time
from collections.abc import Callable


def TTL(seconds: float | None, clock: Callable[[], float] = time.monotonic) -> Callable[[], float]:
    """A function that gives the seconds that remain: never below 0; infinity for None."""
    if seconds is None:
        return lambda: math.inf
    end = clock() + seconds
    return lambda: max(0.0, end - clock())
