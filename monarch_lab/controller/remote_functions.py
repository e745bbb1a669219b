"""User functions on the workers."""

from __future__ import annotations

import hashlib
import types
import weakref
from collections.abc import Callable
from typing import Any

from monarch_lab.controller.breakpoints import may_stop, names_in
from monarch_lab.controller.calling import send_call
from monarch_lab.controller.dispatch import replay
from monarch_lab.controller.futures import Future
from monarch_lab.controller.learning import issue_told, learn
from monarch_lab.controller.lending import check_stream
from monarch_lab.controller.propagating import INSPECT, told
from monarch_lab.controller.scanning import Mark, mesh_tensors_in, scan
from monarch_lab.controller.state import active_mesh, ambient_number
from monarch_lab.errors import UsageError, UsageTypeError, UsageValueError
from monarch_lab.tensors import payload
from monarch_lab.wire import engine as wire

TOLD = Mark("TOLD")
_SIMPLE = (int, float, complex, str, bytes, bool, type(None))


def fingerprint(fn: Any, seen: frozenset[int] = frozenset()) -> Any:
    """Equal while pickling ``fn`` again would give the same; None where that cannot be told without pickling.

    Pickling costs half a millisecond, most of it a search through sys.modules.
    """
    if not isinstance(fn, types.FunctionType) or id(fn) in seen:
        return ("again",) if id(fn) in seen else None
    parts: list[Any] = [fn.__code__, id(fn.__globals__)]
    values = [*(fn.__defaults__ or ()), *(fn.__kwdefaults__ or {}).values()]
    for cell in fn.__closure__ or ():
        try:
            values.append(cell.cell_contents)
        except ValueError:
            return None
    values += [fn.__globals__[n] for n in names_in(fn.__code__) if n in fn.__globals__]
    for value in values:
        if type(value) in _SIMPLE:
            parts.append((type(value), value))
        elif isinstance(value, (types.ModuleType, types.BuiltinFunctionType)):
            parts.append(id(value))
        elif isinstance(value, (type, types.FunctionType)) and value.__module__ not in ("__main__", fn.__module__):
            parts.append(id(value))
        else:
            inner = fingerprint(value, seen | {id(fn)})
            if inner is None:
                return None
            parts.append(inner)
    return tuple(parts)


class RemoteFunction:
    """A function that runs on every process of a mesh, on real tensors.

    Call it with mesh tensors (its mesh is theirs) or with a mesh active; the result is the function's, its tensors
    mesh tensors. Shapes are learned from the first run itself. Functions travel by value, as they are at the call:
    one that was defined again, or whose globals changed, is sent afresh.

    Arguments are pytrees of mesh tensors, modules that hold mesh tensors, process groups, ``ml.OpaqueRef``, and
    anything that pickles, by value. See ``ml.remote`` for ``propagate``.
    """

    opaque = True  # its results may differ between ranks in ways the controller cannot know

    def __init__(self, fn: Callable[..., Any] | str, propagate: Callable[..., Any] | str | None = None) -> None:
        if not callable(fn) and not isinstance(fn, str):
            raise UsageTypeError(f"ml.remote takes a function or its dotted path, not {type(fn).__name__}")
        if isinstance(fn, str) and "." not in fn:
            raise UsageTypeError(f"ml.remote: {fn!r} is no dotted path, as in 'package.module.function'")
        if propagate == "mocked" or (isinstance(propagate, str) and propagate not in ("cached", INSPECT)):
            raise UsageValueError(f'ml.remote: propagate is a function, "cached" or "inspect", not {propagate!r}')
        if not (propagate is None or isinstance(propagate, str) or callable(propagate)):
            raise UsageTypeError(f"ml.remote: propagate is a function or a word, not {type(propagate).__name__}")
        self.fn = fn
        self.propagate = None if propagate == "cached" else propagate
        self.shown = fn if isinstance(fn, str) else getattr(fn, "__name__", repr(fn))
        self.__name__ = self.shown
        self.__doc__ = getattr(fn, "__doc__", None)
        self.__wrapped__ = fn
        # client -> what it was when it was sent, as which payload, and how often the cache had been emptied then
        self._sent: weakref.WeakKeyDictionary[Any, tuple[Any, int, int]] = weakref.WeakKeyDictionary()

    def __repr__(self) -> str:
        return f"<remote {self.shown}>"

    def remote_name(self, client: Any) -> str:
        """The name under which the workers of ``client`` have the function as it is now."""
        if isinstance(self.fn, str):
            return f"user:{self.fn}"
        mark, cache = fingerprint(self.fn), client.cache
        sent, number, generation = self._sent.get(client, (None, 0, -1))
        if mark is not None and sent == mark and generation == cache.generation:
            return f"payload:{number}"
        frames, sources = payload.dumps(self.fn)
        digest = hashlib.sha256()
        for frame in frames:
            digest.update(frame)
        number = cache.functions.get(digest.digest(), 0)
        if not number:
            with client.lock:
                number = cache.functions[digest.digest()] = cache.next_function()
                client.define(wire.PayloadDef(number, len(frames), sources), frames)
        self._sent[client] = mark, number, cache.generation
        return f"payload:{number}"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call = scan(self, args, kwargs, ambient_number())
        check_stream(self, call.mesh)
        name = self.remote_name(call.mesh.client)
        call.key = (name, *call.key[1:])
        client = call.mesh.client
        if client.recorder is not None and may_stop(self.fn):
            client.recorder.note_stop(self.shown)
        if self.propagate is not None:
            call.key = (*call.key, (TOLD, self.propagate))
        entry = client.cache.entries.get(call.key) if call.hashable else None
        if entry is not None and entry.told is None:
            return replay(entry, call.tensors, call.numbers, call.ambient, call.mesh)
        if self.propagate is None or (call.hashable and call.key in client.cache.never):
            return learn(call)
        return issue_told(call, entry, lambda: told(call, self.propagate))  # type: ignore[arg-type]

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
        if (held := next(mesh_tensors_in(leaf), None)) is not None:
            return held._ref.mesh
    mesh = active_mesh.get()
    if mesh is None:
        raise UsageError("Remote functions require an active device mesh: use a %%mesh cell or `with mesh.activate():`")
    return mesh


def remote(fn: Callable[..., Any] | str | None = None, *, propagate: Callable[..., Any] | str | None = None) -> Any:
    """A function, or the dotted path of one the workers can import, to be run on every process. Also a decorator, with
    or without arguments.

    ``propagate``: None (also "cached") learns the result's shapes from the first run of each kind of call, which waits.
    A function is called with stand-ins of the arguments (torch's fake tensors, on the CPU) and returns results of the
    same structure, shapes, strides and dtypes, so that no call waits; what it writes and aliases counts too. "inspect"
    is for side effects: nothing waits and the call gives None; every argument counts as written.
    A run whose result is not what was told is a RemoteException. Raises ValueError for another word.
    """
    if fn is None:
        return lambda f: remote(f, propagate=propagate)
    return fn if isinstance(fn, RemoteFunction) and propagate is None else RemoteFunction(_plain(fn), propagate)


def _plain(fn: Any) -> Any:
    return fn.fn if isinstance(fn, RemoteFunction) else fn


def call_on_shard_and_fetch(
    fn: Callable[..., Any] | str, *args: Any, shard: dict[str, int] | None = None, **kwargs: Any
) -> Future[Any]:
    """``ml.remote(fn).call_on_shard_and_fetch(...)``."""
    return remote(fn).call_on_shard_and_fetch(*args, shard=shard, **kwargs)
