"""The first time a call of one kind is seen: run it on the workers, wait, and keep what it gave.

A wrong shape, or any other error, is raised at the user's own line. Where ranks answer differently, that is the
error, by rank.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import torch
from msgspec.structs import replace
from torch.autograd import forward_ad
from torch.utils._pytree import tree_leaves

from monarch_lab.controller import failures, forgetting, lending, state
from monarch_lab.controller.autograd import folded
from monarch_lab.controller.cache import Entry
from monarch_lab.controller.constants import may_write
from monarch_lab.controller.dispatch import build, finish, graph_functions, make_handle, replay
from monarch_lab.controller.messages import differ_by_rank, needs_remote
from monarch_lab.controller.refs import Ref
from monarch_lab.controller.scanning import Call, Mark, tree_of
from monarch_lab.controller.state import ambient_values
from monarch_lab.controller.tries import can_fail
from monarch_lab.controller.waiting import Pending
from monarch_lab.errors import DetachedError, InternalError, UsageError
from monarch_lab.tensors import payload, saved
from monarch_lab.tensors.meta import Meta, intern
from monarch_lab.tensors.naming import name_of, shown
from monarch_lab.transport.frames import HeldInterrupt
from monarch_lab.wire import engine as wire

_TENSOR = Mark("TENSOR")
_FLAGS = ("dynamic", "random", "private")
_OUT_BITS = 20  # outputs of one learned call: their refs are counted down from -(ident << 20)


def template_of(call: Call) -> int:
    """The number of the call's template, defined on the workers if it is new."""
    client = call.mesh.client
    name = getattr(call.func, "remote_name", None)
    name = name(client) if name is not None else name_of(call.func)
    if name is None:
        raise UsageError(
            f"{getattr(call.func, '__name__', call.func)!r} is not a function the workers know: call it with ml.remote"
        )
    key = (name, *(_TENSOR if type(k) is Meta else k for k in call.key[2:]))
    number = client.cache.templates.get(key) if call.hashable else None
    if number is None:
        number = client.cache.next_template()
        tree, sources = payload.pack(tree_of(call))
        for _, _, more in call.packed.values():
            sources |= more
        definition = wire.TemplateDef(
            number, name, len(call.tensors), len(call.numbers), getattr(call.func, "collective", False)
        )
        with client.lock:
            if sources:
                client.define(wire.PayloadDef(-number, 0, sources))
            client.define(definition, [tree])
        if call.hashable:
            client.cache.templates[key] = number
    return number


def learn(call: Call) -> Any:
    client = call.mesh.client
    call.mesh.check_alive()
    lending.check_stream(call.func, call.mesh)
    if torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0:
        raise needs_remote("a transform of torch.func, vmap or forward-mode AD", UsageError)
    if may_write(call.func, call.kwargs):
        is_several = "foreach" in getattr(call.func, "__name__", "")
        written = call.tensors if is_several else call.tensors[:1]
        lending.refuse_write([*written, *(t for t in tree_leaves(call.kwargs.get("out")) if hasattr(t, "_ref"))])
    if saved.was_used:
        from monarch_lab.controller.saving import check

        check(call)
    forgetting.make_room(client)
    template = template_of(call)
    collective = getattr(call.func, "collective", False)
    metas = [t._meta.wire for t in call.tensors] if collective else []
    client.cache.misses += 1

    def make(ident: int) -> wire.Question:
        return wire.Learn(
            ident,
            client.cell,
            call.mesh.scope,
            call.ambient,
            template,
            [t._ref.id for t in call.tensors],
            call.numbers if client.recorder is None else client.recorder.numbers_of(call.numbers),
            -(ident << _OUT_BITS),
            metas,
        )

    with client.lock:
        client.define_ambient(call.ambient, ambient_values(call.ambient), call.mesh.stream_number)
        pending = client.request(make, call.mesh.ranks_key, stream=call.mesh.stream_number)
        pending.mesh, pending.equal = call.mesh, 0 if getattr(call.func, "opaque", False) else _folded(call)
        if not call.hashable:
            forgetting.forget_template(client, template)
    is_concluded = False
    try:
        client.wait(pending)
        answers = _answers(call, pending)
        with HeldInterrupt():  # all of what it did is to be known, or none
            is_concluded = True
            return _conclude(call, template, pending, answers)
    except (KeyboardInterrupt, DetachedError):
        if not is_concluded and len(pending.replies) == len(call.mesh.ranks_key):
            with contextlib.suppress(Exception, KeyboardInterrupt):
                answers = _answers(call, pending)
                with HeldInterrupt():
                    _conclude(call, template, pending, answers)  # it has run: what it did to its inputs is to be known
        elif not is_concluded and may_write(call.func, call.kwargs):
            _no_longer_equal(call, range(len(call.tensors)))
        raise


def _folded(call: Call) -> int:
    mask = call.mesh.all_equal
    for t in call.tensors:
        mask &= (t._store or t._ref).equal
    return folded(mask)


def _no_longer_equal(call: Call, indices: Iterable[int]) -> None:
    for k in indices:
        (call.tensors[k]._store or call.tensors[k]._ref).equal = 0


def _conclude(call: Call, template: int, pending: Pending, answers: dict[int, tuple[wire.Learned, list[Any]]]) -> Any:
    """Every rank has answered: make the handles, keep what was learned."""
    client = call.mesh.client
    first = answers[min(answers)][0]
    entry = _entry(call, template, first)
    frames = answers[min(answers)][1]
    outs = [-(first.ident << _OUT_BITS) - k for k, keep in enumerate(first.keeps) if keep == -1]
    values = [payload.unpack(f) for f in frames]
    inputs = [t._ref.id for t in call.tensors]
    handled = finish(entry, call.tensors, outs, call.mesh) if not values else _with_values(entry, call, outs, values)
    if first.grads:
        take_gradients(call.mesh, first)
    if pending.was_called:
        for t in tree_leaves(handled):
            if getattr(t, "is_mesh_tensor", False) and not any(t is given for given in call.tensors):
                (t._store or t._ref).equal &= pending.equal
    asked = first.dynamic or not call.hashable or call.key in client.cache.never
    if asked:
        client.cache.asked += 1
        client.cache.dynamic += first.dynamic
    else:
        _keep(call, entry, template, first)
    if client.recorder is not None:
        if pending.was_called:
            raise client.recorder.refuse(f"{shown(call.func)}, which calls the kernel,", "call it before or after")
        if asked:
            raise _not_recorded(client.recorder, call, hangs_on_values=first.dynamic or call.hashable)
        client.recorder.note_learned(entry.number, call, inputs, outs)
    return handled


def _not_recorded(recorder: Any, call: Call, *, hangs_on_values: bool) -> UsageError:
    what = shown(call.func)
    if hangs_on_values:
        return recorder.refuse(f"{what}, whose result hangs on the values it is given,", "call it before or after")
    return recorder.refuse(f"{what} with an argument that may change", "give it tensors, numbers, strings and tuples")


def issue_told(
    call: Call,
    entry: Entry | None,
    tell: Callable[[], tuple[wire.Learned, list[Any]]],
    values: list[Any] | None = None,
) -> Any:
    """Issue a call whose result is told by a propagator: nothing waits. ``tell`` is asked where no entry is known;
    ``values``: those of this call, where it may give others than the first of its kind."""
    call.mesh.check_alive()
    template = 0
    if entry is None:
        forgetting.make_room(call.mesh.client)
        answer, told = tell()
        template = template_of(call)
        entry = _entry(call, template, answer)
        _define(call, entry, template, answer)
        if told:
            entry.tree = ["s", "tuple", [["t", k] for k in range(len(entry.outputs))]]
            entry.told = (answer.tree, told)
        if call.hashable:
            call.mesh.client.cache.keep(call.key, entry)
    handles = replay(entry, call.tensors, call.numbers, call.ambient, call.mesh)
    if not call.hashable:
        forgetting.forget_entry(call.mesh.client, entry, template)
    if entry.told is None:
        return handles
    return build(entry.told[0], list(handles), entry.told[1] if values is None else values)


def take_gradients(mesh: Any, answer: wire.Learned) -> None:
    """A function that ran a backward pass: the leaves have a new ``.grad``, which each rank may hold another of."""
    start = -(answer.ident << _OUT_BITS) - len(answer.outputs)
    for k, (leaf, meta) in enumerate(answer.grads):
        handle = mesh.client.leaves.get(leaf)
        gradient = make_handle(intern(meta), Ref(start - k, mesh, 0))
        if handle is not None:
            handle._grad = gradient


def _with_values(entry: Entry, call: Call, outs: list[int], values: list[Any]) -> Any:
    tree, entry.tree = entry.tree, ["s", "tuple", [["t", k] for k in range(len(entry.outputs))]]
    handles = list(finish(entry, call.tensors, outs, call.mesh))
    entry.tree = tree
    return build(tree, handles, values)


def _entry(call: Call, template: int, answer: wire.Learned) -> Entry:
    opaque = getattr(call.func, "opaque", False)
    return Entry(
        number=-template,
        single=None,
        shares=-1,
        tree=answer.tree,
        outputs=[intern(m) for m in answer.outputs],
        keeps=answer.keeps,
        aliases=answer.aliases,
        after=[(k, intern(m)) for k, m in answer.after],
        mutated=answer.mutated,
        random=answer.random,
        opaque=opaque,
        private=answer.private,
        random_single=answer.random or opaque,
        news=answer.keeps.count(-1),
        fails=can_fail(call.func, call.tensors),
    )


def _keep(call: Call, entry: Entry, template: int, answer: wire.Learned) -> None:
    _define(call, entry, template, answer)
    call.mesh.client.cache.keep(call.key, entry)


def _define(call: Call, entry: Entry, template: int, answer: wire.Learned) -> None:
    client = call.mesh.client
    entry.number = client.cache.next_entry()
    client.cache.layouts[entry.number] = (len(call.tensors), len(call.numbers), entry.news)
    # The templates of graph functions are of one graph.
    what = call.func if call.func in graph_functions else template
    client.cache.kinds[entry.number] = (what, tuple(answer.outputs), tuple(answer.keeps), tuple(answer.mutated))
    if answer.tree == ["t", 0] and answer.keeps == [-1] and not answer.after and not answer.mutated:
        entry.single = entry.outputs[0]
        entry.shares = answer.aliases[0]
        entry.plain = entry.shares < 0 and not entry.random_single and not entry.fails
    if answer.tree == ["t", 0] and not answer.after and answer.mutated == answer.keeps and answer.keeps[0] >= 0:
        entry.in_place = answer.keeps[0]
    collective = getattr(call.func, "collective", False)
    inputs = [t._meta.wire for t in call.tensors] if collective else []
    with client.lock:
        client.define(
            wire.EntryDef(
                entry.number,
                template,
                answer.tree,
                answer.outputs,
                answer.keeps,
                list(answer.after),
                inputs,
                answer.mutated,
                answer.private,
            )
        )


def _answers(call: Call, pending: Pending) -> dict[int, tuple[wire.Learned, list[Any]]]:
    """Every rank's answer, all equal; the outputs of the ranks that have some are let go where they are not."""
    client = call.mesh.client
    good = {r: (m, f) for r, (m, f) in pending.replies.items() if isinstance(m, wire.Learned)}
    bad = {r: m for r, (m, _) in pending.replies.items() if isinstance(m, wire.LearnFailed)}
    if not bad and len(good) == len(call.mesh.ranks_key):
        # Whether one rank drew a number or met a value is no difference in the result: it counts for all.
        dynamic, random, private = (any(getattr(m, n) for m, _ in good.values()) for n in _FLAGS)
        good = {r: (replace(m, dynamic=dynamic, random=random, private=private), f) for r, (m, f) in good.items()}
        first, frames = good[min(good)]
        if all(m == first and list(map(bytes, f)) == list(map(bytes, frames)) for m, f in good.values()):
            return good
    for failed in bad.values():
        _no_longer_equal(call, failed.written)
    for message, _ in good.values():
        if bad:
            _no_longer_equal(call, message.mutated)
        client.dead.extend(-(message.ident << _OUT_BITS) - k for k, keep in enumerate(message.keeps) if keep == -1)
    if bad:
        raise_learn_failure(client, bad)
    client.check_alive(call.mesh.ranks_key)
    raise differ_by_rank(call.func, {r: _text(m, f) for r, (m, f) in good.items()})


def raise_learn_failure(client: Any, bad: dict[int, Any]) -> NoReturn:
    client.blame_death(m.failure for m in bad.values())
    own = {r: m.failure for r, m in sorted(bad.items()) if not m.dependent}
    if any(f.interrupted for f in own.values()):
        raise KeyboardInterrupt
    if not own:
        raise_cause(client, {r: m.failure for r, m in sorted(bad.items())})
    raise failures.build(own, None, None)


def raise_cause(client: Any, by_rank: dict[int, Any]) -> NoReturn:
    """An input had failed before: raise what failed first, with its own line where that has not been raised yet."""
    client.settle(client.ties.of(by_rank))
    client.raise_failure(by_rank[min(by_rank)])
    raise failures.build(by_rank, None, None)


def _text(answer: wire.Learned, frames: list[Any]) -> str:
    if frames:
        return ", ".join(repr(payload.unpack(f)) for f in frames)[:200]
    return ", ".join(f"{tuple(m.shape)} {m.dtype}" for m in answer.outputs) or "nothing"


def about(mesh: Any, what: str, asked: Any) -> Any:
    """What a function of worker/show.py says of handles: their metadata, which is no value and may always be asked."""
    from monarch_lab.controller.calling import call_on

    token, coalesced = state.recorder.set(None), state.coalescing.set(False)
    try:
        return call_on(mesh, mesh.ranks_key[0], f"monarch_lab.worker.show.{what}", (asked,))
    finally:
        state.recorder.reset(token)
        state.coalescing.reset(coalesced)


def requery(mesh: Any, handles: list[Any]) -> None:
    """Ask the workers for the metadata of handles that an in-place op changed behind their back."""
    metas = about(mesh, "metadata", handles)
    if len(metas) != len(handles):
        raise InternalError("metadata of views came back incomplete")
    recorder = mesh.client.recorder
    for handle, meta in zip(handles, metas, strict=True):
        if recorder is not None and intern(meta) is not handle._meta and handle._ref.id in recorder.before:
            raise recorder.refuse("making a tensor from outside require grad", "do it before the call")
        handle._refresh(intern(meta))
