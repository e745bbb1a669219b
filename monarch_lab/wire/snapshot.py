"""What the browser, the status card and widgets are told of a mesh: one immutable picture, made in the kernel.

``labextension/src/protocol.ts`` is its twin; tests/wire/test_snapshot.py keeps the two equal. Times are seconds,
sizes bytes. A view renders a snapshot and keeps no truth of its own.
"""

from __future__ import annotations

from typing import Literal

import msgspec

ProcessState = Literal["starting", "idle", "busy", "debugging", "lost", "exited"]
MeshState = Literal["starting", "live", "dead", "closed"]
DebuggerState = Literal["paused", "attached", "held", "detached"]


class ProcessSnapshot(msgspec.Struct, frozen=True):
    rank: int
    label: str  # "host.gpu", as printed before output lines
    host: str
    pid: int
    state: ProcessState
    rss_bytes: int = 0
    device_bytes: int = 0
    cpu_s: float = 0.0
    pending_ops: int = 0
    op: str = ""  # the oldest op not known to be finished
    op_age_s: float = 0.0
    exit: str = ""  # "signal SIGKILL", "exit code 1"; "" while it lives


class DebuggerSnapshot(msgspec.Struct, frozen=True):
    """One stopped thread; see controller/debug_sessions.py. ``held``: the panel asks for its lines."""

    name: str  # "1", "1/copy" of a stream, "1#2" the second thread of a rank
    rank: int
    label: str
    state: DebuggerState
    file: str
    line: int
    function: str
    source: str
    why: str = ""
    prompt: str = ""  # "" while it runs


class MeshSnapshot(msgspec.Struct, frozen=True):
    name: str
    state: MeshState
    dims: list[tuple[str, int]]
    device: str
    processes: list[ProcessSnapshot]
    age_s: float = 0.0
    ops: int = 0  # issued since the mesh started
    note: str = ""  # why it is dead, in one sentence
    debuggers: list[DebuggerSnapshot] = []


class KernelSnapshot(msgspec.Struct, frozen=True):
    """What one kernel shows: its meshes, and which one cells run on."""

    seq: int
    current: str
    meshes: list[MeshSnapshot]
