"""What to start, and who is told what happens to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from monarch_lab.supervisor.lifecycle import ProcessInfo
from monarch_lab.wire.supervision import LaunchWorker


@dataclass(frozen=True, slots=True)
class MeshLaunch:
    name: str
    hosts: int  # simulated hosts on this machine: labels only, one agent serves them all
    per_host: int
    device: str  # "cpu" or "cuda"
    seed: int
    env: Mapping[str, str]
    python_path: Sequence[str]
    cwd: str
    worker_module: str = "monarch_lab.worker.main"
    preload: Sequence[str] = ("torch",)  # what the zygote imports before it forks
    socket_type: str = "unix"  # or "tcp": loopback with CURVE
    labels: Mapping[str, str] = field(default_factory=dict)  # the user's words about it
    gpus: int = 0  # of device "cuda": how many there are; workers share them in turn where they are more
    logging_location: str = "file"  # or "default": where this process's own output goes


class Listener(Protocol):
    """Called on the supervisor's I/O thread: must not block, nor call ``stop``."""

    def on_report(self, rank: int, frames: list[bytes | memoryview]) -> None:
        """A message of a worker, header first, in the order it was sent."""

    def on_process(self, process: ProcessInfo) -> None:
        """A process has started, is ready, or has exited (after its last report)."""

    def on_beat(self) -> None:
        """The agent has told what its processes use: the snapshots are of this moment."""

    def on_silence(self, text: str) -> None:
        """The agent has not been heard for a while (told at each look), or "": it speaks."""

    def on_lost(self, reason: str) -> None:
        """The agent is gone, and every worker with it."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The workers of a mesh, by rank, and who is told of them."""

    name: str
    launches: dict[int, LaunchWorker]
    processes: dict[int, ProcessInfo]
    listener: Listener
