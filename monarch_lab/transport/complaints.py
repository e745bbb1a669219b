"""When to log what strangers send: once a peer, and at most once a minute however many there are. Pure."""

from __future__ import annotations

_PAUSE_S = 60.0
_MOST_NAMES = 1024


class Complaints:
    def __init__(self) -> None:
        self.count = 0
        self._named: set[bytes] = set()
        self._untold = 0
        self._silent_until = -float("inf")

    def note(self, name: bytes, reason: str, now: float) -> str | None:
        """The line to log, or None. ``name`` is what the transport knows of the peer."""
        self.count += 1
        self._untold += 1
        if name in self._named or now < self._silent_until:
            return None
        if len(self._named) < _MOST_NAMES:
            self._named.add(name)
        self._silent_until = now + _PAUSE_S
        others, self._untold = self._untold - 1, 0
        more = f"; {others} messages of strangers were dropped before it" if others else ""
        return f"peer {name!r} is refused: {reason}{more}"
