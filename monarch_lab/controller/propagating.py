"""Results of a remote function told before it runs: ``propagate=`` says their shapes, so nothing waits for the workers.

A propagator is called with fake tensors (torch's own: metadata and no data); what it returns, aliases and writes is
taken for what the function does. The workers check each run against it, as they check what was learned.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from msgspec.structs import replace
from torch.utils._pytree import tree_map

from monarch_lab.controller.scanning import Call
from monarch_lab.controller.state import active_mesh
from monarch_lab.errors import UsageTypeError
from monarch_lab.tensors import payload
from monarch_lab.tensors.meta import Meta, describe
from monarch_lab.tensors.opaque import OpaqueRef
from monarch_lab.tensors.structure import structure
from monarch_lab.wire.engine import Learned, TensorMeta

INSPECT = "inspect"


def told(call: Call, propagate: Callable[..., Any] | str) -> tuple[Learned, list[Any]]:
    """(the answer that the workers would give to the call, Python values of the result)."""
    if propagate == INSPECT:
        return _nothing(call), [None]
    assert callable(propagate)
    return _faked(call, propagate)


def _nothing(call: Call) -> Learned:
    """For side effects alone: whatever the function returns stays there, and any argument may have been written."""
    metas = [(k, t._meta.wire) for k, t in enumerate(call.tensors)]
    return Learned(0, ["p", 0], [], [], [], metas, list(range(len(metas))), dynamic=False, random=True)


def _faked(call: Call, propagate: Callable[..., Any]) -> tuple[Learned, list[Any]]:
    from torch._subclasses.fake_tensor import FakeTensorMode

    token = active_mesh.set(None)
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            fakes = [_fake(t._meta) for t in call.tensors]
            places = {id(t): fake for t, fake in zip(call.tensors, fakes, strict=True)}

            def stand_in(a: Any) -> Any:
                if id(a) in places:
                    return places[id(a)]
                if isinstance(a, torch.Tensor):  # a constant
                    return torch.empty((), dtype=a.dtype)
                if isinstance(a, OpaqueRef):
                    return OpaqueRef.around(places[id(a.key)])
                if id(a) in call.packed:
                    frames, tensors, _ = call.packed[id(a)]
                    return payload.loads_around(frames, [places[id(t)] for t in tensors])
                return a

            args, kwargs = tree_map(stand_in, (call.args, call.kwargs))
            versions = [t._version for t in fakes]
            before = [describe(t) for t in fakes]
            result = propagate(*args, **kwargs)
            tensors: list[torch.Tensor] = []
            values: list[Any] = []
            tree = structure(result, tensors, values)
            _check_fake(propagate, tensors)
            keeps = [_place_of(t, fakes, tensors[:k], lambda a, b: a is b) for k, t in enumerate(tensors)]
            aliases = [_place_of(t, fakes, tensors[:k], _share) for k, t in enumerate(tensors)]
            device = call.mesh.torch_device or "cpu"
            answer = Learned(
                ident=0,
                tree=tree,
                outputs=[replace(describe(t), device=device) for t in tensors],
                keeps=keeps,
                aliases=aliases,
                after=[(k, replace(m, device=device)) for k, t in enumerate(fakes) if (m := describe(t)) != before[k]],
                mutated=[k for k, t in enumerate(fakes) if t._version != versions[k]],
                dynamic=False,
                random=True,
            )
    finally:
        active_mesh.reset(token)
    return answer, values


def _fake(meta: Meta) -> torch.Tensor:
    """On the CPU whatever the mesh has: the kernel may be without a GPU."""
    wire: TensorMeta = meta.wire
    if wire.layout != "strided":
        raise UsageTypeError(f"propagate= takes dense tensors; one of the arguments is {wire.layout}: leave it out")
    fake = torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device="cpu")
    if meta.requires_grad:
        fake.requires_grad_()
        if not meta.is_leaf:
            fake = torch.ops.aten.alias(fake)
    return fake


def _check_fake(propagate: Callable[..., Any], tensors: list[torch.Tensor]) -> None:
    for t in tensors:
        if getattr(t, "is_mesh_tensor", False):
            name = getattr(propagate, "__name__", repr(propagate))
            raise UsageTypeError(
                f"the propagator {name} returned a mesh tensor: it is called with stand-ins for its arguments and "
                "returns tensors made from them, such as torch.empty_like(x)"
            )


def _place_of(tensor: Any, inputs: list[Any], earlier: list[Any], same: Callable[[Any, Any], bool]) -> int:
    for k, t in enumerate(inputs):
        if same(t, tensor):
            return k
    return next((-2 - k for k, t in enumerate(earlier) if same(t, tensor)), -1)


def _share(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.untyped_storage()._cdata == b.untyped_storage()._cdata
