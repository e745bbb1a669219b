"""Functions of the kernel that a gradient graph on the workers comes to: hooks, backward of an autograd.Function.

While the kernel waits for an answer, ranks may call a function of its (wire.Called). Once every rank of the question
has made the same call, the waiting thread runs the function on mesh tensors, whose ops the ranks obey meanwhile, and
sends what it gave (wire.Resume). A call is always answered, if only with an error: a rank that waits does nothing else.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from monarch_lab.controller.waiting import Pending
from monarch_lab.errors import UsageError
from monarch_lab.wire import engine as wire
from monarch_lab.wire.codec import encode

if TYPE_CHECKING:
    from monarch_lab.controller.client import Client
    from monarch_lab.controller.mesh import DeviceMesh


@dataclass(frozen=True, slots=True)
class Packed:
    """What a pack hook gives: the number of the handler that unpacks it."""

    number: int


# (arguments, how many of them are of the first kind) -> what it gives: mesh tensors or None, or None itself.
Handler = Callable[[list[Any], int], Sequence[Any] | Packed | None]


class Callbacks:
    """Of one mesh's client. ``bool`` says whether a pass may come to a function of the kernel at all."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._handlers: dict[int, Callable[[], Handler | None]] = {}
        self._tensor_hooks: set[int] = set()
        self._numbers = itertools.count(2)  # 0.0 and 1.0 are kinds of their own among number operands

    def __len__(self) -> int:
        return len(self._handlers)

    def __bool__(self) -> bool:
        return bool(self._handlers)

    @property
    def has_tensor_hooks(self) -> bool:
        return not self._tensor_hooks.isdisjoint(self._handlers)

    def add(self, handler: Handler, mesh: DeviceMesh, *, is_kept: bool = True, on_tensor: bool = False) -> int:
        """A number for ``handler``, which is kept until the workers say that nothing there can call it. One that is not
        kept is passed by once nobody here has it: what it refers to may be what keeps the workers' side alive.
        UsageError for a value on another stream than the default one, whose thread answers the kernel meanwhile."""
        if mesh.stream is not None:
            raise UsageError(
                "a gradient hook or autograd.Function of the notebook runs on the default stream alone, and this "
                f"value is on {mesh.stream}: compute it there, and lend what is needed with stream.borrow(t)"
            )
        number = next(self._numbers)
        if on_tensor:
            self._tensor_hooks = {n for n in self._tensor_hooks if n in self._handlers} | {number}
        self._handlers[number] = (lambda: handler) if is_kept else weakref.ref(handler)
        return number

    def forget(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            self._handlers.pop(number, None)

    # Runs on: the I/O thread
    def on_called(self, rank: int, message: wire.Called, pending: Pending | None) -> None:
        if pending is None or pending.done or pending.error is not None or pending.is_left:
            self._refuse(rank, message)
            return
        pending.calls[rank] = message
        pending.bell.put(None)

    def _refuse(self, rank: int, message: wire.Called) -> None:
        resume = wire.Resume(message.ident, message.serial, [], error="nobody waits for it any more")
        self._client.supervisor.send((rank,), encode(resume))

    # Runs on: the thread that waits for ``pending``
    def refuse(self, pendings: Iterable[Pending]) -> None:
        """What was asked of these, and what will be, gets an error for an answer."""
        for pending in pendings:
            if pending.error is None and not pending.done:
                pending.error = KeyboardInterrupt()
            calls, pending.calls = pending.calls, {}
            for rank, message in calls.items():
                self._refuse(rank, message)

    def leave(self, pending: Pending) -> None:
        """Nobody waits for this one now: what it is asked gets an error for an answer."""
        pending.is_left = True
        calls, pending.calls = pending.calls, {}
        for rank, message in calls.items():
            self._refuse(rank, message)

    def serve(self, pending: Pending) -> None:
        """Answer the call that every rank has made; returns at once while one has not. The function's exception is kept
        in ``pending``, to be raised when the ranks have ended the pass; KeyboardInterrupt goes on."""
        if len(pending.calls) + len(pending.replies) < len(pending.ranks):
            return
        calls, pending.calls = pending.calls, {}
        first = calls[min(calls)]
        ident, serial = first.ident, first.serial
        try:
            if pending.replies or any(m != first for m in calls.values()):
                raise UsageError(
                    "the ranks came to different gradient hooks or autograd.Functions in one backward pass, or in "
                    "another order: the graph must be the same on every rank"
                )
            result = self._run(first, pending)
            if isinstance(result, Packed):
                resume = wire.Resume(ident, serial, [], handler=result.number)
            else:
                refs = [0 if t is None else t._ref.id for t in result or ()]
                resume = wire.Resume(ident, serial, refs, result is None)
            self._client.order(resume, tuple(calls))
        except BaseException as e:
            if pending.error is None:
                pending.error = e
            with contextlib.suppress(Exception):
                text = f"{type(e).__name__}: {e}"
                self._client.order(wire.Resume(ident, serial, [], error=text), tuple(calls))
            if isinstance(e, KeyboardInterrupt):
                raise

    def _run(self, call: wire.Called, pending: Pending) -> list[Any] | Packed | None:
        from monarch_lab.controller import called

        pending.was_called = True
        arguments = called.arguments(self._client, call, pending)
        handler = self._handlers.get(call.handler, lambda: None)()
        if handler is None:
            return None
        with called.surroundings(call.grad):
            given = handler(arguments, call.split)
        if given is None or isinstance(given, Packed):
            return given
        return called.checked(list(given), pending)
