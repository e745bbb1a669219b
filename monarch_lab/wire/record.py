"""What a mesh's directory says of it, for the user's other kernels and shells: one file, replaced as a whole.

Plain facts, no secret. Pids come with start time, boot and namespace, so that a number that was reused is not taken
for the process that had it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec


class PidRecord(msgspec.Struct, frozen=True):
    pid: int
    start: int  # in the system's ticks since its boot; 0 where it does not say


class WorkerRecord(msgspec.Struct, frozen=True):
    rank: int
    label: str  # "host.gpu"
    process: PidRecord
    stdout_path: str  # "" where its output has no file
    stderr_path: str


class MeshRecord(msgspec.Struct, frozen=True):
    name: str
    state: Literal["starting", "started"]
    kernel: PidRecord
    agent: PidRecord
    boot: str
    namespace: str  # of the pids
    hosts: int
    per_host: int
    device: str
    labels: dict[str, str]
    began: float  # monotonic seconds of this boot
    workers: list[WorkerRecord]


def labels_text(labels: Mapping[str, str]) -> str:
    return " ".join(f"{name}={value}" for name, value in labels.items())


def age_text(seconds: float) -> str:
    """``8 s``, ``3 min``, ``5 h``, ``2 d``."""
    for size, unit in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds // size:.0f} {unit}"
    return f"{seconds:.0f} s"
