"""User functions on the workers."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

from monarch_lab.controller.calling import send_call
from monarch_lab.controller.dispatch import replay
from monarch_lab.controller.futures import Future
from monarch_lab.controller.learning import learn
from monarch_lab.controller.scanning import scan
from monarch_lab.controller.state import active_mesh, ambient_number
from monarch_lab.errors import UsageError, UsageTypeError
from monarch_lab.tensors import payload
from monarch_lab.wire import engine as wire


class RemoteFunction:
    """A function that runs on every process of a mesh, on real tensors.

    Call it with mesh tensors (its mesh is theirs) or with a mesh active; the result is the function's, its tensors
    mesh tensors. Shapes are learned from the first run itself. Functions travel by value, as they are at the call:
    one that was defined again, or whose globals changed, is sent afresh.
    """

    opaque = True  # its results may differ between ranks in ways the controller cannot know

    def __init__(self, fn: Callable[..., Any] | str) -> None:
        if not callable(fn) and not isinstance(fn, str):
            raise UsageTypeError(f"ml.remote takes a function or its dotted path, not {type(fn).__name__}")
        if isinstance(fn, str) and "." not in fn:
            raise UsageTypeError(f"ml.remote: {fn!r} is no dotted path, as in 'package.module.function'")
        self.fn = fn
        self.shown = fn if isinstance(fn, str) else getattr(fn, "__name__", repr(fn))
        self.__name__ = self.shown
        self.__doc__ = getattr(fn, "__doc__", None)
        self.__wrapped__ = fn

    def __repr__(self) -> str:
        return f"<remote {self.shown}>"

    def remote_name(self, client: Any) -> str:
        """The name under which the workers of ``client`` have the function as it is now."""
        if isinstance(self.fn, str):
            return f"user:{self.fn}"
        frames, sources = payload.dumps(self.fn)
        digest = hashlib.sha256()
        for frame in frames:
            digest.update(frame)
        known = client.payloads
        number = known.get(digest.digest())
        if number is None:
            number = known[digest.digest()] = len(known) + 1
            with client.lock:
                client.define(wire.PayloadDef(number, len(frames), sources), frames)
        return f"payload:{number}"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call = scan(self, args, kwargs, ambient_number())
        name = self.remote_name(call.mesh.client)
        call.key = (name, *call.key[1:])
        entry = call.mesh.client.cache.entries.get(call.key) if call.hashable else None
        if entry is None:
            return learn(call)
        return replay(entry, call.tensors, call.numbers, call.ambient, call.mesh)

    def call_on_shard_and_fetch(self, *args: Any, shard: dict[str, int] | None = None, **kwargs: Any) -> Future[Any]:
        """A Future of the function's result on one process: any value that pickles, tensors on the CPU."""
        from monarch_lab.controller.moves import _coordinates

        mesh = _mesh_of(args, kwargs)
        return send_call(mesh, _coordinates(mesh, shard, {}), self, args, kwargs)


def _mesh_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    from torch.utils._pytree import tree_leaves

    for leaf in tree_leaves((args, kwargs)):
        if getattr(leaf, "is_mesh_tensor", False):
            return leaf._ref.mesh
    mesh = active_mesh.get()
    if mesh is None:
        raise UsageError("Remote functions require an active device mesh: use a %%mesh cell or `with mesh.activate():`")
    return mesh


def remote(fn: Callable[..., Any] | str) -> RemoteFunction:
    """A function, or the dotted path of one the workers can import, to be run on every process. Also a decorator."""
    return fn if isinstance(fn, RemoteFunction) else RemoteFunction(fn)


def call_on_shard_and_fetch(
    fn: Callable[..., Any] | str, *args: Any, shard: dict[str, int] | None = None, **kwargs: Any
) -> Future[Any]:
    """``ml.remote(fn).call_on_shard_and_fetch(...)``."""
    return remote(fn).call_on_shard_and_fetch(*args, shard=shard, **kwargs)
