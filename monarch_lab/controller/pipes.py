"""Pipes: a process beside each worker that makes or treats data meanwhile, such as a loader."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils._pytree import tree_leaves

from monarch_lab.controller.activation import get_active_mesh
from monarch_lab.controller.learning import issue_told
from monarch_lab.controller.propagating import Fakes
from monarch_lab.controller.remote_functions import TOLD, remote
from monarch_lab.controller.scanning import mesh_tensors_in, scan
from monarch_lab.controller.state import ambient_number
from monarch_lab.errors import UsageTypeError, UsageValueError
from monarch_lab.tensors.opaque import OpaqueRef

_open = remote("monarch_lab.worker.pipes.open_pipe", propagate=lambda *a, **k: OpaqueRef(None))
_send = remote("monarch_lab.worker.pipes.send", propagate=lambda ref, value: None)
_recv = remote("monarch_lab.worker.pipes.recv")


class Pipe:
    """Made by ``ml.create_pipe`` or ``ml.remote_generator``; its side processes end with its last reference.

    ``mesh`` is where it is. An error of the far function is a RemoteException of what was received after it.
    """

    def __init__(
        self, fn: Any, is_generator: bool, propagate: Any, max_messages: int, args: tuple[Any, ...], kwargs: Any
    ) -> None:
        self.mesh = get_active_mesh()
        if not callable(propagate):
            raise UsageTypeError("a pipe needs propagate=, a generator function that yields stand-ins of what it gives")
        if not isinstance(max_messages, int) or max_messages < 1:
            raise UsageValueError(f"max_messages is a number from 1 on, not {max_messages!r}")
        if not (callable(fn) or isinstance(fn, str)):
            raise UsageTypeError(f"a pipe runs a function or its dotted path, not {type(fn).__name__}")
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, OpaqueRef) or getattr(leaf, "is_mesh_tensor", False) or any(mesh_tensors_in(leaf)):
                raise UsageValueError(
                    "the function of a pipe runs in a process of its own and cannot be started with mesh tensors or "
                    "OpaqueRefs: give it plain values, and send the tensors with pipe.send"
                )
        self._ref: OpaqueRef = _open(fn, is_generator, max_messages, self.mesh.defined(), args, kwargs)
        self._fakes = Fakes()
        self._shapes = self._fakes.call(lambda: iter(propagate(*args, **kwargs)))

    def send(self, value: Any) -> None:
        """Each process's value (a pytree of mesh tensors and plain values) to its side process, which gets it from
        ``pipe.recv()``. The workers wait where ``max_messages`` are not received yet."""
        _send(self._ref, value)

    def recv(self) -> Any:
        """What the side processes sent next, as the propagator yields it. Nothing waits here; the workers do.

        Raises EOFError where the propagator has come to its end.
        """
        answer, values = self._fakes.describe(self._next, self.mesh)
        call = scan(_recv, (self._ref,), {}, ambient_number())
        name = _recv.remote_name(call.mesh.client)
        call.key = (name, *call.key[1:], (TOLD, str(answer.tree), tuple(answer.outputs)))
        entry = call.mesh.client.cache.entries.get(call.key)
        return issue_told(call, entry, lambda: (answer, values), values)

    def _next(self) -> Any:
        try:
            return next(self._shapes)
        except StopIteration:
            raise EOFError("the pipe's propagator has ended: it yields once for each recv()") from None

    def __iter__(self) -> Iterator[Any]:
        """Until the propagator ends."""
        while True:
            try:
                yield self.recv()
            except EOFError:
                return


def create_pipe(
    fn: Callable[..., Any] | str, *args: Any, propagate: Callable[..., Any], max_messages: int = 50, **kwargs: Any
) -> Pipe:
    """Start ``fn(pipe, *args, **kwargs)`` in a process beside each worker of the active mesh, which sees no GPU.

    There ``pipe.recv()`` gives what was sent here, ``pipe.send(obj)`` sends, ``pipe.ranks`` and ``pipe.sizes`` say
    where it is. ``fn`` is a function or its path. ``propagate(*args, **kwargs)`` is a generator function: for each
    ``recv()`` here it yields what that gives, of torch tensors of the same shapes and dtypes. At most ``max_messages``
    wait each way; the sender waits then.

    Raises ValueError where no mesh is active, or for arguments that live on the mesh, TypeError without ``propagate``.
    """
    return Pipe(fn, False, propagate, max_messages, args, kwargs)


def remote_generator(fn: Callable[..., Any] | str, max_messages: int = 50) -> Callable[[Callable[..., Any]], Any]:
    """Decorator of a propagator: calling it starts the generator function ``fn`` (or its dotted path) beside each
    worker of the active mesh, and iterates over what that yields, as mesh tensors. See ``create_pipe``."""

    def decorate(propagate: Callable[..., Any]) -> Callable[..., Pipe]:
        @functools.wraps(propagate)
        def start(*args: Any, **kwargs: Any) -> Pipe:
            return Pipe(fn, True, propagate, max_messages, args, kwargs)

        return start

    return decorate
