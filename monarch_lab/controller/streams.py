"""Streams: sequences of ops that each worker runs beside one another, and loans of tensors between them.

A value on a stream has a mesh object of its own (DeviceMesh.on), so that the path of an op knows nothing of streams:
ops go where their tensors are, and the first one after another stream was activated asks whether that is it. What a
worker does with them is in worker/streams.py.
"""

from __future__ import annotations

import contextlib
import itertools
import warnings
import weakref
from collections import deque
from typing import Any

from msgspec.structs import replace

from monarch_lab.controller import lending
from monarch_lab.controller.client import clients
from monarch_lab.controller.constants import materialise
from monarch_lab.controller.dispatch import make_handle
from monarch_lab.controller.lending import BORROWED, LentRef, handles_of, line_here
from monarch_lab.controller.refs import Ref
from monarch_lab.controller.state import active_mesh, active_stream, recorder
from monarch_lab.errors import DeviceException, UsageRuntimeError, UsageTypeError, UsageValueError
from monarch_lab.tensors.meta import intern
from monarch_lab.wire.engine import Op

_numbers = itertools.count(1)
_events = itertools.count(1)
_named: dict[str, Stream] = {}
_let_go: deque[Borrow] = deque()  # loans whose handle died; any thread appends


def _look_again() -> None:
    """The next op of each mesh that has streams asks whether it is on the active one."""
    for client in list(clients):
        if client.has_streams and client.state == "live":
            client.forget_scope()


def next_event() -> int:
    """The number of an event at which two streams meet."""
    return next(_events)


class StreamActivation:
    """In force at once, until ``deactivate`` or the end of a ``with``."""

    def __init__(self, stream: Stream | None) -> None:
        mesh = active_mesh.get()
        _look_again()
        self._stream = active_stream.set(stream)
        self._mesh = active_mesh.set(mesh.on(stream)) if mesh is not None else None
        self._active = True

    def __enter__(self) -> None:
        return None

    def __exit__(self, *exc: object) -> None:
        self.deactivate()

    def deactivate(self) -> None:
        if not self._active:
            return
        self._active = False
        try:
            if self._mesh is not None:
                active_mesh.reset(self._mesh)
            active_stream.reset(self._stream)
        except ValueError:  # ended in another context than it began in: an await moved us
            active_stream.set(None)
        _look_again()


class Stream:
    """``with ml.Stream("copy").activate():`` what is made there, and ops with it there, run on that stream of each
    worker, beside those of others.

    Each worker has a thread for it (on a GPU a CUDA stream as well). A tensor belongs to the stream it was made on: an
    op with it while another one is active, or with tensors of two, is WRONG_STREAM. ``borrow`` takes a tensor to
    another one. Values may be fetched and ``backward()`` called whatever is active. Random numbers are drawn on the
    default stream alone.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.number = next(_numbers)
        _named[name] = self

    def __repr__(self) -> str:
        return f'stream "{self.name}"'

    def __reduce__(self) -> Any:
        raise UsageTypeError("a stream cannot be pickled: it belongs to this kernel")

    @property
    def key(self) -> Stream | None:
        """What meshes and the context variable know it by: None is the default stream."""
        return self if self.number else None

    def activate(self) -> StreamActivation:
        """Factory calls and functions of this context run on it. In force when called; a ``with`` ends it."""
        end_abandoned()
        return StreamActivation(self.key)

    def borrow(self, tensor: Any, mutable: bool = False) -> tuple[Any, Borrow]:
        """(a view of ``tensor`` on this stream, the loan): what the tensor's own stream did with it so far is done
        before the first op here, and what is done here before the loan's ``drop()`` is done before what follows there.

        Until then the tensor and all its views can only be read, or with ``mutable`` not be used at all: BORROWED,
        MUTATING_BORROW. The view cannot be used after it: DROPPED.
        Raises TypeError for LOCAL_TENSOR, REQUIRES_GRAD and those three, ValueError for a tensor that is on this
        stream, RuntimeError for ``mutable`` while it is lent.
        """
        end_abandoned()
        if not getattr(tensor, "is_mesh_tensor", False):
            raise UsageTypeError(
                "LOCAL_TENSOR: a stream borrows mesh tensors: put the local one on the mesh first, with "
                "mesh.replicate(x), where this stream is active"
            )
        if hasattr(tensor, "_value"):
            materialise(tensor)
        if tensor._meta.requires_grad:
            raise UsageTypeError(
                "REQUIRES_GRAD: a gradient does not pass from stream to stream: borrow t.detach(), or compute the loss "
                "and its backward pass on one stream"
            )
        if tensor._meta.wire.layout != "strided":
            raise UsageTypeError(f"a stream borrows dense tensors, and this one is {tensor._meta.wire.layout}")
        tensor._ref.mesh.check_alive()
        if tensor._ref.mesh.stream is self.key:
            raise UsageValueError(f"this tensor is on {self} already: use it as it is")
        store = tensor._store or tensor._ref
        if mutable and isinstance(store, LentRef):
            places = "; ".join(loan.place for loan in store.loans)
            raise UsageRuntimeError(
                f"Cannot borrow this tensor mutably: it is lent to be read ({places}); end that loan first, with drop()"
            )
        loan = Borrow(self, tensor, mutable, line_here())
        if (noting := recorder.get()) is not None:
            noting.loans.append(loan)
        return loan.take(), loan


def hand_over(tensor: Any, stream: Stream) -> Any:
    """A tensor that nobody else holds, on another stream for good: a loan that has no end."""
    view, loan = stream.borrow(tensor, mutable=True)
    loan.has_ended = True
    view._ref.mesh.client.lent.pop(view._ref.id, None)
    return view


class Borrow:
    """A loan of a tensor to another stream; ``drop`` or the end of a ``with`` ends it. One that is let go without is
    ended with a warning, when a stream is next used or the mesh waited for."""

    def __init__(self, stream: Stream, tensor: Any, mutable: bool, place: str) -> None:
        self.stream = stream
        self.mutable = mutable
        self.place = place
        self._store = tensor._store or tensor._ref
        self._refs = [h._ref for h in handles_of(tensor)]
        self._source = tensor._ref
        self._home = tensor._ref.mesh
        self._meta = tensor._meta
        self._lent: Ref | None = None  # of the borrowed storage
        self._view: Any = None  # weak
        self.has_ended = False

    def take(self) -> Any:
        client, home, away = self._home.client, self._home, self._home.on(self.stream.key)
        store, event = self._store, next(_events)
        ref = self._lent = Ref(next(client.refs), away, store.equal, self._meta.is_large)
        with client.lock:
            client.use_scope(home)
            client.code += (Op.LEND, self._source.id, ref.id, Op.SIGNAL, event)
            client.use_scope(away)
            client.code += (Op.WAIT, event)
            client.lent[ref.id] = [r.id for r in self._refs]
            client.flush()
        meta = intern(replace(self._meta.wire, is_view=self._meta.is_conj or self._meta.is_neg, is_leaf=True))
        view = make_handle(meta, ref)
        if self.mutable:
            text = f"this tensor is lent to {self.stream}, to be written ({self.place}): end the loan with drop()"
            lending.refuse(_live(self._store, self._refs), BORROWED, text)
        else:
            if not isinstance(store, LentRef):
                lending.make_lent(store)
            store.loans.append(self)
            lending.make_lent(ref)
            ref.loans.append(self)
        self._view = weakref.ref(view)
        return view

    def drop(self) -> None:
        """End the loan; a second time does nothing."""
        if self.has_ended:
            return
        if (noting := recorder.get()) is not None and self not in noting.loans:
            raise noting.refuse("the end of a loan that began before", "call its drop() after the function")
        self.has_ended = True
        client, home, away = self._home.client, self._home, self._home.on(self.stream.key)
        lent = self._lent
        assert lent is not None
        inner = getattr(lent, "loans", [])
        if any(loan is not self and not loan.has_ended for loan in inner) or lending.is_refused(lent):
            self.has_ended = False
            raise UsageRuntimeError("what was borrowed is lent on: end that loan first")
        equal = lent.equal
        ended = f"this tensor was borrowed at {self.place}, and the loan ended at {line_here()}"
        handles = _live(lent, [lent])
        event = next(_events)
        if client.state == "live":
            with contextlib.suppress(DeviceException):  # nothing runs on it any more; what is here is put right
                self._send_end(home, away, event)
        client.ended_loans.append(lent.id)
        lending.refuse(handles, lending.DROPPED, ended)
        if self.mutable:
            for ref in self._refs:
                ref.mesh = lending.behind(ref.mesh)
            self._store.equal &= equal
        else:
            lending.take_back(self._store, self)
        self._refs = []
        self._lent = None

    def _send_end(self, home: Any, away: Any, event: int) -> None:
        client, lent = home.client, self._lent
        assert lent is not None
        with client.lock:
            client.use_scope(away)
            for ref in self._refs if self.mutable else ():
                client.code += (Op.RETURN, lent.id, ref.id)
            client.code += (Op.SIGNAL, event)
            client.use_scope(home)
            client.code += (Op.WAIT, event)
            client.flush()

    def __enter__(self) -> Borrow:
        return self

    def __exit__(self, *exc: object) -> None:
        self.drop()

    def __del__(self) -> None:
        if not getattr(self, "has_ended", True) and self._lent is not None:
            _let_go.append(self)  # an op may be half written here: ended where nothing is


def _live(store: Ref, refs: list[Ref]) -> list[Any]:
    """Live handles of a storage."""
    found = [h for r in store.handles or () if (h := r()) is not None]
    return found or [_Bare(r) for r in refs]


class _Bare:
    """Stands for the only handle of a storage, which keeps no list of one."""

    def __init__(self, ref: Ref) -> None:
        self._ref = ref


def end_abandoned() -> None:
    """End loans whose handle died."""
    while _let_go:
        loan = _let_go.popleft()
        warnings.warn(
            f"a loan to {loan.stream} made at {loan.place} was let go without drop(), and is ended now; keep it in a "
            "variable and drop it where the tensor is no longer needed there",
            stacklevel=3,
        )
        loan.drop()


def stream_named(name: str) -> Stream:
    """For ``%%mesh --stream NAME``: the last stream made with that name, or a new one; "main" is the default one."""
    return MAIN if name == "main" else _named.get(name) or Stream(name)


def _make_main() -> Stream:
    main = Stream.__new__(Stream)
    main.name, main.number = "main", 0
    return main


MAIN = _make_main()


def get_active_stream() -> Stream:
    """The stream that factory calls of this context use: the default one, "main", where none was activated."""
    return active_stream.get() or MAIN
