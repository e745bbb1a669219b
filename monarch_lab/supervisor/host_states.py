"""Life of a host and of a process, as the supervision library has them: every state, every move, and nothing else.

No sockets, no clocks, no threads. docs/lifecycle.md draws its diagrams from these tables.
"""

from __future__ import annotations

from enum import Enum, auto

from monarch_lab.errors import ProtocolError


class HostState(Enum):
    UNATTACHED = auto()  # asked for; no agent has come yet
    ATTACHED = auto()
    UNREACHABLE = auto()  # silent for a while: said in the status, and nothing else
    LOST = auto()  # gave up on it: told once, never taken back
    CLOSED = auto()  # we gave it back


class HostEvent(Enum):
    JOINED = auto()  # an agent was matched with it
    SILENT = auto()
    HEARD = auto()
    GIVEN_UP = auto()
    RETURNED = auto()


class ProcessState(Enum):
    LAUNCHING = auto()
    RUNNING = auto()
    EXITED = auto()
    NOT_STARTED = auto()
    LOST = auto()  # with its host; reported as aborted


class ProcessEvent(Enum):
    STARTED = auto()
    NOT_STARTED = auto()
    EXITED = auto()
    HOST_GONE = auto()


HOST_MOVES: dict[tuple[HostState, HostEvent], HostState] = {
    (HostState.UNATTACHED, HostEvent.JOINED): HostState.ATTACHED,
    (HostState.UNATTACHED, HostEvent.GIVEN_UP): HostState.LOST,
    (HostState.UNATTACHED, HostEvent.RETURNED): HostState.CLOSED,
    (HostState.ATTACHED, HostEvent.SILENT): HostState.UNREACHABLE,
    (HostState.ATTACHED, HostEvent.GIVEN_UP): HostState.LOST,
    (HostState.ATTACHED, HostEvent.RETURNED): HostState.CLOSED,
    (HostState.UNREACHABLE, HostEvent.HEARD): HostState.ATTACHED,
    (HostState.UNREACHABLE, HostEvent.GIVEN_UP): HostState.LOST,
    (HostState.UNREACHABLE, HostEvent.RETURNED): HostState.CLOSED,
}

PROCESS_MOVES: dict[tuple[ProcessState, ProcessEvent], ProcessState] = {
    (ProcessState.LAUNCHING, ProcessEvent.STARTED): ProcessState.RUNNING,
    (ProcessState.LAUNCHING, ProcessEvent.NOT_STARTED): ProcessState.NOT_STARTED,
    (ProcessState.LAUNCHING, ProcessEvent.HOST_GONE): ProcessState.LOST,
    (ProcessState.RUNNING, ProcessEvent.EXITED): ProcessState.EXITED,
    (ProcessState.RUNNING, ProcessEvent.HOST_GONE): ProcessState.LOST,
}

LIVE_HOST = frozenset({HostState.UNATTACHED, HostState.ATTACHED, HostState.UNREACHABLE})
LIVE_PROCESS = frozenset({ProcessState.LAUNCHING, ProcessState.RUNNING})


def move_host(state: HostState, event: HostEvent) -> HostState:
    """The next state; ProtocolError for a move that is not in the table."""
    try:
        return HOST_MOVES[state, event]
    except KeyError:
        raise ProtocolError(f"a host that is {state.name} cannot be {event.name}") from None


def move_process(state: ProcessState, event: ProcessEvent) -> ProcessState:
    """The next state; ProtocolError for a move that is not in the table."""
    try:
        return PROCESS_MOVES[state, event]
    except KeyError:
        raise ProtocolError(f"a process that is {state.name} cannot be {event.name}") from None
