"""What a mesh's directory says of it, for the user's other kernels and shells: one file, replaced as a whole.

Plain facts, no secret. Pids come with start time, boot and namespace, so that a number that was reused is not taken
for the process that had it.
"""

from __future__ import annotations

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
