"""Every error a user can meet, named by who is at fault.

    MeshError
    ├── UsageError        the caller: nothing was sent, nothing is half-done
    ├── ClosedError       the mesh, cell or future was closed by its owner
    ├── LaunchError       no host or worker came up
    ├── DetachedError     a rank waits in a debugger that was left with `detach`
    ├── DeviceException   a process or host died, or is stuck
    ├── RemoteException   user code or an op failed on a worker
    ├── ProtocolError     a peer said what the protocol does not allow
    └── InternalError     our own bug: please report it

Usage errors that Python's own classes describe are also that class (``UsageTypeError`` is a ``TypeError``).
"""

from __future__ import annotations

from dataclasses import dataclass, field


class MeshError(Exception):
    """Base of every error of monarch_lab."""


class UsageError(MeshError):
    """A call that cannot be carried out as written; nothing was sent."""


class UsageTypeError(UsageError, TypeError):
    pass


class UsageValueError(UsageError, ValueError):
    pass


class UsageRuntimeError(UsageError, RuntimeError):
    pass


class UsageNotImplementedError(UsageError, NotImplementedError):
    pass


class StdinNotImplementedError(UsageNotImplementedError):
    """Code on a worker asked for a line, and the front end has no box to type it into."""


class PayloadTooLarge(UsageValueError):
    """More in one message than is carried; nothing was sent."""


class UsageKeyError(UsageError, KeyError):
    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class UsageIndexError(UsageError, IndexError):
    pass


class ClosedError(MeshError):
    """The mesh was stopped by its owner; start another."""


class LaunchError(MeshError):
    """No agent or worker came up; carries what the process itself printed."""


class ProtocolError(MeshError):
    """The peer sent something that is not allowed here."""


class InternalError(MeshError):
    """A bug of monarch_lab: please report it with the text."""


class DeviceException(MeshError):
    """A worker or host died, or is stuck.

    ``ranks`` are the ranks it concerns; the text names host, pid and signal or exit code.
    """

    def __init__(self, message: str, ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.ranks = ranks


class DetachedError(MeshError):
    """Who waits would wait for ever: a rank stands in a debugger that was left with ``detach``. What was sent to it
    runs when it goes on (%mesh debug). ``ranks``: those that stand there."""

    def __init__(self, message: str, ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.ranks = ranks


class BacklogError(DeviceException):
    """A host takes nothing in, and what waits for it has reached its limit; the message was not taken."""


@dataclass(frozen=True, slots=True)
class RemoteFrame:
    """One frame of a worker's traceback, with its source line as the worker saw it.

    ``line`` 0 is no frame: ``source`` says what was left out there.
    """

    filename: str
    line: int
    function: str
    source: str = ""


@dataclass(frozen=True, slots=True)
class RelatedError:
    """An exception of a worker beside the one that ended its cell.

    ``relation``: "cause" (``raise ... from`` it), "context" (raised while it was handled) or "part" (of a group).
    """

    relation: str
    type_name: str
    text: str
    frames: tuple[RemoteFrame, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RankFailure:
    """What happened on one rank. ``related``: what it was raised from, the earliest first, then a group's parts."""

    rank: int
    type_name: str
    text: str
    frames: tuple[RemoteFrame, ...] = ()
    exception: BaseException | None = field(default=None, compare=False)
    related: tuple[RelatedError, ...] = ()
    notes: tuple[str, ...] = ()

    def traceback(self) -> str:
        """As Python prints it."""
        lines = []
        for error in self.related:
            if error.relation != "part":
                lines += [*_traceback(error), "", BETWEEN[error.relation], ""]
        lines += _traceback(self)
        for error in self.related:
            if error.relation == "part":
                lines += ["", "One of its parts:", *_traceback(error)]
        return "\n".join(lines)


BETWEEN = {
    "cause": "The above exception was the direct cause of the following exception:",
    "context": "During handling of the above exception, another exception occurred:",
}


def _traceback(error: RankFailure | RelatedError) -> list[str]:
    lines = ["Traceback (most recent call last):"]
    for frame in error.frames:
        if frame.line:
            lines.append(f'  File "{frame.filename}", line {frame.line}, in {frame.function}')
        if frame.source:
            lines.append(f"    {frame.source}")
    return [*lines, f"{error.type_name}: {error.text}", *error.notes]


class RemoteException(MeshError):
    """User code or an op failed on workers.

    ``by_rank``           rank -> RankFailure; the first cause first
    ``ranks``             the ranks it happened on
    ``groups``            equal failures (type, text and frames) once, with their ranks; the first cause first
    ``exception``         the first cause's own exception, or its type name and text where it cannot be unpickled
    ``worker_traceback``  the first cause's frames as text
    ``cell``, ``line``    where in the notebook (or file) the op was issued

    Raised instances are also instances of the original type where that is a builtin or torch exception, so
    that ``except ValueError`` around an op catches it.
    """

    def __init__(
        self,
        message: str,
        by_rank: dict[int, RankFailure],
        *,
        cell: str | None = None,
        line: int | None = None,
        issued: tuple[RemoteFrame, ...] = (),
    ) -> None:
        super().__init__(message)
        self.by_rank = by_rank
        self.cell = cell
        self.line = line
        self.issued = issued

    def __str__(self) -> str:  # KeyError, among the types mixed in, would print the repr
        return str(self.args[0])

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted(self.by_rank))

    @property
    def first(self) -> RankFailure:
        return next(iter(self.by_rank.values()))

    @property
    def groups(self) -> list[tuple[tuple[int, ...], RankFailure]]:
        return grouped(self.by_rank)

    @property
    def exception(self) -> BaseException | str:
        first = self.first
        return first.exception if first.exception is not None else f"{first.type_name}: {first.text}"

    @property
    def worker_traceback(self) -> str:
        return self.first.traceback()


def grouped(by_rank: dict[int, RankFailure]) -> list[tuple[tuple[int, ...], RankFailure]]:
    """Equal failures with their ranks, in the order of their first one."""
    folded: dict[object, tuple[list[int], RankFailure]] = {}
    for rank, failure in by_rank.items():
        key = (failure.type_name, failure.text, failure.frames, failure.related, failure.notes)
        folded.setdefault(key, ([], failure))[0].append(rank)
    return [(tuple(sorted(ranks)), failure) for ranks, failure in folded.values()]
