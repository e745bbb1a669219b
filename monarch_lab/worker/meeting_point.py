"""All ranks of a mesh come to one place before torch waits for them there in C code.

torch's own wait, in a store, hears neither Ctrl-C nor us, and cannot say who is missing. A rank that has come is a
file in the mesh's rendezvous directory. Runs on: the main thread; ``now`` and ``is_ended`` on the reader thread.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from monarch_lab.wire.looking import Collective
from monarch_lab.wire.supervision import WorkerSpec

_FIRST_LOOK_S, _LOOK_S = 0.0005, 0.02


class Meeting:
    def __init__(self, spec: WorkerSpec) -> None:
        self._spec = spec
        self._waits: tuple[str, str] | None = None  # place, what is called there
        self.is_ended = False  # set to end the wait

    def wait(self, place: str, call: str) -> None:
        """Until every rank has come to ``place``, a name that is used once. RuntimeError where the wait was ended."""
        ranks = range(self._spec.world_size)
        Path(self._file(place, self._spec.rank)).touch()
        pause = _FIRST_LOOK_S
        self._waits = place, call
        try:
            while missing := [rank for rank in ranks if not os.path.exists(self._file(place, rank))]:
                if self.is_ended:
                    raise RuntimeError(f"{call}: rank {', '.join(map(str, missing))} has not called it")
                time.sleep(pause)
                pause = min(_LOOK_S, 2 * pause)
        finally:
            self._waits = None

    def now(self) -> list[Collective]:
        """What this rank waits for, with who is missing."""
        waits = self._waits
        if waits is None:
            return []
        place, call = waits
        ranks = list(range(self._spec.world_size))
        missing = [rank for rank in ranks if not os.path.exists(self._file(place, rank))]
        return [Collective(call, place, ranks, 0, missing=missing)] if missing else []

    def _file(self, place: str, rank: int) -> str:
        return os.path.join(self._spec.rendezvous, f"{place}-here{rank}")
