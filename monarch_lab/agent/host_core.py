"""The rules of a host's agent: orders of the supervisor and words of children in, what is to be done out.

Pure: no sockets, no processes, no clock. One operating system process can hold hundreds of these, with children that
are only played (tests/bench does).
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from monarch_lab.errors import ProtocolError
from monarch_lab.wire.hosts import (
    ChildExited,
    ChildLetter,
    ChildNote,
    ChildNotStarted,
    ChildStarted,
    ChildTook,
    DeliverLetter,
    GrantCredit,
    HostStopped,
    HostTerms,
    LaunchProcesses,
    Order,
    Report,
    SignalProcesses,
    StopHost,
)

# The pid that a simulated process is said to have.
SIMULATED_PID = 2
# What a letter counts beside its bytes: as in supervisor/backlog.py, where it is counted on the way there.
LETTER_COST_BYTES = 256


class AgentState(Enum):
    SERVING = auto()  # also before the supervisor has answered: orders come only from it
    STOPPING = auto()  # children were asked to end
    CLEARING = auto()  # everything below is being killed
    ENDED = auto()


class AgentEvent(Enum):
    STOP_ORDERED = auto()
    STOP_DUE = auto()  # no child is left, or the grace is over
    FENCED = auto()  # given up by the supervisor; may join anew
    OWNER_GONE = auto()  # its end, its final word, the lease, or a signal to us
    CLEARED_TO_REJOIN = auto()
    CLEARED_TO_END = auto()


MOVES: dict[tuple[AgentState, AgentEvent], AgentState] = {
    (AgentState.SERVING, AgentEvent.STOP_ORDERED): AgentState.STOPPING,
    (AgentState.SERVING, AgentEvent.FENCED): AgentState.CLEARING,
    (AgentState.SERVING, AgentEvent.OWNER_GONE): AgentState.STOPPING,
    (AgentState.STOPPING, AgentEvent.STOP_DUE): AgentState.CLEARING,
    (AgentState.CLEARING, AgentEvent.CLEARED_TO_REJOIN): AgentState.SERVING,
    (AgentState.CLEARING, AgentEvent.CLEARED_TO_END): AgentState.ENDED,
}


def move(state: AgentState, event: AgentEvent) -> AgentState:
    """The next state; ProtocolError for a move that is not in the table."""
    try:
        return MOVES[state, event]
    except KeyError:
        raise ProtocolError(f"an agent that is {state.name} cannot have {event.name}") from None


class ChildState(Enum):
    SILENT = auto()  # started; has not connected
    CONNECTED = auto()


@dataclass(slots=True)
class ChildRecord:
    window_bytes: int
    state: ChildState = ChildState.SILENT
    held: list[bytes] = field(default_factory=list)  # letters, until it connects
    call: bytes = b""
    unread: int = 0  # what it sent that nobody has read

    @property
    def is_over(self) -> bool:
        """It sends without credit: it is not read until the user has caught up."""
        return self.unread > 2 * self.window_bytes


# --- what happens


@dataclass(frozen=True, slots=True)
class Ordered:
    orders: Sequence[tuple[Order, bytes]]


@dataclass(frozen=True, slots=True)
class Forked:
    process: int
    pid: int


@dataclass(frozen=True, slots=True)
class ForkFailed:
    process: int
    text: str


@dataclass(frozen=True, slots=True)
class Noted:
    process: int
    text: str


@dataclass(frozen=True, slots=True)
class Connected:
    process: int


@dataclass(frozen=True, slots=True)
class Sent:
    process: int
    letter: bytes


@dataclass(frozen=True, slots=True)
class Took:
    process: int
    size: int


@dataclass(frozen=True, slots=True)
class Ended:
    """After everything the process had sent."""

    process: int
    code: int
    out_of_memory: bool
    last_lines: str


@dataclass(frozen=True, slots=True)
class Fenced:
    """The supervisor has given this agent up; it may come back as another."""


@dataclass(frozen=True, slots=True)
class OwnerGone:
    """Nobody is left to serve; ``text`` is why, "" for an orderly end."""

    text: str
    grace_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Cleared:
    """Nothing is left below the agent; or, where not ``complete``, something that cannot be killed."""

    complete: bool


@dataclass(frozen=True, slots=True)
class Ticked:
    pass


Event = Ordered | Forked | ForkFailed | Noted | Connected | Sent | Took | Ended | Fenced | OwnerGone | Cleared | Ticked


# --- what is to be done


@dataclass(frozen=True, slots=True)
class StartChild:
    """Number ``index`` of the order's processes. Answered by Forked or ForkFailed."""

    order: LaunchProcesses
    index: int


@dataclass(frozen=True, slots=True)
class WriteCall:
    process: int
    call: bytes


@dataclass(frozen=True, slots=True)
class WriteLetter:
    process: int
    letter: bytes


@dataclass(frozen=True, slots=True)
class WriteCredit:
    process: int
    size: int


@dataclass(frozen=True, slots=True)
class SignalChild:
    process: int
    signal: int
    group: bool


@dataclass(frozen=True, slots=True)
class Say:
    report: Report
    payload: bytes = b""


@dataclass(frozen=True, slots=True)
class ClearTree:
    """SIGKILL for everything below. Answered by Cleared."""


@dataclass(frozen=True, slots=True)
class Rejoin:
    pass


@dataclass(frozen=True, slots=True)
class Exit:
    code: int
    text: str


Action = StartChild | WriteCall | WriteLetter | WriteCredit | SignalChild | Say | ClearTree | Rejoin | Exit


class HostCore:
    def __init__(self, terms: HostTerms) -> None:
        self.state = AgentState.SERVING
        self.terms = terms  # until the supervisor says others
        self.children: dict[int, ChildRecord] = {}
        self.stop_due = float("inf")
        self._owner_knows = False  # it ordered the stop, and is told of its end
        self._exit = Exit(0, "")
        self._cleared_for = AgentEvent.STOP_DUE
        self._actions: list[Action] = []

    def handle(self, event: Event, now: float) -> list[Action]:
        match event:
            case Ordered():
                for order, payload in event.orders:
                    self._obey(order, payload, now)
            case Sent():
                self._pass_on(event)
            case Took():
                if event.process in self.children:
                    self._say(ChildTook(event.process, event.size))
            case Connected():
                self._connect(event.process)
            case Forked():
                self._say(ChildStarted(event.process, event.pid))
            case ForkFailed():
                del self.children[event.process]
                self._say(ChildNotStarted(event.process, event.text))
            case Noted():
                self._say(ChildNote(event.process, event.text))
            case Ended():
                if self.children.pop(event.process, None) is not None:
                    self._say(ChildExited(event.process, event.code, event.out_of_memory, event.last_lines))
            case Fenced():
                self._fence()
            case OwnerGone():
                self._stop(AgentEvent.OWNER_GONE, Exit(1 if event.text else 0, event.text), now + event.grace_s)
            case Cleared():
                self._cleared(event.complete)
            case Ticked():
                pass
        if self.state is AgentState.STOPPING and (now >= self.stop_due or not self.children):
            self._clear(AgentEvent.STOP_DUE)
        actions, self._actions = self._actions, []
        return actions

    def _say(self, report: Report, payload: bytes = b"") -> None:
        self._actions.append(Say(report, payload))

    # --- the supervisor

    def _obey(self, order: Order, payload: bytes, now: float) -> None:
        if self.state is not AgentState.SERVING:
            return  # what was ordered before the stop is answered by the stop
        match order:
            case LaunchProcesses():
                self._launch(order, payload)
            case HostTerms():
                self.terms = order
            case DeliverLetter():
                for process in order.processes:
                    self._deliver(process, payload)
            case SignalProcesses():
                wanted = [process for process in order.processes if process in self.children]
                self._actions += [SignalChild(process, order.signal, order.group) for process in wanted]
            case GrantCredit():
                child = self.children.get(order.process)
                if child is not None:
                    child.unread = max(0, child.unread - order.size)
                    self._actions.append(WriteCredit(order.process, order.size))
            case StopHost():
                self._owner_knows = True
                error = order.error
                self._stop(AgentEvent.STOP_ORDERED, Exit(0 if error is None else 1, error or ""), now + order.grace_s)

    def _launch(self, order: LaunchProcesses, payload: bytes) -> None:
        for index in range(len(order.names)):
            process = order.first + index
            if order.simulate:
                self._say(ChildStarted(process, SIMULATED_PID))
                self._say(ChildExited(process, 0, False, ""))
            else:
                self.children[process] = ChildRecord(order.window_bytes, call=payload)
                self._actions.append(StartChild(order, index))

    def _deliver(self, process: int, letter: bytes) -> None:
        child = self.children.get(process)
        if child is None:
            return
        if child.state is ChildState.CONNECTED:
            self._actions.append(WriteLetter(process, letter))
        else:
            child.held.append(letter)

    def _fence(self) -> None:
        if self.state is AgentState.SERVING:
            self._clear(AgentEvent.FENCED)

    # --- children

    def _connect(self, process: int) -> None:
        child = self.children[process]
        child.state = ChildState.CONNECTED
        if child.call:
            self._actions.append(WriteCall(process, child.call))
            child.call = b""
        held, child.held = child.held, []
        self._actions += [WriteLetter(process, letter) for letter in held]

    def _pass_on(self, event: Sent) -> None:
        child = self.children.get(event.process)
        if child is not None:
            child.unread += len(event.letter) + LETTER_COST_BYTES
            self._say(ChildLetter(event.process), event.letter)

    # --- the end

    def _stop(self, why: AgentEvent, how: Exit, due: float) -> None:
        if self.state is not AgentState.SERVING:
            if why is AgentEvent.OWNER_GONE and self.state is AgentState.STOPPING:
                self.stop_due = min(self.stop_due, due)
            return
        self.state = move(self.state, why)
        self.stop_due = due
        self._exit = how
        for process in self.children:
            self._actions.append(SignalChild(process, signal.SIGTERM, True))
            # A stopped process hears nothing before.
            self._actions.append(SignalChild(process, signal.SIGCONT, True))

    def _clear(self, why: AgentEvent) -> None:
        self.state = move(self.state, why)
        self._cleared_for = why
        self._actions.append(ClearTree())

    def _cleared(self, complete: bool) -> None:
        if self._cleared_for is AgentEvent.FENCED and complete:
            self.children.clear()  # their ends belong to an agent that nobody listens to any more
            self.state = move(self.state, AgentEvent.CLEARED_TO_REJOIN)
            self._actions.append(Rejoin())
            return
        self.state = move(self.state, AgentEvent.CLEARED_TO_END)
        if not complete:
            self._actions.append(Exit(1, "something below this agent cannot be killed; its guard stays for it"))
            return
        if self._owner_knows:
            self._say(HostStopped())
        self._actions.append(self._exit)
