"""One call of the workers to a function of the kernel: its arguments as mesh tensors, what is around it, its result.

Apart from callbacks.py because it needs torch: the client does not.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from monarch_lab.controller import autograd, dispatch
from monarch_lab.controller.autograd import folded
from monarch_lab.controller.messages import wrong_mesh
from monarch_lab.controller.mode import MeshMode
from monarch_lab.controller.refs import Ref
from monarch_lab.controller.state import standing_on
from monarch_lab.controller.waiting import Pending
from monarch_lab.errors import UsageTypeError
from monarch_lab.tensors.meta import intern
from monarch_lab.wire import engine as wire


def arguments(client: Any, call: wire.Called, pending: Pending) -> list[Any]:
    """Handles for what the graph gives the function, after what it did to the leaves so far."""
    mesh = pending.mesh
    autograd.store(client, mesh, call.touched, call.outs, call.grads, pending.equal)
    found: list[Any] = []
    for ref, leaf, meta in zip(call.refs, call.leaves, call.metas, strict=True):
        if meta is None:
            found.append(None)
            continue
        handle = client.leaves.get(leaf) if leaf else None
        if handle is not None:
            client.dead.append(ref)  # it has a name already
        else:
            handle = dispatch.make_handle(intern(meta), Ref(ref, mesh, pending.equal))
            if meta.requires_grad:
                handle._sig = hash((ref, "called"))
                if meta.is_leaf:
                    handle._sig = ref
                    client.leaves[ref] = handle
        found.append(handle)
    return found


@contextmanager
def surroundings(grad: bool) -> Iterator[None]:
    """As where backward() was called, in the grad mode of the pass and on its stream, the default one. torch takes a
    mode off its stack while it handles a function, and one waits here: factories would make local tensors."""
    with MeshMode(), torch.set_grad_enabled(grad), standing_on(None):
        yield


def checked(given: list[Any], pending: Pending) -> list[Any]:
    """The result, with its part in what is known equal. Raises UsageTypeError for what is no tensor of the mesh."""
    for t in given:
        if t is None:
            continue
        if not getattr(t, "is_mesh_tensor", False):
            raise UsageTypeError(
                f"LOCAL_TENSOR: a gradient hook or backward() gave a {type(t).__name__} where a mesh tensor or None is "
                "expected: use mesh.replicate(x)"
            )
        autograd.send(t)
        if t._ref.mesh is not pending.mesh:
            raise wrong_mesh(torch.autograd.backward, [t, pending])
        pending.equal &= folded((t._store or t._ref).equal)
    return given
