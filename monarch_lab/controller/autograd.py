"""backward() as one op of the stream, and ``.grad``.

Which leaves a pass touches hangs on the graph, not on metadata, so it is learned for each graph of one kind: the
signature of the roots (dispatch.sign) says which graph it is, leaves by name. The workers check each prediction.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from monarch_lab.controller import dispatch, locations, return_path, tries
from monarch_lab.controller.cache import Plan
from monarch_lab.controller.forgetting import make_room
from monarch_lab.controller.messages import wrong_mesh
from monarch_lab.controller.refs import GRAPH, Ref
from monarch_lab.controller.state import ambient_number, ambient_values
from monarch_lab.controller.state import recorder as current_recorder
from monarch_lab.errors import UsageTypeError
from monarch_lab.tensors.meta import intern
from monarch_lab.transport.frames import HeldInterrupt
from monarch_lab.wire import engine as wire
from monarch_lab.wire.engine import Op

_OUT_BITS = 20


def set_grad(tensor: Any, value: Any) -> None:
    """``tensor.grad = value`` here and on the workers."""
    if (recorder := current_recorder.get()) is not None:
        recorder.touch(tensor)
    if value is not None:
        if not getattr(value, "is_mesh_tensor", False):
            raise UsageTypeError("the .grad of a mesh tensor is a mesh tensor: put the value on the mesh first")
        if value._ref.mesh is not tensor._ref.mesh:
            raise wrong_mesh(torch.autograd.backward, [tensor, value])
        if value._meta.shape != tensor._meta.shape:
            sizes = f"{tuple(value.shape)}, not {tuple(tensor.shape)}"
            raise RuntimeError(f"assigned grad has data of a different size: {sizes}")
        send(value)
    elif tensor._grad is None:
        return
    send(tensor)
    client = tensor._ref.mesh.client
    with client.lock, HeldInterrupt():
        ambient = ambient_number()
        client.use_scope(tensor._ref.mesh)
        if ambient != client.ambient:
            dispatch.start_ambient(client, ambient)
        client.where.append(locations.here(2))
        client.code.extend((Op.SET_GRAD, tensor._ref.id, value._ref.id if value is not None else 0))
        tensor._grad = value


def send(tensor: Any) -> None:
    if hasattr(tensor, "_value"):
        from monarch_lab.controller.constants import materialise

        materialise(tensor)


def set_data(tensor: Any, value: torch.Tensor) -> None:
    """``tensor.data = value``: its metadata may change with it."""
    send(tensor)
    if not getattr(value, "is_mesh_tensor", False):
        raise UsageTypeError("LOCAL_TENSOR: .data of a mesh tensor is a mesh tensor: use mesh.replicate(value)")
    dispatch.dispatch(torch.Tensor.data.__set__, (tensor, value))
    tensor._store = shared = value._store or value._ref
    shared.share(value, tensor)


def backward(
    roots: Sequence[Any], gradients: Sequence[Any], retain_graph: Any, create_graph: bool, inputs: Any
) -> None:
    """As torch.autograd.backward on each process."""
    for t in roots:
        if not t._meta.requires_grad:
            raise RuntimeError("element 0 of tensors does not require grad and does not have a grad_fn")
    wanted = [] if inputs is None else [inputs] if isinstance(inputs, torch.Tensor) else list(inputs)
    if inputs is not None and not wanted:
        raise RuntimeError("'inputs' argument to backward() cannot be empty.")
    mesh = roots[0]._ref.mesh
    mesh.check_alive()
    for t in (*roots, *gradients, *wanted):
        if t is None:
            continue
        if not getattr(t, "is_mesh_tensor", False):
            raise UsageTypeError("LOCAL_TENSOR: backward() of a mesh tensor takes mesh tensors: use mesh.replicate(g)")
        if t._ref.mesh is not mesh:
            raise wrong_mesh(torch.autograd.backward, [roots[0], t])
        send(t)
    create_graph = bool(create_graph)
    keep_graph = create_graph if retain_graph is None else bool(retain_graph)
    if dispatch.crossings and any(t._crossings for t in roots):
        return_path.backward(_pass, mesh, roots, gradients, wanted, keep_graph, create_graph)
    else:
        _pass(mesh, roots, gradients, wanted, keep_graph, create_graph, mesh.all_equal)


def _pass(
    mesh: Any,
    roots: Sequence[Any],
    gradients: Sequence[Any],
    wanted: Sequence[Any],
    keep_graph: bool,
    create_graph: bool,
    limit: int,
) -> tuple[list[return_path.Crossing], int]:
    """On one mesh. The crossings it reached; dims along which its gradients are equal, those of ``limit`` at most."""
    client = mesh.client
    ambient = ambient_number()
    crossings = return_path.crossings_of(roots) if dispatch.crossings else []
    equal = equal_gradients(roots, mesh) & limit
    had = tuple(sorted(ref for ref, leaf in client.leaves.items() if leaf._grad is not None))
    key = (
        tuple(t._sig for t in roots),
        tuple(None if g is None else g._meta for g in gradients),
        tuple(t._sig for t in wanted),
        keep_graph,
        create_graph,
        ambient,
        had,
        len(crossings),
    )
    # A pass that calls functions of the kernel is waited for, whatever its graph has told before.
    retained = len(client.retained) > 0 or bool(client.callbacks)
    plan = None if retained else client.cache.plans.get(key)
    if plan is not None and all(ref in client.leaves for ref in plan.leaves):  # none has died since
        reached = [c for c, is_reached in zip(crossings, plan.reached, strict=True) if is_reached]
        given = (plan, mesh, roots, gradients, wanted, ambient, [c.number for c in reached], equal)
        if tries.around(2):
            tries.wait(client, lambda: _replay(*given))
        else:
            _replay(*given)
        return reached, equal
    kept = None if retained else key
    numbers, equal = _learn(kept, mesh, roots, gradients, wanted, keep_graph, create_graph, ambient, crossings, equal)
    return return_path.by_number(crossings, numbers), equal


def equal_gradients(roots: Sequence[Any], mesh: Any) -> int:
    """A gradient is equal along a dim where all its graph read was."""
    mask = mesh.all_equal
    for t in roots:
        mask &= (t._store or t._ref).equal
    return folded(mask)


def folded(mask: int) -> int:
    """Equal along the dims where both the value and what its graph read are."""
    graph = mask >> GRAPH & (mask & ((1 << GRAPH) - 1))
    return graph | graph << GRAPH


def _replay(
    plan: Plan,
    mesh: Any,
    roots: Sequence[Any],
    gradients: Sequence[Any],
    wanted: Sequence[Any],
    ambient: int,
    crossings: Sequence[int],
    equal: int,
) -> None:
    client = mesh.client
    with client.lock, HeldInterrupt():
        client.use_scope(mesh)
        if client.urgent:
            client.drain_dead()
        if ambient != client.ambient:
            dispatch.start_ambient(client, ambient)
        code = [Op.BACKWARD, plan.number]
        code.extend(t._ref.id for t in roots)
        code.extend(0 if g is None else g._ref.id for g in gradients)
        code.extend(t._ref.id for t in wanted)
        outs = []
        for leaf, fresh in zip(plan.leaves, plan.fresh, strict=True):
            outs.append(next(client.refs) if fresh else 0)
            had = None if fresh else client.leaves[leaf]._grad
            code.extend((leaf, outs[-1], 0 if had is None else had._ref.id))
        code.extend(crossings)
        client.where.append(locations.here(3))
        client.code.extend(code)
        store(client, mesh, plan.leaves, outs, plan.grads, equal)
    client.flush_if_full()


def _learn(
    key: Any,
    mesh: Any,
    roots: Sequence[Any],
    gradients: Sequence[Any],
    wanted: Sequence[Any],
    keep_graph: bool,
    create_graph: bool,
    ambient: int,
    crossings: Sequence[return_path.Crossing],
    equal: int,
) -> tuple[list[int], int]:
    from monarch_lab.controller.learning import raise_learn_failure

    client = mesh.client
    client.cache.misses += 1
    make_room(client)

    def make(ident: int) -> wire.Question:
        return wire.LearnBackward(
            ident,
            client.cell,
            mesh.scope,
            ambient,
            [t._ref.id for t in roots],
            [0 if g is None else g._ref.id for g in gradients],
            [t._ref.id for t in wanted],
            keep_graph,
            create_graph,
            -(ident << _OUT_BITS),
        )

    with client.lock:
        client.define_ambient(ambient, ambient_values(ambient), mesh.stream_number)
        pending = client.request(make, mesh.ranks_key, stream=mesh.stream_number)
        pending.mesh, pending.equal = mesh, equal
    is_concluded = False
    try:
        client.wait(pending)
        if not any(isinstance(m, wire.LearnFailed) for m, _ in pending.replies.values()):
            with HeldInterrupt():  # the leaves' gradients are known, or put back
                is_concluded = True
                return _conclude(
                    key, mesh, pending, roots, gradients, wanted, keep_graph, create_graph, ambient, crossings
                )
    except KeyboardInterrupt:
        if not is_concluded:
            _put_back(client, mesh)
        raise
    except BaseException:
        if not is_concluded:
            _conclude_failed(client, mesh, pending)
        raise
    _conclude_failed(client, mesh, pending)
    raise_learn_failure(client, {r: m for r, (m, _) in pending.replies.items() if isinstance(m, wire.LearnFailed)})


def _conclude(
    key: Any,
    mesh: Any,
    pending: Any,
    roots: Sequence[Any],
    gradients: Sequence[Any],
    wanted: Sequence[Any],
    keep_graph: bool,
    create_graph: bool,
    ambient: int,
    crossings: Sequence[return_path.Crossing],
) -> tuple[list[int], int]:
    """Every rank has answered: the leaves have their gradients, and the pass is known."""
    client = mesh.client
    client.check_alive(mesh.ranks_key)
    answers = {r: m for r, (m, _) in pending.replies.items()}
    first = answers[min(answers)]
    told = (first.touched, first.outs, first.crossings)
    if any((m.touched, m.outs, m.crossings) != told for m in answers.values()):
        _take_back(client, mesh, list(answers.values()))
        texts = "; ".join(f"rank {r}: {len(m.touched)}" for r, m in sorted(answers.items()))
        raise UsageTypeError(
            f"backward() reached different leaves on the ranks ({texts}): the graph must be the same everywhere"
        )
    used = [t._ref.id if t is not None else 0 for t in (*roots, *gradients, *wanted)]
    used += [*first.touched, *(_added_to(client, *pair) for pair in zip(first.touched, first.outs, strict=True))]
    store(client, mesh, first.touched, first.outs, first.grads, pending.equal)
    if client.recorder is not None and (key is None or pending.was_called or first.crossings):
        raise client.recorder.refuse(
            "a backward() that crosses meshes, calls hooks or retains gradients", "leave it outside of the function"
        )
    if key is not None and not pending.was_called:
        reached = [c.number in first.crossings for c in crossings]
        plan = Plan(client.cache.next_plan(), first.touched, [out != 0 for out in first.outs], first.grads, reached)
        sizes = (len(roots), len(wanted), len(first.grads))
        client.cache.layouts[-plan.number] = (*sizes, len(first.crossings))
        client.cache.kinds[-plan.number] = (keep_graph, create_graph, tuple(plan.fresh), tuple(first.grads))
        if client.recorder is not None:
            client.recorder.note_learned_backward(plan.number, used, first.outs, ambient, mesh)
        counts = (len(roots), len(wanted), keep_graph, create_graph)
        with client.lock:
            client.define(wire.BackwardDef(plan.number, *counts, first.grads, len(first.crossings)))
        client.cache.keep_plan(key, plan)
    return first.crossings, pending.equal


def _conclude_failed(client: Any, mesh: Any, pending: Any) -> None:
    """As in plain torch, the leaves keep what they got before the pass failed, where it failed at one place."""
    answers = [getattr(m, "partial", m) for m, _ in pending.replies.values() if m is not None]
    parts = [m for m in answers if m is not None]
    if not parts:
        return
    first = parts[0]
    if len(parts) == len(mesh.ranks_key) and all((m.touched, m.outs) == (first.touched, first.outs) for m in parts):
        store(client, mesh, first.touched, first.outs, first.grads, pending.equal)
    else:
        _take_back(client, mesh, parts)


def _added_to(client: Any, leaf: int, out: int) -> int:
    """The ref of the gradient that a pass adds to, or 0."""
    handle = client.leaves.get(leaf)
    return 0 if out or handle is None or handle._grad is None else handle._grad._ref.id


def _put_back(client: Any, mesh: Any) -> None:
    """After a Ctrl-C while a pass was learned, run or not: the leaves get the gradients that are known here."""
    with client.lock, HeldInterrupt():
        for ref, leaf in list(client.leaves.items()):
            if leaf._ref.mesh is mesh:
                client.use_scope(mesh)
                client.where.append(locations.here(3))
                client.code.extend((Op.SET_GRAD, ref, 0 if leaf._grad is None else leaf._grad._ref.id))


def _take_back(client: Any, mesh: Any, answers: Sequence[wire.BackwardLearned]) -> None:
    """A pass that failed on some ranks leaves no gradient on the others: a new one goes, one added to is lost."""
    lost: set[int] = set()
    for answer in answers:
        for leaf, out in zip(answer.touched, answer.outs, strict=True):
            handle = client.leaves.get(leaf)
            if handle is None:
                continue
            if handle._grad is not None and not out:
                lost.add(handle._grad._ref.id)
                continue
            with client.lock:
                client.use_scope(mesh)
                client.code.extend((Op.SET_GRAD, leaf, handle._grad._ref.id if handle._grad is not None else 0))
                client.where.append(locations.here(3))
    if lost:
        failure = wire.Failure(
            "RuntimeError", "a backward pass failed on some ranks after it was added to on others", []
        )
        client.order(wire.Poison(sorted(lost), failure), mesh.ranks_key)


def store(
    client: Any, mesh: Any, leaves: Sequence[int], outs: Sequence[int], grads: Sequence[wire.TensorMeta], equal: int
) -> None:
    """A pass has given these leaves gradients: new ones under the refs ``outs``, or (0) added to those they had."""
    for leaf, out, meta in zip(leaves, outs, grads, strict=True):
        handle = client.leaves.get(leaf)
        if handle is None:
            handle = client.retained.get(leaf)
        if out:
            gradient = dispatch.make_handle(intern(meta), Ref(out, mesh, equal))
            if meta.requires_grad:
                gradient._sig = hash((leaf, "grad", out))
            if handle is not None:
                handle._grad = gradient
        elif handle is not None and handle._grad is not None:
            store = handle._grad._store or handle._grad._ref
            store.equal &= equal
            handle._grad._refresh(intern(meta))


def torch_backward(
    tensors: Any,
    grad_tensors: Any = None,
    retain_graph: Any = None,
    create_graph: bool = False,
    grad_variables: Any = None,
    inputs: Any = None,
) -> None:
    roots = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    if grad_tensors is None:
        gradients: list[Any] = [None] * len(roots)
    else:
        gradients = [grad_tensors] if isinstance(grad_tensors, torch.Tensor) else list(grad_tensors)
    backward(roots, gradients, retain_graph, create_graph, inputs)


def retain_grad(tensor: Any) -> None:
    """As torch's: a backward pass then keeps the gradient of this value too."""
    if not tensor._meta.requires_grad:
        raise RuntimeError("can't retain_grad on Tensor that has requires_grad=False")
    if tensor._meta.is_leaf or tensor._ref.id in tensor._ref.mesh.client.retained:
        return
    client = tensor._ref.mesh.client
    client.order(wire.Retain(tensor._ref.id), tensor._ref.mesh.ranks_key, stream=tensor._ref.mesh.stream_number)
    client.retained[tensor._ref.id] = tensor


def _method_backward(
    tensor: Any, gradient: Any = None, retain_graph: Any = None, create_graph: bool = False, inputs: Any = None
) -> None:
    backward([tensor], [gradient], retain_graph, create_graph, inputs)


dispatch.special[torch.Tensor.backward] = _method_backward
dispatch.special[torch.autograd.backward] = torch_backward
dispatch.special[torch.Tensor.retain_grad] = retain_grad
dispatch.graph_functions.add(torch.autograd.grad)
