"""``autograd.Function.apply`` with mesh tensors (rules 12 and 13).

forward runs here, without grad, as the ops it is made of; then its outputs get one real graph node on the workers
(worker/functions.py), which saves what was saved and asks for backward when a pass comes to it. So the bodies run where
the user's variables are, and the rules of the graph are torch's own: order, accumulation, versions, freed graphs.
Shipping a Function to the workers by value instead is ``ml.remote_autograd_function``.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.function import FunctionCtx, _is_setup_context_defined

from monarch_lab.controller import autograd
from monarch_lab.controller.calling import Named
from monarch_lab.controller.dispatch import dispatch
from monarch_lab.controller.messages import local_value, needs_remote
from monarch_lab.errors import UsageError
from monarch_lab.transport.frames import HeldInterrupt

_ATTACH = Named("monarch_lab.worker.functions.attach", shown="autograd.Function.apply")
_DELAYED_ERROR = Named("monarch_lab.worker.functions.delayed_error", shown="once_differentiable")
_GRAPH_HALF = ((1 << autograd.GRAPH) - 1) << autograd.GRAPH


def is_far(value: Any) -> bool:
    """A mesh tensor with a value on the workers (a constant has none)."""
    return getattr(value, "is_mesh_tensor", False) and not hasattr(value, "_value")


class Context(FunctionCtx):
    """The ``ctx`` of a Function whose tensors are on a mesh."""

    def __init__(self, cls: Any, args: Sequence[Any]) -> None:
        self._forward_cls = cls
        self.needs_input_grad = tuple(isinstance(a, torch.Tensor) and a.requires_grad for a in args)
        self.to_save: tuple[Any, ...] = ()
        self.dirty_tensors: tuple[Any, ...] = ()
        self.non_differentiable: tuple[Any, ...] = ()
        self.materialize_grads = True
        self.saved: tuple[Any, ...] | None = None  # set while backward runs

    @property
    def saved_tensors(self) -> tuple[Any, ...]:
        """In backward, what save_for_backward was given in forward."""
        return tuple(self.to_save) if self.saved is None else self.saved

    def name(self) -> str:
        return f"{self._forward_cls.__name__}Backward"


def apply(cls: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``cls.apply(*args, **kwargs)``: its values and gradients are eager torch's."""
    if torch._C._functorch.peek_interpreter_stack() is not None:
        raise needs_remote("an autograd.Function under a transform of torch.func", UsageError)
    if separate := _is_setup_context_defined(cls.setup_context):
        bound = inspect.signature(cls.forward).bind(*args, **kwargs)
        bound.apply_defaults()
        args, kwargs = bound.args, bound.kwargs
    elif kwargs:
        raise TypeError(f"{cls.__name__}.apply() takes no keyword arguments: its forward has a ctx")
    for a in args:
        if isinstance(a, torch.Tensor) and not getattr(a, "is_mesh_tensor", False) and a.requires_grad:
            raise local_value(cls.apply, a)
    ctx = Context(cls, args)
    with torch.no_grad():
        if separate:
            given = cls.forward(*args, **kwargs)
            cls.setup_context(ctx, args, given)
        else:
            given = cls.forward(ctx, *args)
    outputs = list(given) if isinstance(given, tuple) else [given]
    if torch.is_grad_enabled() and any(ctx.needs_input_grad):
        outputs = _attached(cls, ctx, args, outputs)
    else:
        outputs = [_unshared(ctx, args, t) for t in outputs]
    return tuple(outputs) if isinstance(given, tuple) else outputs[0]


def _unshared(ctx: Context, args: tuple[Any, ...], output: Any) -> Any:
    """Without a graph: an input that is returned unwritten is another tensor, as in torch."""
    if not is_far(output) or not _among(output, args) or _among(output, ctx.dirty_tensors):
        return output
    with torch.no_grad():
        return output.view_as(output)


def _among(tensor: Any, tensors: Sequence[Any]) -> bool:
    return any(tensor is t for t in tensors)


def _places(tensors: Sequence[Any], among: Sequence[Any], what: str) -> tuple[int, ...]:
    found = []
    for t in tensors:
        if not is_far(t):
            continue
        place = next((k for k, other in enumerate(among) if other is t), None)
        if place is None:
            raise RuntimeError(what)
        found.append(place)
    return tuple(found)


def _attached(cls: Any, ctx: Context, args: tuple[Any, ...], outputs: list[Any]) -> list[Any]:
    inputs = [a for a in args if is_far(a)]
    for t in outputs:
        if getattr(t, "is_mesh_tensor", False):
            autograd.send(t)
    far = [t for t in outputs if is_far(t)]
    dirty = _places(ctx.dirty_tensors, inputs, "mark_dirty() was given a tensor that is no input of the Function")
    # As torch does, what is no output is passed by.
    constant = tuple(k for k, t in enumerate(far) if _among(t, ctx.non_differentiable))
    saved = [t for t in ctx.to_save or () if is_far(t)]
    for t in inputs[1:] + far + saved:
        if t._ref.mesh is not inputs[0]._ref.mesh:
            from monarch_lab.controller.messages import wrong_mesh

            raise wrong_mesh(cls.apply, [inputs[0], t])
    places = [k for k, a in enumerate(args) if is_far(a)]
    node = _Node(cls, ctx, len(args), places, [is_far(t) for t in outputs])
    mesh = inputs[0]._ref.mesh
    graph = mesh.all_equal
    for t in inputs:
        graph &= (t._store or t._ref).equal
    number = mesh.client.callbacks.add(node, mesh)
    try:
        made = dispatch(
            _ATTACH,
            (
                float(number),
                cls.__name__,
                tuple(inputs),
                tuple(far),
                tuple(saved),
                dirty,
                constant,
                bool(ctx.materialize_grads),
            ),
        )
    except BaseException:
        mesh.client.callbacks.forget([number])
        raise
    with HeldInterrupt():
        for t in made:
            (t._store or t._ref).equal &= graph | ~_GRAPH_HALF
    ctx.to_save = ctx.dirty_tensors = ctx.non_differentiable = ()
    fresh = iter(made)
    return [next(fresh) if is_far(t) else t for t in outputs]


class _Node:
    """Runs backward when the workers' node asks. Kept until that node is gone; it keeps no mesh tensor alive itself."""

    def __init__(self, cls: Any, ctx: Context, arguments: int, places: list[int], are_far: list[bool]) -> None:
        self._cls = cls
        self._ctx = ctx
        self._arguments = arguments
        self._places = places  # of the workers' inputs among the arguments
        self._are_far = are_far  # of each output: the others have no gradient
        self._saved = [Saved(t) if is_far(t) else t for t in ctx.to_save or ()]

    def __call__(self, arguments: list[Any], split: int) -> list[Any]:
        known, far = iter(arguments[:split]), iter(arguments[split:])
        gradients = [next(known) if is_one else None for is_one in self._are_far]
        cls, ctx = self._cls, self._ctx
        ctx.saved = tuple(s.again(next(far)) if isinstance(s, Saved) else s for s in self._saved)
        backward = cls.backward if cls.backward is not torch.autograd.Function.backward else cls.vjp
        try:
            given = backward(ctx, *gradients)
        finally:
            ctx.saved = ()
        found = list(given) if isinstance(given, (tuple, list)) else [given]
        extra = found[self._arguments :]
        if len(found) < self._arguments or any(g is not None for g in extra):
            raise RuntimeError(
                f"function {ctx.name()} returned an incorrect number of gradients (expected {self._arguments}, "
                f"got {len(found)})"
            )
        for k, gradient in enumerate(found[: self._arguments]):
            if gradient is not None and k not in self._places and ctx.needs_input_grad[k]:
                raise RuntimeError(f"function {ctx.name()} returned a gradient for argument {k}, which is on no mesh")
        return [found[k] for k in self._places]


class Saved:
    """What is known here of a tensor that a node on the workers keeps."""

    def __init__(self, tensor: Any) -> None:
        self._equal = (tensor._store or tensor._ref).equal
        self._tensor = weakref.ref(tensor)

    def again(self, handle: Any) -> Any:
        """The handle of it that the workers gave, with that knowledge."""
        original = self._tensor()
        if handle is original:
            return handle
        if original is not None and original._meta.layout is torch.strided:
            handle._store = original._store or original._ref
            handle._store.share(original, handle)
        else:
            handle._ref.equal = self._equal
        return handle


def delayed_error(message: bytes, tensors: tuple[Any, ...]) -> Any:
    """torch's DelayedError on the workers: the tensors, which raise when they are differentiated."""
    given = dispatch(_DELAYED_ERROR, (message.decode(), tuple(tensors)))
    return given
