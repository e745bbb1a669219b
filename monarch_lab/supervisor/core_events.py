"""What the core of the supervision library is told, and what it answers with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from monarch_lab.supervisor.records import HostRecord, ProcessRecord
from monarch_lab.wire.hosts import LaunchProcesses, Order, Report

# --- what happens


@dataclass(frozen=True, slots=True)
class HostsRequested:
    hosts: Sequence[HostRecord]


@dataclass(frozen=True, slots=True)
class HostsReturned:
    hosts: Sequence[HostRecord]
    error: str | None


@dataclass(frozen=True, slots=True)
class GroupLaunched:
    """The processes of one group on one host."""

    host: HostRecord
    processes: Sequence[ProcessRecord]
    order: LaunchProcesses
    call: bytes


@dataclass(frozen=True, slots=True)
class LetterSent:
    processes: Sequence[ProcessRecord]
    payload: bytes


@dataclass(frozen=True, slots=True)
class SignalSent:
    processes: Sequence[ProcessRecord]
    signal: int
    group: bool


@dataclass(frozen=True, slots=True)
class LetterTaken:
    """A user has read so many bytes of a process's letters."""

    process: ProcessRecord
    size: int


@dataclass(frozen=True, slots=True)
class ShutdownAsked:
    pass


@dataclass(frozen=True, slots=True)
class PeerJoined:
    peer: int
    hostname: str


@dataclass(frozen=True, slots=True)
class PeerReported:
    peer: int
    reports: Sequence[tuple[Report, bytes]]


@dataclass(frozen=True, slots=True)
class PeerBroken:
    """What it said is not understood."""

    peer: int
    text: str


@dataclass(frozen=True, slots=True)
class PeerFenced:
    """The link has ended this incarnation of it; another may join."""

    peer: int
    text: str


@dataclass(frozen=True, slots=True)
class AgentStarted:
    """One that was asked for by StartAgents is on its way."""

    peer: int


@dataclass(frozen=True, slots=True)
class AgentEnded:
    """An agent that we started ourselves is gone."""

    peer: int
    text: str


@dataclass(frozen=True, slots=True)
class Ticked:
    silence_of: Callable[[int], float]  # seconds since the peer was heard


Event = (
    HostsRequested
    | HostsReturned
    | GroupLaunched
    | LetterSent
    | SignalSent
    | LetterTaken
    | ShutdownAsked
    | PeerJoined
    | PeerReported
    | PeerBroken
    | PeerFenced
    | AgentStarted
    | AgentEnded
    | Ticked
)


# --- what is to be done


@dataclass(frozen=True, slots=True)
class StartAgents:
    count: int


@dataclass(frozen=True, slots=True)
class Tell:
    """Send an order to a peer."""

    peer: int
    order: Order
    payload: bytes = b""


@dataclass(frozen=True, slots=True)
class Fence:
    """Hear this peer never again. ``final``: it must end; else it may join anew."""

    peer: int
    reason: str
    final: bool


@dataclass(frozen=True, slots=True)
class Announce:
    """A letter of our own to the user."""

    sender: HostRecord | ProcessRecord
    message: object


@dataclass(frozen=True, slots=True)
class PassOn:
    """A letter of a process to the user."""

    sender: ProcessRecord
    payload: bytes


@dataclass(frozen=True, slots=True)
class Release:
    process: int
    size: int


@dataclass(frozen=True, slots=True)
class EndProcess:
    """Nothing more can be sent to it."""

    process: int


@dataclass(frozen=True, slots=True)
class Warn:
    text: str


Action = StartAgents | Tell | Fence | Announce | PassOn | Release | EndProcess | Warn
