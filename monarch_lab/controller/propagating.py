"""Results of a remote function told before it runs: ``propagate=`` says their shapes, so nothing waits for the workers.

A propagator is called with fake tensors (torch's own: metadata and no data); what it returns, aliases and writes is
taken for what the function does. The workers check each run against it, as they check what was learned.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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


class Fakes:
    """Torch's fake tensors, of one mode: those of two do not mix. No mesh is active where they are used."""

    def __init__(self) -> None:
        from torch._subclasses.fake_tensor import FakeTensorMode

        self._mode = FakeTensorMode(allow_non_fake_inputs=True)

    def call(self, fn: Callable[[], Any]) -> Any:
        token = active_mesh.set(None)
        try:
            with self._mode:
                return fn()
        finally:
            active_mesh.reset(token)

    def describe(self, fn: Callable[[], Any], mesh: Any, inputs: Sequence[Any] = ()) -> tuple[Learned, list[Any]]:
        """What ``fn`` gives and does to ``inputs``, as the workers would say it, and its Python values."""
        return self.call(lambda: _described(fn, mesh, list(inputs)))


def _faked(call: Call, propagate: Callable[..., Any]) -> tuple[Learned, list[Any]]:
    fakes = Fakes()
    inputs = fakes.call(lambda: [_fake(t._meta) for t in call.tensors])
    places = {id(t): fake for t, fake in zip(call.tensors, inputs, strict=True)}

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

    args, kwargs = fakes.call(lambda: tree_map(stand_in, (call.args, call.kwargs)))
    return fakes.describe(lambda: propagate(*args, **kwargs), call.mesh, inputs)


def _described(fn: Callable[[], Any], mesh: Any, inputs: list[Any]) -> tuple[Learned, list[Any]]:
    versions = [t._version for t in inputs]
    before = [describe(t) for t in inputs]
    tensors: list[torch.Tensor] = []
    values: list[Any] = []
    tree = structure(fn(), tensors, values)
    if any(getattr(t, "is_mesh_tensor", False) for t in tensors):
        raise UsageTypeError(
            "a propagator returned a mesh tensor: it is given stand-ins of the arguments and returns tensors made from "
            "them, such as torch.empty_like(x)"
        )
    device = mesh.torch_device or "cpu"
    answer = Learned(
        ident=0,
        tree=tree,
        outputs=[replace(describe(t), device=device) for t in tensors],
        keeps=[_place_of(t, inputs, tensors[:k], lambda a, b: a is b) for k, t in enumerate(tensors)],
        aliases=[_place_of(t, inputs, tensors[:k], _share) for k, t in enumerate(tensors)],
        after=[(k, replace(m, device=device)) for k, t in enumerate(inputs) if (m := describe(t)) != before[k]],
        mutated=[k for k, t in enumerate(inputs) if t._version != versions[k]],
        dynamic=False,
        random=True,
    )
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


def _place_of(tensor: Any, inputs: list[Any], earlier: list[Any], same: Callable[[Any, Any], bool]) -> int:
    for k, t in enumerate(inputs):
        if same(t, tensor):
            return k
    return next((-2 - k for k, t in enumerate(earlier) if same(t, tensor)), -1)


def _share(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.untyped_storage()._cdata == b.untyped_storage()._cdata
