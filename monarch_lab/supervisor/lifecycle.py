"""Life of a process: every state, every move between states, and nothing else.

No sockets, no clocks, no threads: events come in, the next snapshot comes out.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass, replace
from enum import Enum, auto

from monarch_lab.errors import ProtocolError


class ProcessState(Enum):
    LAUNCHING = auto()  # asked of the agent, no pid yet
    RUNNING = auto()  # has a pid, has not proved itself
    READY = auto()  # hello said, subscriptions seen, welcome sent
    EXITED = auto()
    NOT_STARTED = auto()  # the agent could not start it
    LOST = auto()  # its agent is gone, and it with the agent


@dataclass(frozen=True, slots=True)
class Started:
    pid: int


@dataclass(frozen=True, slots=True)
class Welcomed:
    pass


@dataclass(frozen=True, slots=True)
class Exited:
    code: int
    out_of_memory: bool = False
    last_lines: str = ""


@dataclass(frozen=True, slots=True)
class NotStarted:
    text: str


@dataclass(frozen=True, slots=True)
class AgentLost:
    pass


Event = Started | Welcomed | Exited | NotStarted | AgentLost

TRANSITIONS: dict[tuple[ProcessState, type], ProcessState] = {
    (ProcessState.LAUNCHING, Started): ProcessState.RUNNING,
    (ProcessState.LAUNCHING, NotStarted): ProcessState.NOT_STARTED,
    (ProcessState.LAUNCHING, AgentLost): ProcessState.LOST,
    (ProcessState.RUNNING, Welcomed): ProcessState.READY,
    (ProcessState.RUNNING, Exited): ProcessState.EXITED,
    (ProcessState.RUNNING, AgentLost): ProcessState.LOST,
    (ProcessState.READY, Exited): ProcessState.EXITED,
    (ProcessState.READY, AgentLost): ProcessState.LOST,
    # What had ended before the agent did has ended.
    (ProcessState.EXITED, AgentLost): ProcessState.EXITED,
    (ProcessState.NOT_STARTED, AgentLost): ProcessState.NOT_STARTED,
    (ProcessState.LOST, AgentLost): ProcessState.LOST,
}

LIVE = frozenset({ProcessState.LAUNCHING, ProcessState.RUNNING, ProcessState.READY})


def next_state(state: ProcessState, event: Event) -> ProcessState:
    try:
        return TRANSITIONS[state, type(event)]
    except KeyError:
        raise ProtocolError(f"{type(event).__name__} is not allowed in {state.name}") from None


@dataclass(frozen=True, slots=True)
class ProcessInfo:
    """What is known of one process: a snapshot, replaced when something changes."""

    rank: int
    process: int
    host: str
    label: str  # "host.gpu", as printed before output lines
    stdout_path: str = ""
    stderr_path: str = ""
    pid: int = 0
    state: ProcessState = ProcessState.LAUNCHING
    code: int | None = None  # of its end: >= 0 an exit code, < 0 a signal
    out_of_memory: bool = False
    last_lines: str = ""  # of its stderr, once it has ended
    rss_bytes: int = 0
    cpu_s: float = 0.0
    activity: str = ""  # letter of /proc/PID/stat at the last beat: R, S, D, T ...

    def after(self, event: Event) -> ProcessInfo:
        """The next snapshot; ProtocolError for an event that does not belong here."""
        state = next_state(self.state, event)
        match event:
            case Started():
                return replace(self, state=state, pid=event.pid)
            case Exited():
                return replace(
                    self,
                    state=state,
                    code=event.code,
                    out_of_memory=event.out_of_memory,
                    last_lines=event.last_lines,
                )
            case NotStarted():
                return replace(self, state=state, last_lines=event.text)
        return replace(self, state=state)

    def successor(self, process: int) -> ProcessInfo:
        """The first snapshot of another process under the same rank."""
        return ProcessInfo(self.rank, process, self.host, self.label, self.stdout_path, self.stderr_path)

    @property
    def is_live(self) -> bool:
        return self.state in LIVE

    def ending(self) -> str:
        """How it ended, in two words; "" while it lives."""
        if self.is_live:
            return ""
        if self.code is None:
            return self.state.name.lower().replace("_", " ")
        return f"exit code {self.code}" if self.code >= 0 else f"signal {_signal_name(-self.code)}"

    def obituary(self, doing: str = "") -> str:
        """How it ended, in one line (with ``doing`` at its end), and what it printed last."""
        line = self.headline() + doing
        return f"{line}\n{self.last_lines}" if self.last_lines else line

    def headline(self) -> str:
        """How it ended, in one line."""
        who = f"rank {self.rank} (host {self.host}, pid {self.pid})"
        match self.state:
            case ProcessState.EXITED:
                line = f"{who} {_how(self.code or 0)}"
            case ProcessState.NOT_STARTED:
                line = f"rank {self.rank} (host {self.host}) could not be started"
            case ProcessState.LOST:
                line = f"{who} ended with its agent"
            case _:
                return f"{who} is {self.state.name.lower()}"
        return f"{line}: the system was out of memory" if self.out_of_memory else line


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return str(number)


def _how(code: int) -> str:
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"
