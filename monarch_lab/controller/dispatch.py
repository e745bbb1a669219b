"""One op from the user's call to the stream.

    key     function, ambient state, metadata of the tensors, constants; numbers are operands, not part of it
    hit     the result's metadata is known: put integers into the stream, make the handles, wait for nothing
    miss    run it on the workers and learn (learning.py)

Written for speed: this is the path of each op.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from monarch_lab.controller import locations, tries
from monarch_lab.controller.cache import Entry
from monarch_lab.controller.lending import turn_to
from monarch_lab.controller.operands import INT, SCALARS, is_scalar
from monarch_lab.controller.refs import Ref
from monarch_lab.controller.scanning import FALSE, FLOAT, FLOATS, KEYWORD, PLAIN, TRUE, scan
from monarch_lab.controller.state import ambient_number, ambient_values
from monarch_lab.tensors.meta import Meta
from monarch_lab.tensors.opaque import OpaqueRef
from monarch_lab.transport.frames import HeldInterrupt
from monarch_lab.wire.engine import Op

_wrapper = torch.Tensor._make_wrapper_subclass
_here = locations.here

# Filled by tensor.py and others, which need this module in turn.
handle_class: type = torch.Tensor
handle_classes: frozenset[type] = frozenset()  # handle_class, and the same as an nn.Parameter
all_classes: frozenset[type] = frozenset()  # these and constants
special: dict[Any, Callable[..., Any]] = {}  # function -> handler(args, kwargs): answered without an op
graph_functions: set[Any] = set()  # their result hangs on the gradient graph of their inputs
# Of graphs that go on on another mesh (crossings.py): while there is one, handles carry theirs.
crossings: set[int] = set()


def make_handle(meta: Meta, ref: Ref) -> Any:
    """A tensor object with this metadata and no data."""
    handle = _wrapper(handle_class, *meta.wrapper)
    handle._meta = meta
    handle._ref = ref
    return handle


def dispatch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Any:
    """Run ``func`` on the mesh of its first mesh tensor and return handles of its result."""
    ambient = ambient_number()
    key: list[Any] = [func, ambient]
    tensors: list[Any] = []
    numbers: list[int | float] = []
    # The walk of scanning.Walk for what is common, with the same keys; anything else goes there.
    for a in args:
        kind = type(a)
        if kind in handle_classes:
            tensors.append(a)
            key.append(a._meta)
        elif kind is float:
            numbers.append(a)
            key.append(FLOATS.get(a, FLOAT))
        elif kind is int and tensors and func in SCALARS and is_scalar(a, tensors[0]._meta):
            numbers.append(a)
            key.append(INT)
        elif kind is bool:
            key.append(TRUE if a else FALSE)
        elif kind in PLAIN:
            key.append(a)
        elif (kind is tuple or kind is list) and _flat(a, kind, key, tensors):
            pass
        else:
            return _dispatch_scanned(func, args, kwargs, ambient)
    if kwargs:
        for name, a in kwargs.items():
            key.append((KEYWORD, name))
            kind = type(a)
            if kind in handle_classes:
                tensors.append(a)
                key.append(a._meta)
            elif kind is float:
                numbers.append(a)
                key.append(FLOATS.get(a, FLOAT))
            elif kind is int and tensors and func in SCALARS and is_scalar(a, tensors[0]._meta):
                numbers.append(a)
                key.append(INT)
            elif kind is bool:
                key.append(TRUE if a else FALSE)
            elif kind in PLAIN:
                key.append(a)
            elif (kind is tuple or kind is list) and _flat(a, kind, key, tensors):
                pass
            else:
                return _dispatch_scanned(func, args, kwargs, ambient)
    if not tensors:
        return _dispatch_scanned(func, args, kwargs, ambient)
    mesh = tensors[0]._ref.mesh
    entry = mesh.client.cache.entries.get(tuple(key))
    if entry is None:
        return _dispatch_scanned(func, args, kwargs, ambient)
    if len(tensors) > 1:
        for t in tensors:
            if t._ref.mesh is not mesh:
                _wrong_mesh(func, tensors)
    if entry.single is None or entry.fails:
        return replay(entry, tensors, numbers, ambient, mesh)
    return single_result(entry, entry.single, tensors, numbers, ambient, mesh)


def _flat(a: Any, kind: type, key: list[Any], tensors: list[Any]) -> bool:
    """Adds a sequence of integers and mesh tensors to the key; False for any other."""
    key.append((kind, len(a)))
    for x in a:
        inner = type(x)
        if inner is int:
            key.append(x)
        elif inner in handle_classes:
            tensors.append(x)
            key.append(x._meta)
        else:
            return False
    return True


def _dispatch_scanned(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None, ambient: int) -> Any:
    """Any call that is not a plain hit: arguments with structure, special functions, kinds not seen before."""
    handler = special.get(func)
    if handler is not None:
        return handler(*args, **(kwargs or {}))
    call = scan(func, args, kwargs or {}, ambient)
    if call.result_is_known:
        return call.result
    for t in call.tensors:
        if t._ref.mesh is not call.mesh:
            _wrong_mesh(func, call.tensors)
    if func in graph_functions:
        if crossings:
            from monarch_lab.controller.return_path import check_stays

            check_stays("torch.autograd.grad", call.mesh, call.tensors)
        call.key += (tuple(t._sig for t in call.tensors),)
        if call.mesh.client.callbacks:  # it may come to one, and is waited for
            return _learn(call)
    entry = call.mesh.client.cache.entries.get(call.key) if call.hashable else None
    if entry is None:
        return _learn(call)
    return replay(entry, call.tensors, call.numbers, ambient, call.mesh)


def _learn(call: Any) -> Any:
    from monarch_lab.controller.learning import learn

    return learn(call)


def _wrong_mesh(func: Any, tensors: list[Any]) -> None:
    from monarch_lab.controller.messages import wrong_mesh

    raise wrong_mesh(func, tensors)


def replay(
    entry: Entry, tensors: list[Any], numbers: list[Any], ambient: int, mesh: Any, is_waited: bool = False
) -> Any:
    """Issue an op whose result is known."""
    if entry.fails and not is_waited and tries.around(2):
        return tries.wait(mesh.client, lambda: replay(entry, tensors, numbers, ambient, mesh, True))
    if entry.single is not None:
        return single_result(entry, entry.single, tensors, numbers, ambient, mesh)
    if entry.in_place >= 0:
        target = tensors[entry.in_place]
        if target._meta.is_leaf and not entry.random_single:
            equal = mesh.all_equal
            for t in tensors:
                store = t._store
                equal &= t._ref.equal if store is None else store.equal
            # Before the op: a Ctrl-C in between then leaves too little known, not too much.
            (target._store or target._ref).equal = equal
            _issue(entry, tensors, numbers, ambient, mesh)
            mesh.client.flush_if_full()
            return target
    if entry.mutated:
        for k in entry.mutated:  # raises where it is lent to be read: see lending.py
            store = tensors[k]._store or tensors[k]._ref
            store.equal = store.equal
    with HeldInterrupt():  # what the op does to its inputs is noted with it or not at all
        outs = _issue(entry, tensors, numbers, ambient, mesh)
        result = finish(entry, tensors, outs, mesh)
    mesh.client.flush_if_full()
    return result


def _issue(entry: Entry, tensors: list[Any], numbers: list[Any], ambient: int, mesh: Any) -> list[int]:
    """Put an op into the stream; the refs of its new outputs. The integers of an op enter the buffer whole."""
    client = mesh.client
    operation = [entry.number]
    for t in tensors:
        operation.append(t._ref.id)
    with client.lock:
        if mesh.ranks_key is not client.scope:
            turn_to(client, mesh)
        if client.urgent:
            client.drain_dead()
        if ambient != client.ambient:
            start_ambient(client, ambient)
        if numbers:
            place = len(client.numbers)
            client.numbers.extend(numbers)
            operation.extend(range(place, place + len(numbers)))
        outs = [next(client.refs) for _ in range(entry.news)]
        operation.extend(outs)
        location = _here(3)
        client.code += operation  # as in single_result
        client.where.append(location)
    return outs


def single_result(entry: Entry, single: Meta, tensors: list[Any], numbers: list[Any], ambient: int, mesh: Any) -> Any:
    """The common case: one new tensor, nothing written, no metadata changed. _issue is written out in it."""
    client = mesh.client
    equal = mesh.all_equal
    operation = [entry.number]
    for t in tensors:
        ref = t._ref
        operation.append(ref.id)
        equal &= (t._store or ref).equal
    with client.lock:
        if mesh.ranks_key is not client.scope:
            turn_to(client, mesh)
        if client.urgent:
            client.drain_dead()
        if ambient != client.ambient:
            start_ambient(client, ambient)
        if numbers:
            place = len(client.numbers)
            client.numbers.extend(numbers)
            operation.extend(range(place, place + len(numbers)))
        out = next(client.refs)
        operation.append(out)
        where = client.where
        location = _here(2)
        client.code += operation  # no call is between these: a Ctrl-C comes before both or after
        where.append(location)
    if client.due or len(where) >= client.flush_ops:
        client.flush_if_full()
    if entry.random_single:
        equal = _after_random(entry, equal, client, mesh)
    handle = _wrapper(handle_class, *single.wrapper)
    handle._meta = single
    handle._ref = Ref(out, mesh, equal, single.is_large)
    if entry.shares >= 0:
        source = tensors[entry.shares]
        store = handle._store = source._store or source._ref
        store.share(source, handle)
    if single.wants_sig:
        sign(handle, entry.number, 0, tensors)
    return handle


def start_ambient(client: Any, ambient: int) -> None:
    if not client.code:
        client.dirty()
    client.define_ambient(ambient, ambient_values(ambient), client.stream)
    client.code += (Op.AMBIENT, ambient)  # whole, whenever a Ctrl-C comes
    client.ambient = ambient


def _after_random(entry: Entry, equal: int, client: Any, mesh: Any) -> int:
    """What is still known equal of a result: nothing of a user's function, and along varied dims of drawn numbers."""
    if entry.opaque:
        return 0
    varied = client.varied
    if varied and client.varied_mesh is not mesh:
        return 0  # along dims of another mesh
    return equal & ~(varied | varied << 16)


def sign(handle: Any, number: int, index: int, tensors: list[Any]) -> None:
    """Give a handle that requires grad its signature: what its gradient graph is, leaves by name.

    Equal signatures mean equal graphs, so what one backward pass touched holds for the next (autograd.py)."""
    if handle._meta.is_leaf:
        handle._sig = handle._ref.id
        handle._ref.mesh.client.leaves[handle._ref.id] = handle
    else:
        handle._sig = hash((number, index, *[t._sig for t in tensors]))
        if crossings:
            carry(handle, tensors)


def carry(handle: Any, tensors: list[Any]) -> None:
    """A handle's graph goes on on other meshes where that of its inputs did."""
    found = {c.number: c for t in (handle, *tensors) for c in t._crossings}
    if found:
        handle._crossings = tuple(found[number] for number in sorted(found))


def finish(entry: Entry, tensors: list[Any], outs: list[int], mesh: Any) -> Any:
    """Handles for a result of any form, and what the call did to its inputs."""
    client = mesh.client
    equal = mesh.all_equal
    for t in tensors:
        equal &= (t._store or t._ref).equal
    if entry.random_single:
        equal = _after_random(entry, equal, client, mesh)
    sigs = tensors[:]
    before = [t._sig for t in tensors]
    handles: list[Any] = []
    fresh = iter(outs)
    for k, (meta, keep) in enumerate(zip(entry.outputs, entry.keeps, strict=True)):
        if keep >= 0:
            handles.append(tensors[keep])
            continue
        if keep <= -2:
            handles.append(handles[-2 - keep])
            continue
        handle = make_handle(meta, Ref(next(fresh), mesh, equal, meta.is_large))
        alias = entry.aliases[k]
        if alias != -1:
            source = tensors[alias] if alias >= 0 else handles[-2 - alias]
            handle._store = source._store or source._ref
            handle._store.share(source, handle)
        if meta.wants_sig:
            sign(handle, entry.number, k, sigs)
        handles.append(handle)
    for k in entry.mutated:
        _wrote(tensors[k], equal)
    stale: list[Any] = []
    for k, meta in entry.after:
        if meta.requires_grad != tensors[k]._meta.requires_grad and k in entry.mutated:
            stale += (tensors[k]._store or tensors[k]._ref).others(tensors[k])
        tensors[k]._refresh(meta)
    _resign(entry, tensors, before)
    if stale:  # a view written under autograd makes its base require grad, and its other views
        from monarch_lab.controller.learning import requery

        requery(mesh, stale)
    return build(entry.tree, handles)


def _wrote(target: Any, equal: int) -> None:
    (target._store or target._ref).equal &= equal


def _resign(entry: Entry, tensors: list[Any], before: list[int]) -> None:
    """An in-place op changes the graph of its target and of every view of it."""
    for k in {*entry.mutated, *(i for i, _ in entry.after)}:
        target = tensors[k]
        if target._meta.requires_grad and target._meta.is_leaf:
            if not target._sig:
                target._sig = target._ref.id
                target._ref.mesh.client.leaves[target._ref.id] = target
            continue
        if not (target._meta.requires_grad or target._sig):
            continue
        target._sig = hash((entry.number, k, *before)) if target._meta.requires_grad else 0
        others = (target._store or target._ref).others(target)
        for other in others:
            other._sig = hash((other._sig, target._sig))
        if crossings:
            for handle in (target, *others):
                carry(handle, tensors)


def build(tree: list, handles: list[Any], values: list[Any] | None = None) -> Any:
    """The result in the form the function gave it (see worker/learning.py, ``structure``)."""
    match tree:
        case ["t", index]:
            return handles[index]
        case ["n"]:
            return None
        case ["o", index]:
            handles[index]._sig = handles[index]._ref.id  # a graph through one object is no graph through another
            return OpaqueRef.around(handles[index])
        case ["p", index]:
            return (values or [])[index]
        case ["c", index, children]:
            return (values or [])[index](*[build(c, handles, values) for c in children])
        case ["s", "tuple", children]:
            return tuple(build(c, handles, values) for c in children)
        case ["s", "list", children]:
            return [build(c, handles, values) for c in children]
        case ["s", name, children]:
            kind = getattr(torch.return_types, name.rpartition(".")[2])
            return kind([build(c, handles, values) for c in children])
        case ["d", keys, children]:
            return {k: build(c, handles, values) for k, c in zip(keys, children, strict=True)}
    raise AssertionError(f"no such result: {tree!r}")
