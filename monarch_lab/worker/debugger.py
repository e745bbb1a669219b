"""The debuggers of this worker: one for each thread that has stopped, whose terminal is the notebook cell.

Runs on: the thread that stops; ``reply``, ``control`` and ``leave_all`` on the reader thread, ``_on_signal`` on the
main thread, wherever it is.
"""

from __future__ import annotations

import functools
import itertools
import os
import pdb
import queue
import signal
import sys
import threading
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

from monarch_lab.wire import debugging as wire
from monarch_lab.worker import failures, unattended, user_code
from monarch_lab.worker.breakpoints import Breakpoints
from monarch_lab.worker.debug_frames import users_frame, users_traceback
from monarch_lab.worker.debug_pdb import WorkerPdb
from monarch_lab.worker.debug_terminal import ANY, DebuggerQuit, Terminal
from monarch_lab.worker.post_mortem import LastFailure

# Runs what the kernel asks of the main thread, also in the middle of the user's code.
SIGNAL = signal.SIGUSR2


class Debugger:
    """``in_user_code``: whether the main thread runs the user's; ``stream`` is that of the calling thread, ``cell`` the
    one that runs."""

    def __init__(
        self,
        report: Callable[[Any], None],
        before_prompt: Callable[[], None],
        in_user_code: Callable[[], bool],
        stream: Callable[[], int],
        cell: Callable[[], int],
    ) -> None:
        self.breakpoints = Breakpoints()
        self.last = LastFailure()
        self._report = report
        self._before_prompt = before_prompt
        self._in_user_code = in_user_code
        self._stream = stream
        self._cell = cell
        self._sessions = itertools.count(1)
        # Each is its debugger's, which goes with its thread.
        self._terminals: weakref.WeakValueDictionary[int, Terminal] = weakref.WeakValueDictionary()
        self._here = threading.local()  # .pdb: the thread's own
        self._main: WorkerPdb | None = None
        self._for_main: queue.SimpleQueue[Callable[[FrameType | None], None]] = queue.SimpleQueue()
        self._port = 0

    def install(self) -> None:
        sys.breakpointhook = self._hook
        pdb.set_trace = self._set_trace
        signal.signal(SIGNAL, self._on_signal)
        failures.on_described = lambda error: self.last.note(error, self._cell())
        user_code.begins, user_code.ends = self._begin_user_code, self.leave_user_code
        os.register_at_fork(after_in_child=self._on_fork)
        threading.excepthook = functools.partial(_thread_failed, threading.excepthook)

    def _on_fork(self) -> None:
        """In a process that the user's code has forked (a DataLoader's, say), which has no way to the kernel."""
        sys.settrace(None)
        threading.settrace(None)
        user_code.begins = lambda: None
        unattended.install()

    # --- what the kernel says. Runs on: the reader thread

    def reply(self, message: wire.DebugReply) -> None:
        terminal = self._terminals.get(message.session)
        if terminal is not None:
            terminal.answer(message)

    def leave_all(self) -> None:
        """Every op that stands in a debugger ends."""
        for terminal in list(self._terminals.values()):
            if terminal.is_asking:
                terminal.answer(wire.DebugReply(terminal.session, ANY, None, leave=True))

    @property
    def is_asking(self) -> bool:
        """Whether the main thread stands at a prompt."""
        return self._main is not None and self._main.terminal.is_asking

    def control(self, message: Any) -> None:
        match message:
            case wire.DebugReply():
                self.reply(message)
            case wire.DebugBreakpoints(breakpoints=points):
                self.breakpoints.set(points)
                if threading.gettrace() in (None, self._trace_thread):  # else it is the user's, or debugpy's
                    threading.settrace(self._trace_thread if points else None)
                self._on_main(self._stand_by)
            case wire.DebugBreakIn(ident=ident):
                self._on_main(lambda frame: self._break_in(ident, frame))
            case wire.DebugPostMortem(ident=ident):
                self._answer_post_mortem(message)
            case wire.DebugListen(ident=ident):
                threading.Thread(target=self._listen, args=(ident,), name="monarch-debugpy", daemon=True).start()

    def _answer_post_mortem(self, message: wire.DebugPostMortem) -> None:
        last = self.last
        self._report(wire.DebugTold(message.ident, last.text, last.cell, last.trace is not None))
        if message.start and last.trace is not None:
            threading.Thread(
                target=self.post_mortem, args=(last.trace, last.text), name="monarch-pm", daemon=True
            ).start()
        if message.forget:
            last.forget()

    def _listen(self, ident: int) -> None:
        from monarch_lab.worker.outside import listen

        self._port, text = (self._port, "") if self._port else listen()
        self._report(wire.DebugTold(ident, text, port=self._port))

    # --- the main thread, from outside

    def _on_main(self, do: Callable[[FrameType | None], None]) -> None:
        self._for_main.put(do)
        signal.pthread_kill(threading.main_thread().ident or 0, SIGNAL)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        while not self._for_main.empty():
            self._for_main.get()(frame)

    def _stand_by(self, frame: FrameType | None) -> None:
        mine = self._main
        if mine is not None and (mine.is_open or mine.is_stepping or mine.breaks):
            return  # it looks at the breakpoints itself
        if not self.breakpoints:
            sys.settrace(None)
        elif frame is not None:
            self._pdb().stand_by(frame)

    def _break_in(self, ident: int, frame: FrameType | None) -> None:
        inner = users_frame(frame) if self._in_user_code() else None
        if self.is_asking:
            self._report(wire.DebugTold(ident, "stands in a debugger already"))
        elif inner is None:
            self._report(wire.DebugTold(ident, "runs no Python code of yours"))
        else:
            self._report(wire.DebugTold(ident))
            mine = self._pdb()
            mine.terminal.why = "%mesh debug"
            mine.stop_at(inner)

    # --- beginning

    def _hook(self, *args: Any, **kwargs: Any) -> None:
        if os.environ.get("PYTHONBREAKPOINT") != "0":
            self._start(sys._getframe(1), kwargs.get("header"))

    def _set_trace(self, *, header: str | None = None, **_: Any) -> None:
        self._start(sys._getframe(1), header)

    def _start(self, frame: FrameType, header: str | None) -> None:
        mine = self._pdb()
        if header is not None:
            mine.terminal.write(header + "\n")
        mine.set_trace(frame)

    def stop_at_first_line(self) -> None:
        """Of the user's code that this thread runs next."""
        mine = self._pdb()
        mine.terminal.why = "--debug"
        mine.stop_at_next_code()

    def stop_after(self, error: BaseException) -> None:
        """A session in the frames of an error, here and now."""
        trace = users_traceback(error.__traceback__)
        if trace is not None and not isinstance(error, DebuggerQuit | KeyboardInterrupt):
            self.post_mortem(trace, f"{type(error).__name__}: {error}")

    def post_mortem(self, trace: Any, text: str) -> None:
        session = self._make()
        session.terminal.why = f"after {text}"
        was, self._main = self._main, session if threading.current_thread() is threading.main_thread() else self._main
        try:
            session.post_mortem(trace)
        except DebuggerQuit:
            pass
        finally:
            self._main = was
            self._terminals.pop(session.terminal.session, None)

    def _pdb(self) -> WorkerPdb:
        """This thread's."""
        mine: WorkerPdb | None = getattr(self._here, "pdb", None)
        if mine is None or mine.quitting:
            if mine is not None:
                self._terminals.pop(mine.terminal.session, None)
            mine = self._here.pdb = self._make()
            if threading.current_thread() is threading.main_thread():
                self._main = mine
        return mine

    def _make(self) -> WorkerPdb:
        terminal = Terminal(next(self._sessions), self._report, self._stream())
        terminal.before_prompt = self._before_prompt
        self._terminals[terminal.session] = terminal
        return WorkerPdb(
            terminal,
            self.breakpoints,
            lambda declined: self._report(wire.DebugEnded(terminal.session, terminal.take(), declined)),
        )

    # --- threads that the user's code starts while there are breakpoints. Runs on: the new thread

    def _trace_thread(self, frame: FrameType, event: str, arg: Any) -> Any:
        """The first call on it."""
        if threading.current_thread().name.startswith("monarch-") or not self.breakpoints:
            sys.settrace(None)
            return None
        mine = self._pdb()
        mine.stand_by(frame)
        return mine.trace_dispatch(frame, event, arg)

    # --- around the user's code, on its thread

    def _begin_user_code(self) -> None:
        if self.breakpoints and sys.gettrace() is None:
            self._pdb().stand_by(sys._getframe(1))

    def leave_user_code(self) -> None:
        """What is stepped ends with it."""
        mine: WorkerPdb | None = getattr(self._here, "pdb", None)
        if mine is not None and mine.is_stepping:
            mine.finish()


def _thread_failed(before: Callable[[Any], Any], failure: Any) -> None:
    if isinstance(failure.exc_value, DebuggerQuit):
        print(
            f"{failure.thread.name if failure.thread else 'a thread'} has ended: {failure.exc_value}", file=sys.stderr
        )
    else:
        before(failure)
