"""Failures of ops as the controller keeps them, and the one exception made of them."""

from __future__ import annotations

import os
import pickle
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from monarch_lab.controller.locations import Location, frame_of
from monarch_lab.errors import RankFailure, RelatedError, RemoteException, RemoteFrame, grouped
from monarch_lab.wire import engine as wire
from monarch_lab.wire.codec import encode

_MAX_BESIDE = 5  # different failures that are told in words
_PARTLY = wire.Failure(
    "KeyboardInterrupt",
    "an interrupt stopped it on some ranks and not on others, so it has no value",
    [],
    interrupted=True,
)


@dataclass(slots=True)
class FailedOp:
    """One op that failed, on one rank or several."""

    batch: int
    position: int
    location: Location | None
    by_rank: dict[int, wire.Failure] = field(default_factory=dict)

    def failure(self) -> wire.Failure:
        return self.by_rank[min(self.by_rank)]


class Log:
    """Failed ops not yet raised. The I/O thread adds, a user thread takes: the lock guards both."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ops: dict[tuple[int, int, int], FailedOp] = {}
        self._told: deque[tuple[int, int, int]] = deque(maxlen=1_000)
        self._poisoned: dict[int, wire.Failure] = {}
        self._cause: wire.Failure | None = None  # of what is poisoned; the op itself may have been raised already
        self._unwritten: dict[tuple[int, int], set[int]] = {}
        self.forget: list[int] = []  # entries whose prediction was wrong; a backward plan has a negative number

    def add(self, rank: int, message: wire.OpFailed, location: Location | None) -> None:
        with self._lock:
            key = (message.batch, message.position, message.inside)
            self._cause = self._cause or message.failure
            if message.failure.entry:
                self.forget.append(message.failure.entry)
            if key in self._told:  # another rank's word of it has been raised
                return
            op = self._ops.setdefault(key, FailedOp(message.batch, message.position, location))
            op.by_rank[rank] = message.failure

    def take(self, cause: wire.Failure | None = None) -> tuple[FailedOp | None, int]:
        """(the first op that failed, how many more did); the log is empty then.

        With ``cause``, only the op that failed so is taken, where there is one.
        """
        with self._lock:
            if cause is not None:
                key = next((k for k, op in self._ops.items() if cause in op.by_rank.values()), None)
                if key is None:
                    return None, 0
                self._told.append(key)
                return self._ops.pop(key), 0
            ops, self._ops = self._ops, {}
            self._told.extend(ops)
        real = {k: op for k, op in ops.items() if not all(f.interrupted for f in op.by_rank.values())}
        return (real[min(real)], len(real) - 1) if real else (None, 0)

    def take_at(self, location: Location, after: int) -> FailedOp | None:
        """The op that failed at this place, in a batch later than ``after``."""
        with self._lock:
            for key, op in self._ops.items():
                if op.batch > after and op.location == location and not op.failure().interrupted:
                    self._told.append(key)
                    return self._ops.pop(key)
        return None

    def note(self, rank: int, poisoned: list[tuple[wire.Failure, list[int]]], unwritten: list[tuple[int, int]]) -> None:
        with self._lock:
            for failure, refs in poisoned:
                self._poisoned.update(dict.fromkeys(refs, failure))
                self._cause = self._cause or failure
            for ref, scope in unwritten:
                self._unwritten.setdefault((ref, scope), set()).add(rank)

    def take_poisoned(
        self, scopes: dict[int, tuple[int, ...]], heard: Iterable[int] | None = None
    ) -> list[tuple[wire.Failure, list[int]]]:
        """Failures and the values that hang on them. A value that an in-place op left alone on every rank is as it was;
        where other ranks wrote it, it is lost on all. Which it is stays open until all its ranks were ``heard``."""
        with self._lock:
            poisoned, self._poisoned = self._poisoned, {}
            unwritten, self._unwritten = self._unwritten, {}
            if heard is not None:
                given = frozenset(heard)
                self._unwritten = {k: ranks for k, ranks in unwritten.items() if not given.issuperset(scopes[k[1]])}
                unwritten = {k: ranks for k, ranks in unwritten.items() if k not in self._unwritten}
            cause = self._cause or _PARTLY
            self._cause = self._cause if self._unwritten else None
        for (ref, scope), ranks in unwritten.items():
            if len(ranks) < len(scopes[scope]):
                poisoned.setdefault(ref, cause)
        by_cause: dict[bytes, tuple[wire.Failure, list[int]]] = {}
        for ref, failure in poisoned.items():
            by_cause.setdefault(encode(failure), (failure, []))[1].append(ref)
        return [(failure, sorted(refs)) for failure, refs in by_cause.values()]

    def clear(self) -> None:
        """Their cell ends with an interrupt: that is what the user sees. What hangs on them stays known."""
        with self._lock:
            self._told.extend(self._ops)
            self._ops.clear()


def place(location: Location) -> str:
    frame = frame_of(location)
    return f"{frame.filename}:{frame.line} {frame.source}" if frame is not None else ""


def _opened(failure: wire.Failure) -> BaseException | None:
    if not failure.pickled:
        return None
    try:
        value = pickle.loads(failure.pickled)  # from a worker that has proved the mesh's key
    except (Exception, SystemExit):  # its class may do anything
        return None
    return value if isinstance(value, BaseException) else None


def rank_failure(rank: int, failure: wire.Failure) -> RankFailure:
    related = tuple(
        RelatedError(r.relation, r.type_name, r.text, _frames(r.frames), tuple(r.notes)) for r in failure.related
    )
    frames, notes = _frames(failure.frames), tuple(failure.notes)
    return RankFailure(rank, failure.type_name, failure.text, frames, _opened(failure), related, notes)


def _frames(told: list[tuple[str, int, str, str]]) -> tuple[RemoteFrame, ...]:
    return tuple(RemoteFrame(*frame) for frame in told)


def _place_name(filename: str) -> str:
    """A cell's file has the kernel's process number in its name: no two runs would read the same."""
    return "the cell's" if "ipykernel_" in filename or filename.startswith("<") else os.path.basename(filename)


_classes: dict[type, type[RemoteException]] = {}


def _class_for(error: BaseException | None) -> type[RemoteException]:
    """RemoteException that is also an instance of the original builtin or torch type, so that ``except`` catches."""
    kind = next(
        (c for c in type(error).__mro__ if c.__module__.partition(".")[0] in ("builtins", "torch")),
        Exception,
    )
    # A SyntaxError is shown by IPython in a way of its own, as if it were the cell's.
    if kind in (Exception, BaseException, object) or not issubclass(kind, Exception) or issubclass(kind, SyntaxError):
        return RemoteException
    if kind not in _classes:
        try:
            made = type("RemoteException", (RemoteException, kind), {"__module__": "monarch_lab.errors"})
            made("probe", {})
            _classes[kind] = made
        except TypeError:
            _classes[kind] = RemoteException
    return _classes[kind]


def build(
    by_rank: dict[int, wire.Failure], where: RemoteFrame | None, cell: str | None, note: str = ""
) -> RemoteException:
    """``by_rank``: the first cause first."""
    by_rank = {f.rank if f.rank >= 0 else rank: f for rank, f in by_rank.items()}
    failures = {rank: rank_failure(rank, f) for rank, f in by_rank.items()}
    (ranks, first), *others = grouped(failures)
    at = f", issued at {_place_name(where.filename)} line {where.line}" if where is not None else ""
    what = f"{first.type_name}: {first.text}" if first.text else first.type_name
    message = f"{what} (on {named(ranks)}{at}){_beside(others)}{note}"
    error = _class_for(first.exception)(
        message,
        failures,
        cell=where.filename if where is not None else cell,
        line=where.line if where is not None else None,
        issued=(where,) if where is not None else (),
    )
    # What a plain traceback shows of it; the notebook draws its own.
    for told, failure in error.groups[:_MAX_BESIDE]:
        error.add_note(f"On {named(told)}:\n{failure.traceback()}")
    return error


def _beside(others: Sequence[tuple[Sequence[int], RankFailure]]) -> str:
    """What else happened at once, in short."""
    told = [f"; {f.type_name} on {named(ranks)}" for ranks, f in others[:_MAX_BESIDE]]
    more = sum(len(ranks) for ranks, _ in others[_MAX_BESIDE:])
    return "".join(told) + (f"; others on {more} more rank{'s' * (more > 1)}" if more else "")


def named(ranks: Sequence[int]) -> str:
    """As in "rank 1" and "ranks 0, 2"."""
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def remote_exception(op: FailedOp, more: int = 0) -> RemoteException:
    note = f"; {more} more op{'s' * (more > 1)} failed" if more else ""
    return build(dict(sorted(op.by_rank.items())), frame_of(op.location), None, note)
