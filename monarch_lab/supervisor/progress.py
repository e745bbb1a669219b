"""How far the start of a mesh is, its deadlines, and whether the mesh lives. One thread moves it, any may wait for it.

No sockets and no clock: the time is an argument.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum, auto

from monarch_lab.config import Timeouts


class MeshState(Enum):
    STARTING = auto()
    LIVE = auto()
    FAILED = auto()  # did not come up, or its agent is gone; stop() clears up
    STOPPING = auto()
    CLOSED = auto()


class Stage(Enum):
    """What the start waits for; the value is what users read."""

    AGENT = "agent"
    IMPORTS = "import torch"
    IDLE = "spare"  # nothing: no mesh has asked for workers yet
    WORKERS = "workers"


@dataclass(frozen=True, slots=True)
class Progress:
    """A snapshot. ``failure`` is the text of the LaunchError."""

    state: MeshState = MeshState.STARTING
    stage: Stage = Stage.AGENT
    done: int = 0
    total: int = 1
    failure: str = ""

    def __str__(self) -> str:
        return self.failure or f"{self.stage.value}, {self.done} of {self.total}"


class StartClock:
    """Moved by the supervisor's thread (and by whoever closes it), read by all."""

    def __init__(self, timeouts: Timeouts) -> None:
        self.progress = Progress()
        self.due = float("inf")  # when the present stage is late
        self._within_s = {
            Stage.AGENT: timeouts.agent_hello,
            Stage.IMPORTS: timeouts.zygote_ready,
            Stage.IDLE: float("inf"),
            Stage.WORKERS: timeouts.worker_hello,
        }
        self._changed = threading.Condition()  # guards progress

    def enter(self, stage: Stage, total: int, now: float) -> None:
        if self.progress.state is MeshState.STARTING:
            self.due = now + self._within_s[stage]
            self._set(stage=stage, done=0, total=total)

    def count(self, done: int, total: int) -> None:
        """So many workers are ready; all of them: the mesh is live."""
        if self.progress.state is MeshState.STARTING:
            if done == total:
                self.due = float("inf")
                self._set(state=MeshState.LIVE, stage=Stage.WORKERS, done=done, total=total)
            else:
                self._set(stage=Stage.WORKERS, done=done, total=total)

    def fail_start(self, text: str) -> None:
        """Of no effect once the mesh is live, or has failed: the first cause is the one told."""
        self.due = float("inf")
        if self.progress.state is MeshState.STARTING:
            self._set(state=MeshState.FAILED, failure=text.rstrip())

    def note_zygote_end(self, text: str) -> None:
        """Of no effect once there are workers: the agent starts another zygote when one is to be forked."""
        match self.progress.stage:
            case Stage.IMPORTS:
                self.fail_start(f"the workers' modules cannot be imported:\n{text}")
            case Stage.IDLE:
                self.fail_start(f"the zygote has ended:\n{text}")

    def move(self, state: MeshState) -> None:
        self._set(state=state)

    def late_text(self, missing: list[int]) -> str:
        """What to say when the present stage is over its time."""
        stage = self.progress.stage
        within = f"within {self._within_s[stage]:g} s"
        match stage:
            case Stage.AGENT:
                return f"the agent did not say hello {within}"
            case Stage.IMPORTS:
                return f"torch was not imported {within}"
        return f"rank {', '.join(map(str, missing))} did not say hello {within}"

    def wait_change(self, known: Progress | None, timeout: float | None) -> Progress:
        """The present progress, once it differs from ``known`` or the time is over. Any thread."""
        with self._changed:
            self._changed.wait_for(lambda: self.progress != known, timeout)
            return self.progress

    def _set(self, **changes: object) -> None:
        with self._changed:
            self.progress = replace(self.progress, **changes)  # type: ignore[arg-type]
            self._changed.notify_all()


OnProgress = Callable[[str, int, int], None]
