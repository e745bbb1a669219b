"""Ends of processes that are known and not yet told.

The agent tells an end over its own connection, so that the dead worker's last reports may still be on their way through
zmq's reader: an end is told after a round of ``QUIET_S`` without a report, and at the latest, beside workers that never
fall silent, after ``QUIET_AT_LATEST_S``.
"""

from __future__ import annotations

import time

from monarch_lab.wire.supervision import ProcessExited

QUIET_S = 0.003
QUIET_AT_LATEST_S = 0.05


class HeldEnds:
    def __init__(self) -> None:
        self._held: list[ProcessExited] = []
        self._until = 0.0

    def __bool__(self) -> bool:
        return bool(self._held)

    def add(self, exited: ProcessExited) -> None:
        if not self._held:
            self._until = time.monotonic() + QUIET_AT_LATEST_S
        self._held.append(exited)

    def due(self, quiet: bool) -> list[ProcessExited]:
        """Those to be told now. ``quiet``: no report has come in this round."""
        if not quiet and time.monotonic() < self._until:
            return []
        held, self._held = self._held, []
        return held
