"""pdb as it runs in a worker: it stops in the user's code alone, and shows tensors with what they are.

A session begins where the thread stops and ends when it goes on with ``c``, is left with ``q``, or returns from the
user's code. With breakpoints left (pdb's own or the notebook's) the thread stays traced, and a later stop is a session
again.
"""

from __future__ import annotations

import bdb
import code
import codeop
import contextlib
import dis
import pdb
import pprint
import sys
from collections.abc import Callable
from types import CodeType, FrameType, TracebackType
from typing import Any

from torch.utils._python_dispatch import _disable_current_modes

from monarch_lab.wire.debugging import Place
from monarch_lab.worker.breakpoints import Breakpoints
from monarch_lab.worker.debug_frames import is_of_user, is_ours, is_users_file, place_of, users_frame
from monarch_lab.worker.debug_terminal import DebuggerQuit, Declined, Terminal
from monarch_lab.worker.describing import headline

_YIELD = dis.opmap["YIELD_VALUE"]
MESH_WORDS = "of the mesh: ranks, rank R, cast R CMD, c all, detach, complete TEXT (help mesh)"


class WorkerPdb(pdb.Pdb):
    """``ended(declined)`` is called when a session has ended."""

    def __init__(self, terminal: Terminal, breakpoints: Breakpoints, ended: Callable[[bool], None]) -> None:
        streams: Any = terminal  # all that pdb uses of a file
        super().__init__(stdin=streams, stdout=streams, nosigint=True, readrc=False)
        self.use_rawinput = False
        self.prompt = "(Pdb) "
        self.terminal = terminal
        self.is_open = False
        self.is_stepping = False
        self._breakpoints = breakpoints
        self._ended = ended
        self._is_declined = False
        self._stop = Place()
        self._at_first_line = False
        terminal.place = lambda: self._stop

    # --- beginning

    def reset(self) -> None:
        sys.settrace(None)  # the debugger itself is not traced
        super().reset()

    def set_trace(self, frame: FrameType | None = None, **_: Any) -> None:
        self.is_stepping = True
        super().set_trace(frame)

    def stop_at(self, frame: FrameType) -> None:
        """Stop at the line that the frame runs, now; not from a trace function. Raises DebuggerQuit."""
        self.reset()
        self.botframe = _bottom(frame)
        self.set_step()
        self.trace_dispatch(frame, "line", None)
        if self.is_stepping or self.breaks or self._breakpoints:
            self._trace(frame, everywhere=True)

    def stop_at_next_code(self) -> None:
        """Stop at the first line of the user's code that runs next."""
        self.reset()
        self.botframe = _bottom(sys._getframe())
        self.set_step()
        self._at_first_line = True
        sys.settrace(self.trace_dispatch)

    def stand_by(self, frame: FrameType) -> None:
        """Stop at breakpoints alone."""
        self.reset()
        self.botframe = _bottom(frame)
        self._set_stopinfo(self.botframe, None, -1)
        self._trace(frame, everywhere=False)

    def post_mortem(self, trace: TracebackType) -> None:
        before = sys.gettrace()
        self.reset()
        try:
            self.interaction(None, trace)
        finally:
            self._end()
            sys.settrace(before)

    def _trace(self, frame: FrameType, everywhere: bool) -> None:
        above: FrameType | None = frame
        while above is not None:
            if everywhere or self.break_anywhere(above):
                above.f_trace = self.trace_dispatch
            above = above.f_back
        sys.settrace(self.trace_dispatch)

    # --- where it stops

    def trace_dispatch(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "call" and not (self.is_stepping or self.breaks or self._breakpoints):
            sys.settrace(None)  # there is nothing to stop at any more
            return None
        try:
            result = super().trace_dispatch(frame, event, arg)
        except bdb.BdbQuit as left:
            self.set_quit()
            self._end()
            raise DebuggerQuit(getattr(left, "was_interrupted", False)) from None
        if event == "return" and self.is_stepping and self._is_last(frame):
            self.finish()
        return result

    def _is_last(self, frame: FrameType) -> bool:
        """Whether nothing of the user's called this. The two parts of a ``%%spmd`` cell count as one."""
        above = frame.f_back
        if not is_users_file(frame.f_code.co_filename) or (above is not None and above.f_code.co_name == "_execute"):
            return False
        if frame.f_code.co_code[frame.f_lasti] == _YIELD:  # it awaits, and comes back
            return False
        return users_frame(above) is None

    def stop_here(self, frame: FrameType) -> bool:
        # A library's code, where the user's calls it; not what we call.
        return bool(super().stop_here(frame)) and is_of_user(frame)

    def break_here(self, frame: FrameType) -> bool:
        if super().break_here(frame):
            return True
        why = self._breakpoints.why(frame) if self._breakpoints else ""
        if not why or not is_of_user(frame):
            return False
        if not self.terminal.why:
            self.terminal.why = why
        return True

    def break_anywhere(self, frame: FrameType) -> bool:
        return super().break_anywhere(frame) or bool(self._breakpoints and self._breakpoints.are_in(frame.f_code))

    def get_stack(self, f: FrameType | None, t: TracebackType | None) -> tuple[list[tuple[FrameType, int]], int]:
        """Without our frames, and without what led to the user's code."""
        stack, index = super().get_stack(f, t)
        first = next((k for k, (frame, _) in enumerate(stack) if is_users_file(frame.f_code.co_filename)), 0)
        kept = [k for k, (frame, _) in enumerate(stack) if k >= first and not is_ours(frame)]
        if not kept:
            return stack, index
        return [stack[k] for k in kept], max((n for n, k in enumerate(kept) if k <= index), default=0)

    def user_call(self, frame: FrameType, argument_list: Any) -> None:
        if not self._at_first_line and frame.f_code.co_name != "<module>":  # its first line comes next
            super().user_call(frame, argument_list)

    def user_line(self, frame: FrameType) -> None:
        self._at_first_line = False
        super().user_line(frame)

    def user_return(self, frame: FrameType, return_value: Any) -> None:
        try:
            super().user_return(frame, return_value)
        finally:
            _forget(frame, "__return__")

    def user_exception(self, frame: FrameType, exc_info: Any) -> None:
        try:
            super().user_exception(frame, exc_info)
        finally:
            _forget(frame, "__exception__")

    def setup(self, f: FrameType | None, tb: Any) -> Any:
        result = super().setup(f, tb)
        if self.stack:
            self._stop = place_of(*self.stack[self.curindex])
        return result

    # --- how it goes on

    def interaction(self, frame: FrameType | None, traceback: Any) -> None:
        self.is_open = True
        super().interaction(frame, traceback)

    def _cmdloop(self) -> None:
        try:
            super()._cmdloop()
        except Declined:
            self._is_declined = True
            self.message("nobody can be asked for a debugger's command here: it went on. It had stopped at:")
            self.print_stack_trace()
            self.set_continue()

    def _set_stopinfo(self, stopframe: Any, returnframe: Any, stoplineno: int = 0) -> None:
        self.is_stepping = stoplineno != -1 or stopframe is not self.botframe
        super()._set_stopinfo(stopframe, returnframe, stoplineno)  # type: ignore[misc]

    def set_continue(self) -> None:
        if self._breakpoints:
            self._set_stopinfo(self.botframe, None, -1)
        else:
            super().set_continue()
        self._end()

    def finish(self) -> None:
        """The user's code has ended."""
        if self.is_stepping:
            self.set_continue()

    def _end(self) -> None:
        self.is_stepping = False
        if self.is_open:
            self.is_open = False
            declined, self._is_declined = self._is_declined, False
            self._ended(declined)

    # --- commands

    def do_p(self, arg: str) -> None:
        self._print(arg, repr)

    def do_pp(self, arg: str) -> None:
        self._print(arg, pprint.pformat)

    def _print(self, arg: str, text: Callable[[Any], str]) -> None:
        try:
            value = self._getval(arg)  # says what was wrong
        except bdb.BdbQuit:
            raise
        except Exception:
            return
        self._show(value, text)

    def displayhook(self, obj: Any) -> None:
        if obj is not None:
            self._show(obj, repr)

    def _show(self, value: Any, text: Callable[[Any], str]) -> None:
        if head := headline(value):
            self.message(head)
            with _disable_current_modes():
                self.message(text(value))
            return
        try:
            self.message(text(value))
        except Exception as error:
            self.error(f"its repr raised {type(error).__name__}: {error}")

    def default(self, line: str) -> None:
        """A statement, of several lines where the first does not end it."""
        statement = line.removeprefix("!").strip()
        try:
            while codeop.compile_command(statement, "<stdin>", "single") is None:
                more = self.terminal.ask("...   ")
                if more is None:
                    break
                statement += "\n" + more
        except (SyntaxError, ValueError, OverflowError):
            pass  # told below
        super().default("!" + statement)

    def do_interact(self, arg: str) -> None:
        """interact: statements in a namespace with the names of this frame; exit() or an end of input ends it."""
        assert self.curframe is not None
        names = {**self.curframe.f_globals, **self.curframe_locals}
        _Console(self.terminal, names).interact("*interactive*: exit() goes back to the debugger", "")

    def do_complete(self, arg: str) -> None:
        """complete TEXT: names and commands that begin so"""
        names = self._complete_expression(arg, arg, 0, len(arg))
        if "." not in arg:
            names += [n.removeprefix("do_") for n in self.get_names() if n.startswith("do_" + arg)]
        self.message("  ".join(sorted({n for n in names if not n.startswith("__") or arg.endswith("__")})) or "(none)")

    def do_debug(self, arg: str) -> bool | None:
        """debug STATEMENT: step through it, in a debugger of its own"""
        result = super().do_debug(arg)
        if self.curframe is not None:
            _forget(self.curframe, "__return__")
        return result

    def do_help(self, arg: str) -> None:
        super().do_help(arg)
        if not arg:
            self.message(MESH_WORDS)

    do_h = do_help

    def do_run(self, arg: str) -> None:
        """run: not here; run the cell again"""
        self.error("a worker is not started again from its debugger: leave it with q, and run the cell again")

    do_restart = do_run


class _Console(code.InteractiveConsole):
    """Statements typed at the debugger's terminal."""

    def __init__(self, terminal: Terminal, names: dict[str, Any]) -> None:
        super().__init__(names)
        self._terminal = terminal

    def raw_input(self, prompt: str = "") -> str:
        line = self._terminal.ask(prompt)
        if line is None or line.strip() in ("exit()", "quit()", "exit", "quit"):
            raise EOFError
        return line

    def write(self, data: str) -> None:
        self._terminal.write(data)

    def runcode(self, code: CodeType) -> None:
        with contextlib.redirect_stdout(self._terminal), contextlib.redirect_stderr(self._terminal):
            super().runcode(code)


def _forget(frame: FrameType, name: str) -> None:
    """What pdb has put among the variables; those of a cell last."""
    if frame.f_locals is frame.f_globals:
        frame.f_globals.pop(name, None)


def _bottom(frame: FrameType) -> FrameType:
    while frame.f_back is not None:
        frame = frame.f_back
    return frame
