"""What the supervision library keeps of each host, process and agent. Its core alone writes here; handles read."""

from __future__ import annotations

import signal
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from monarch_lab.supervisor.host_states import HostState, ProcessState
from monarch_lab.wire.hosts import ChildExited, Order


@dataclass(slots=True, eq=False)
class HostRecord:
    ident: int
    handle: Any = None  # what users hold
    state: HostState = HostState.UNATTACHED
    hostname: str = ""
    peer: int | None = None
    pending: list[tuple[Order, bytes]] = field(default_factory=list)  # until it is matched
    processes: dict[int, ProcessRecord] = field(default_factory=dict)  # those that have not ended
    reason: str = ""  # why it was lost or closed


@dataclass(slots=True, eq=False)
class ProcessRecord:
    ident: int
    host: HostRecord
    rank: int
    world_size: int
    name: str
    logfile: str = ""
    handle: Any = None
    state: ProcessState = ProcessState.LAUNCHING
    pid: int | None = None
    returncode: int | None = None


class PeerState(Enum):
    WAITING = auto()  # no host was asked for that it could be
    SERVING = auto()
    STOPPING = auto()


@dataclass(slots=True)
class Peer:
    """One agent that has joined."""

    ident: int
    hostname: str
    state: PeerState = PeerState.WAITING
    host: HostRecord | None = None
    stop_by: float = float("inf")


@dataclass(slots=True)
class Counters:
    launches: int = 0
    starts: int = 0
    exits: int = 0
    sends: int = 0
    responses: int = 0
    deletions: int = 0  # processes that are no longer kept
    dropped: int = 0  # letters of processes that had ended


@dataclass(frozen=True, slots=True)
class HostTimes:
    beat: float
    lease: float
    unreachable: float
    lost: float
    stop_grace: float
    stop: float


def who(process: ProcessRecord) -> str:
    where = process.host.hostname or f"host {process.host.ident}"
    pid = "" if process.pid is None else f", pid {process.pid}"
    return f"process {process.name} (rank {process.rank} of {process.world_size}, {where}{pid})"


def obituary(process: ProcessRecord, exited: ChildExited) -> str:
    """Who ended how, in one line, and what it printed last."""
    if exited.code >= 0:
        how = f"exited with code {exited.code}"
    else:
        try:
            how = f"was killed by {signal.Signals(-exited.code).name}"
        except ValueError:
            how = f"was killed by signal {-exited.code}"
    if exited.out_of_memory:
        how += ": the system was out of memory"
    return f"{who(process)} {how}" + (f"\n{exited.last_lines}" if exited.last_lines else "")
