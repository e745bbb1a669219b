"""Debuggers of workers that wait for a line, and who answers them: the thread that waits for the mesh.

The I/O thread adds what workers say and rings the bell of who waits; the thread that waits asks the user. What is
known of the sessions is in debug_sessions.py, what a line means in debug_console.py.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping

from monarch_lab.controller import debug_console as console
from monarch_lab.controller.debug_sessions import Event, Session, Sessions, State
from monarch_lab.controller.front import DebugPrompt, Front
from monarch_lab.errors import DetachedError, UsageKeyError, UsageRuntimeError
from monarch_lab.wire.debugging import DebugRead, DebugReply

Reply = Callable[[int, DebugReply], None]
# Of a session that the panel holds: its name, what it printed, its prompt ("" while it runs).
News = Callable[[str, str, str], None]
# Others that stop within this time of the first are told in one line with it.
GATHER_S = 0.003


class Prompts:
    """``quitting`` leaves every debugger that comes to wait. ``dims`` are the mesh's, for ranks as users write them."""

    def __init__(
        self,
        reply: Reply,
        label: Callable[[int], str],
        is_gone: Callable[[int], bool],
        stream: Callable[[int], str] = str,
        dims: Callable[[], Mapping[str, int]] = dict,
        news: News = lambda *_: None,
    ) -> None:
        self.quitting = False
        self.serving = False
        self._reply = reply
        self._is_gone = is_gone
        self._dims = dims
        self.on_news = news
        self._lock = threading.RLock()  # guards _sessions
        self._sessions = Sessions(label, stream)
        self._came = threading.Event()

    def __bool__(self) -> bool:
        """Whether somebody may be asked."""
        return len(self._sessions) > 0 and self._sessions.has_to_ask()

    def __len__(self) -> int:
        """Threads of workers that stand still, whoever is asked."""
        return len(self._sessions)

    @property
    def sessions(self) -> list[Session]:
        with self._lock:
            return list(self._sessions)

    def is_waiting(self, rank: int) -> bool:
        return any(s.rank == rank for s in self.sessions)

    # --- what workers say. Runs on: the I/O thread

    def add(self, rank: int, read: DebugRead, is_awaited: bool = True) -> None:
        """``is_awaited``: a cell waits for the mesh. One that stops when others have been left, and nobody waits, was
        on its way when they were: it is left with them."""
        if self.quitting:
            self._reply(rank, DebugReply(read.session, read.number, None, leave=True))
            return
        with self._lock:
            is_left = not is_awaited and bool(self._sessions.detached())
            session = self._sessions.read(rank, read)
            if is_left and session.state is State.PAUSED:
                session.move(Event.DETACH)
            if session.state is State.HELD:
                text, session.text = session.text, ""
                self._tell(session, text)
        self._came.set()

    def end(self, rank: int, number: int, text: str) -> str | None:
        """The thread goes on; how what it printed last is to be labelled, None where the panel has shown it."""
        with self._lock:
            session = next((s for s in self._sessions if (s.rank, s.number) == (rank, number)), None)
            if session is None:
                return ""
            is_held = session.state is State.HELD
            self._sessions.end(rank, number)
            if is_held:
                self.on_news(session.name, text, "")
            return None if is_held else session.label

    def forget(self, rank: int) -> None:
        """Its process is gone: nobody waits for a line any more."""
        with self._lock:
            self._sessions.end_rank(rank)

    # --- leaving

    def leave_all(self) -> None:
        """Every op in a debugger ends, as with ``q``."""
        with self._lock:
            for session in self.sessions:
                self._leave(session)

    def _leave(self, session: Session) -> None:
        read = session.read
        if read is not None:
            self._reply(session.rank, DebugReply(read.session, read.number, None, leave=True))
        self._sessions.end(session.rank, session.number)

    def refuse_detached(self, ranks: Iterable[int], place: console.Placer = str) -> None:
        """Raises DetachedError where one of these waits in a debugger that no cell asks for: its answer will not
        come."""
        if not len(self._sessions):
            return
        with self._lock:
            detached = self._sessions.blocking(ranks)
        if detached:
            raise DetachedError(f"{console.waiting(detached, place)}: %mesh debug goes on there", ranks_of(detached))

    def left_behind(self, place: console.Placer) -> str:
        """Who was left waiting, and where; "" where nobody was."""
        with self._lock:
            left = [s for s in self._sessions.detached() if s.read is not None]
        return console.waiting(left, place) if left else ""

    def attach(self, ranks: Iterable[int] | None) -> list[Session]:
        with self._lock:
            return self._sessions.attach(ranks)

    def detach(self) -> list[Session]:
        with self._lock:
            return self._sessions.detach()

    def leave_prompt(self, place: console.Placer) -> str:
        """After an interrupt there: those that cells ask for are detached, but for post-mortems, which hold nothing up
        and end. What to say."""
        with self._lock:
            ended = [s for s in self.sessions if s.is_post_mortem and s.state is not State.HELD]
            for session in ended:
                self._leave(session)
            self._sessions.detach()
            left = [s for s in self.sessions if s.read is not None]
        if left:
            return f"{console.waiting(left, place)}: %mesh debug goes on there, %mesh interrupt ends what has stopped"
        if ended:
            return "the post-mortem has ended: %mesh pm begins it again"
        return "what the panel steps goes on there, %mesh interrupt ends it"

    @property
    def is_used(self) -> bool:
        """Whether the user sits in a debugger: at a cell's prompt, or in the panel."""
        with self._lock:
            return self._sessions.has_to_ask() or any(s.state is State.HELD for s in self._sessions)

    @property
    def is_attached(self) -> bool:
        with self._lock:
            return bool(self._sessions.attached) or self._sessions.has_to_ask()

    # --- lines that do not come from the prompt: a panel's, a script's. Any thread

    def hold(self, name: str) -> None:
        """The panel asks for this one's lines from now on. Raises UsageKeyError where there is none of that name."""
        with self._lock:
            session = self._named(name)
            session.move(Event.HOLD)
            session.text = ""
            if self._sessions.focus is session:
                self._sessions.focus = None
            self._tell(session, session.log)

    def release(self, name: str) -> None:
        """It is left waiting, as with ``detach``. Raises UsageKeyError where there is none of that name."""
        with self._lock:
            self._named(name).move(Event.DETACH)

    def type_line(self, name: str, line: str) -> str:
        """Answer the session of that name as if ``line`` had been typed at its prompt; what the mesh's own commands
        say to it. A cell that asks for it meanwhile stops asking.

        Raises UsageKeyError where there is none of that name, UsageRuntimeError where it runs.
        """
        with self._lock:
            session = self._named(name)
            if session.read is None:
                raise UsageRuntimeError(f"rank {name} runs: it can be asked when it stops again")
            action = console.read_line(line, session, self.sessions, self._dims(), str)
            match action:
                case console.Send():
                    self._send(action)
                case console.Focus(on=focus):
                    self._sessions.focus = focus
                case console.Detach() if session.state is State.HELD:
                    self.release(name)
                case console.Detach():
                    self._sessions.detach()
                case console.Say(text=text):
                    return text
        return ""

    def _named(self, name: str) -> Session:
        session = self._sessions.find(name)
        if session is None:
            there = ", ".join(s.name for s in self._sessions) or "none"
            raise UsageKeyError(f"no debugger waits that is named {name}; there is {there}")
        return session

    def _tell(self, session: Session, text: str) -> None:
        self.on_news(session.name, text, session.read.prompt if session.read is not None else "")

    # --- asking. Runs on: the thread that waits

    def serve(self, front: Front) -> None:
        """Ask the user for those that wait, one line at a time, until nobody does or those asked run on.
        KeyboardInterrupt ends the prompt; who hears it detaches them (leave_prompt)."""
        if self.serving:
            return
        self.serving = True
        try:
            self._gather()
            while (session := self._next()) is not None:
                self._show(front, session)
                self._ask(front, session)
        finally:
            self.serving = False

    def _gather(self) -> None:
        if any(s.is_told for s in self.sessions):
            return
        last = time.monotonic() + GATHER_S
        expected = 1
        for size in self._dims().values():
            expected *= size
        while len(self._sessions) < expected and (left := last - time.monotonic()) > 0:
            self._came.wait(left)
            self._came.clear()

    def _next(self) -> Session | None:
        with self._lock:
            return self._sessions.to_ask(time.monotonic())

    def _show(self, front: Front, focus: Session) -> None:
        """Where others have stopped, and what they printed."""
        with self._lock:
            untold = self._sessions.untold()
            for session in untold:
                if session is not focus:
                    session.text = ""  # where it stopped, which is told for all
            texts = [(s, s.text) for s in self.sessions if s.text and s is not focus and s.state is not State.HELD]
            for session, _ in texts:
                session.text = ""
        # One that has just stopped says itself where.
        if untold and (len(untold) > 1 or untold[0] is not focus or focus.why or not focus.text):
            front.tell(console.announcement(untold, front.place))
        for session, text in texts:
            lines = console.with_names(text, front.place).splitlines()
            front.tell("\n".join(f"[{session.label}] {line}" for line in lines))

    def _ask(self, front: Front, session: Session) -> None:
        with self._lock:
            read, text = session.read, session.text
            if read is None:
                return
            session.text = ""

        def waits() -> bool:
            """Whether to go on asking; those that have stopped meanwhile are told."""
            if self._is_gone(session.rank) or session.read is not read or not session.is_parked:
                return False
            with self._lock:
                untold = [s for s in self._sessions.untold() if s is not session]
                for other in untold:
                    other.text = ""
            if untold:
                front.tell(console.announcement(untold, front.place))
            return True

        line = front.ask(DebugPrompt(session.rank, session.label, text, read.prompt, waits))
        with self._lock:
            if session.read is not read or not session.is_parked:
                return  # it is gone, or was answered from elsewhere
            if line is None:
                self._sessions.answered(session, time.monotonic())
                self._reply(session.rank, DebugReply(read.session, read.number, None, declined=True))
                return
            action = console.read_line(line, session, self.sessions, self._dims(), front.place)
            if isinstance(action, console.Focus):
                self._sessions.focus = action.on
                action.on.is_told = False
            elif isinstance(action, console.Detach):
                self._sessions.detach()
            elif isinstance(action, console.Send):
                self._send(action)
        if isinstance(action, console.Say):
            front.tell(action.text)

    def _send(self, action: console.Send) -> None:
        now = time.monotonic()
        for session in action.to:
            read = self._sessions.answered(session, now, action.line)
            if read is not None:
                self._reply(session.rank, DebugReply(read.session, read.number, action.line))
                if session.state is State.HELD:
                    self._tell(session, "")


def ranks_of(sessions: Iterable[Session]) -> tuple[int, ...]:
    return tuple(sorted({s.rank for s in sessions}))
