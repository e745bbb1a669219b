"""Debuggers of workers that have stopped: which there are, in which state, and whom to ask next.

Pure: no threads, no clocks (``now`` is an argument), no output. A session outlives the cell that met it:

    PAUSED     it has stopped, and no cell has asked for it yet
    ATTACHED   the cell that waits asks for its lines; between two of them it runs (``read`` is None)
    HELD       the panel asks for its lines: cells wait for it, and do not ask
    DETACHED   left waiting, with ``detach``: only %mesh debug or the panel attaches it again
    DONE       it goes on, was left, or its process is gone
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import Enum, auto

from monarch_lab.wire.debugging import DebugRead, Place

# How long a thread that runs on is waited for before another one is asked.
SWITCH_S = 1.0
_LOG_CHARS = 20_000
POST_MORTEM = "monarch-pm"  # the thread of a debugger in the frames of a failure


class State(Enum):
    PAUSED = auto()
    ATTACHED = auto()
    HELD = auto()
    DETACHED = auto()
    DONE = auto()


class Event(Enum):
    ATTACH = auto()
    HOLD = auto()
    DETACH = auto()
    END = auto()


MOVES: dict[tuple[State, Event], State] = {
    (State.PAUSED, Event.ATTACH): State.ATTACHED,
    (State.PAUSED, Event.HOLD): State.HELD,
    (State.PAUSED, Event.DETACH): State.DETACHED,
    (State.PAUSED, Event.END): State.DONE,
    (State.ATTACHED, Event.ATTACH): State.ATTACHED,
    (State.ATTACHED, Event.HOLD): State.HELD,
    (State.ATTACHED, Event.DETACH): State.DETACHED,
    (State.ATTACHED, Event.END): State.DONE,
    (State.HELD, Event.ATTACH): State.ATTACHED,
    (State.HELD, Event.HOLD): State.HELD,
    (State.HELD, Event.DETACH): State.DETACHED,
    (State.HELD, Event.END): State.DONE,
    (State.DETACHED, Event.ATTACH): State.ATTACHED,
    (State.DETACHED, Event.HOLD): State.HELD,
    (State.DETACHED, Event.DETACH): State.DETACHED,
    (State.DETACHED, Event.END): State.DONE,
}


@dataclass(slots=True)
class Session:
    """One stopped thread. ``name`` is what the user calls it: "1", "1/copy" of a stream, "1/pm" after a failure, "1#2"
    the second on its rank beside the main thread. ``text`` is what it printed and was not shown yet; ``log`` the end of
    all that it printed and was told."""

    rank: int
    number: int
    name: str
    label: str
    read: DebugRead | None
    place: Place
    why: str = ""
    state: State = State.PAUSED
    text: str = ""
    log: str = ""
    is_post_mortem: bool = False
    is_told: bool = False  # where it stopped was shown
    answered_at: float = 0.0

    def move(self, event: Event) -> None:
        self.state = MOVES[self.state, event]

    def note(self, text: str) -> None:
        self.log = (self.log + text)[-_LOG_CHARS:]

    @property
    def is_parked(self) -> bool:
        """Whether it waits for a line that a cell may give."""
        return self.read is not None and self.state in (State.PAUSED, State.ATTACHED)

    @property
    def can_be_told(self) -> bool:
        """Whether it waits for a line that a cell or the panel may give."""
        return self.is_parked or (self.read is not None and self.state is State.HELD)

    @property
    def is_running(self) -> bool:
        return self.read is None and self.state is State.ATTACHED


class Sessions:
    """Of one mesh. ``label(rank)`` is how its output is marked, ``stream(number)`` a stream's name."""

    def __init__(self, label: Callable[[int], str], stream: Callable[[int], str]) -> None:
        self.focus: Session | None = None
        self._label = label
        self._stream = stream
        self._all: dict[tuple[int, int], Session] = {}  # in the order in which they stopped

    def __iter__(self) -> Iterator[Session]:
        return iter(list(self._all.values()))

    def __len__(self) -> int:
        return len(self._all)

    # --- what workers say

    def read(self, rank: int, read: DebugRead) -> Session:
        """A debugger wants a line: a new session's, or one's that ran."""
        session = self._all.get((rank, read.session))
        if session is None:
            suffix = self._suffix(rank, read)
            session = Session(rank, read.session, f"{rank}{suffix}", f"{self._label(rank)}{suffix}", read, read.place)
            session.is_post_mortem = read.thread == POST_MORTEM
            self._all[rank, read.session] = session
        session.read, session.place, session.why = read, read.place, read.why or session.why
        session.text += read.text
        session.note(read.text)
        return session

    def end(self, rank: int, number: int) -> Session | None:
        session = self._all.pop((rank, number), None)
        if session is not None:
            session.move(Event.END)
            session.read = None
        return session

    def end_rank(self, rank: int) -> None:
        """Its process is gone."""
        for r, number in list(self._all):
            if r == rank:
                self.end(r, number)

    def _suffix(self, rank: int, read: DebugRead) -> str:
        suffix = f"/{self._stream(read.stream)}" if read.stream else ""
        if read.thread == POST_MORTEM:
            suffix = "/pm"
        taken = {s.name for s in self._all.values()}
        if (not read.thread or suffix) and f"{rank}{suffix}" not in taken:
            return suffix
        count = next(n for n in range(2, len(taken) + 3) if f"{rank}{suffix}#{n}" not in taken)
        return f"{suffix}#{count}"

    # --- what the user does

    def answered(self, session: Session, now: float, line: str = "") -> DebugRead | None:
        """It was given a line and runs; what it had asked."""
        read, session.read = session.read, None
        if read is not None:
            session.note(f"{read.prompt}{line}\n")
        if session.state is State.PAUSED:
            session.move(Event.ATTACH)
        session.answered_at = now
        return read

    def attach(self, ranks: Iterable[int] | None = None) -> list[Session]:
        """Sessions that wait, on these ranks or on all: cells ask for them from now on."""
        wanted = None if ranks is None else set(ranks)
        found = [s for s in self._all.values() if wanted is None or s.rank in wanted]
        for session in found:
            session.move(Event.ATTACH)
            session.is_told = False
        return found

    def detach(self) -> list[Session]:
        """Every session that a cell asks for is left waiting."""
        found = [s for s in self._all.values() if s.state in (State.PAUSED, State.ATTACHED)]
        for session in found:
            session.move(Event.DETACH)
        self.focus = None
        return found

    def find(self, name: str) -> Session | None:
        return next((s for s in self._all.values() if name in (s.name, s.label)), None)

    # --- whom to ask

    def to_ask(self, now: float) -> Session | None:
        """The session in focus until it goes on, then that of the lowest rank. None: nobody waits, or one that
        was just given a line may stop again in a moment."""
        focus = self.focus
        if any(s.is_running and now - s.answered_at < SWITCH_S for s in self._all.values()):
            return None
        if focus is None or not focus.is_parked:
            parked = [s for s in self._all.values() if s.is_parked]
            self.focus = focus = min(parked, key=lambda s: (s.rank, s.number), default=None)
        return focus

    def has_to_ask(self) -> bool:
        return any(s.is_parked for s in self._all.values())

    def untold(self) -> list[Session]:
        """Those that wait and were not shown yet; they count as shown now."""
        found = [s for s in self._all.values() if s.is_parked and not s.is_told]
        for session in found:
            session.is_told = True
        return found

    def detached(self, ranks: Iterable[int] | None = None) -> list[Session]:
        wanted = None if ranks is None else set(ranks)
        return [s for s in self._all.values() if s.state is State.DETACHED and (wanted is None or s.rank in wanted)]

    def blocking(self, ranks: Iterable[int]) -> list[Session]:
        """Detached ones that keep one of these ranks from its ops: threads beside them do not."""
        return [s for s in self.detached(ranks) if s.read is not None and not s.read.thread]

    @property
    def attached(self) -> list[Session]:
        return [s for s in self._all.values() if s.state is State.ATTACHED]


def by_place(sessions: Iterable[Session]) -> list[tuple[Place, str, list[Session]]]:
    """Sessions that have stopped at one place for one reason, together."""
    groups: dict[tuple[Place, str], list[Session]] = {}
    for session in sessions:
        groups.setdefault((session.place, session.why), []).append(session)
    return [(place, why, sorted(found, key=lambda s: s.rank)) for (place, why), found in groups.items()]
