"""Messages of debuggers: a worker's debugger asks for lines, and the kernel tells workers what to do with theirs.

A session is one stopped thread of one worker; ``session`` numbers it there. The kernel knows a session from its first
DebugRead to its DebugEnded, or to the end of the process. Control messages are heard while an op runs.
"""

from __future__ import annotations

from monarch_lab.wire.supervision import Message


class Place(Message, frozen=True):
    """Where a thread has stopped. ``line`` 0: nowhere in particular."""

    file: str = ""
    line: int = 0
    function: str = ""
    source: str = ""


class BreakpointDef(Message, frozen=True):
    """Stop at ``line`` of ``file``, or (``line`` 0) at the first line of ``function``, where ``condition`` is empty
    or true there. A ``file`` without a slash is the last part of a path, or the name of a notebook's cell."""

    number: int
    file: str = ""
    line: int = 0
    function: str = ""
    condition: str = ""


# --- reports, worker to kernel


class DebugRead(Message, frozen=True):
    """A debugger waits for a line. Answered by DebugReply with the same numbers. ``text`` is what it printed since
    its last one; ``thread`` is empty for a main thread; ``stream`` 0 is the default one."""

    session: int
    number: int
    text: str
    prompt: str
    place: Place = Place()
    thread: str = ""
    stream: int = 0
    why: str = ""


class DebugEnded(Message, frozen=True):
    """The thread goes on, and asks nothing more. ``declined``: because nobody could be asked."""

    session: int
    text: str
    declined: bool = False


class DebugTold(Message, frozen=True):
    """Answers DebugBreakIn, DebugPostMortem and DebugListen. ``text``: what was found or why nothing was done;
    ``cell``: where the last failure was, 0: there was none; ``kept``: with its frames; ``port``: where debugpy
    listens."""

    ident: int
    text: str = ""
    cell: int = 0
    kept: bool = False
    port: int = 0


# --- control, kernel to worker


class DebugReply(Message, frozen=True):
    """A line for the debugger; None ends its input. ``declined``: nobody can answer, go on without it. ``leave``: end
    the op, whatever the debugger was asking for."""

    session: int
    number: int
    line: str | None
    declined: bool = False
    leave: bool = False


class DebugBreakIn(Message, frozen=True):
    """Stop the Python code that the main thread runs for the user. Answered by DebugTold."""

    ident: int


class DebugPostMortem(Message, frozen=True):
    """What is kept of the last failure? ``start``: a session in its frames; ``forget``: let it go. Answered by
    DebugTold."""

    ident: int
    start: bool = False
    forget: bool = False


class DebugBreakpoints(Message, frozen=True):
    """The breakpoints set from the notebook, all of them: what was set before and is not among them is cleared."""

    breakpoints: list[BreakpointDef]


class DebugListen(Message, frozen=True):
    """Let debugpy listen on the loopback interface, once for a process. Answered by DebugTold."""

    ident: int
