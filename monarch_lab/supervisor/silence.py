"""Whether an agent that says nothing is still waited for. Pure: the time is an argument.

The one who judges may itself have been asleep (the interpreter held, the process stopped, the laptop closed): a look
that comes late says nothing about others, and what was sent meanwhile gets the whole time again to be heard.
"""

from __future__ import annotations

from enum import Enum, auto

# A look that comes so many times later than it should have is one's own stall.
_STALL = 3


class Verdict(Enum):
    FINE = auto()
    UNREACHABLE = auto()  # told, no more
    LOST = auto()  # given up


class Silence:
    """Judged from what is heard first on."""

    def __init__(self, look_every_s: float, unreachable_s: float, lost_s: float) -> None:
        self._look_every_s = look_every_s
        self._unreachable_s = unreachable_s
        self._lost_s = lost_s
        self._heard = self._looked = float("inf")

    def hear(self, now: float) -> None:
        self._heard = now
        self._looked = min(self._looked, now)

    def is_due(self, now: float) -> bool:
        return now >= self.next_look

    @property
    def next_look(self) -> float:
        return self._looked + self._look_every_s

    def for_s(self, now: float) -> float:
        return now - self._heard

    def look(self, now: float) -> Verdict:
        if now - self._looked > _STALL * self._look_every_s:
            self._heard = now
        self._looked = now
        if self.for_s(now) >= self._lost_s:
            return Verdict.LOST
        return Verdict.UNREACHABLE if self.for_s(now) >= self._unreachable_s else Verdict.FINE
