"""Gradient hooks of mesh tensors and of their graph nodes. They run in the kernel, on mesh tensors (rule 13)."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
import torch.autograd.graph

from monarch_lab.controller.callbacks import Handler
from monarch_lab.controller.calling import Named
from monarch_lab.controller.dispatch import dispatch
from monarch_lab.controller.messages import local_value, needs_remote, wrong_mesh
from monarch_lab.wire import engine as wire

_MANY = Named("monarch_lab.worker.many_hooks.register", shown="register_multi_grad_hook")


class Handle:
    """As torch's RemovableHandle: ``remove()``, or the end of a ``with``, takes the hook away."""

    def __init__(self, tensors: Sequence[Any], number: int) -> None:
        self._mesh = tensors[0]._ref.mesh
        self._tensors = [weakref.ref(t) for t in tensors]
        self.id = number

    def remove(self) -> None:
        for known in self._tensors:
            tensor = known()
            if tensor is not None and tensor._hooks:
                tensor._hooks.pop(self.id, None)
        client = self._mesh.client
        client.order(wire.Unhook(self.id), self._mesh.ranks_key)
        client.callbacks.forget([self.id])

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, *exc: Any) -> None:
        self.remove()


def _add(tensor: Any, kind: str, handler: Handler) -> Handle:
    """The hook of a leaf lives as long as its handle here. Hooks often refer to the model that they are on, and as the
    workers' side lives as long as the handle too, keeping the hook would keep the model for ever."""
    client = tensor._ref.mesh.client
    tensor._ref.mesh.check_alive()
    number = _kept([tensor], handler, kind == "tensor")
    client.order(wire.Hook(tensor._ref.id, number, kind), tensor._ref.mesh.ranks_key)
    return Handle([tensor], number)


def _kept(tensors: Sequence[Any], handler: Handler, on_tensor: bool) -> int:
    mesh = tensors[0]._ref.mesh
    leaves = [t for t in tensors if t._meta.is_leaf]
    number: int = mesh.client.callbacks.add(handler, mesh, is_kept=not leaves, on_tensor=on_tensor)
    for leaf in leaves:
        if leaf._hooks is None:
            leaf._hooks = {}
        leaf._hooks[number] = handler
    return number


def register_multi_grad_hook(tensors: Sequence[Any], fn: Callable[[Any], None], *, mode: str = "all") -> Handle:
    """As torch.autograd.graph's, for tensors of one mesh. ``fn`` runs in this process: with the list of gradients, None
    for those that the pass does not compute, or (mode "any") with the first of them. RuntimeError where one does not
    require grad (mode "all"), ValueError for another mode."""
    if mode not in ("all", "any"):
        raise ValueError(f'mode is "all" or "any", not {mode!r}')
    for t in tensors:
        if not getattr(t, "is_mesh_tensor", False):
            raise local_value(register_multi_grad_hook, t)
        if t._ref.mesh is not tensors[0]._ref.mesh:
            raise wrong_mesh(register_multi_grad_hook, [tensors[0], t])
        if not t._meta.requires_grad and mode == "all":
            raise RuntimeError("cannot register a hook on a tensor that doesn't require gradient")
    tensors = [t for t in tensors if t._meta.requires_grad]
    if not tensors:
        raise RuntimeError("register_multi_grad_hook was given no tensor that requires grad")

    def handler(arguments: list[Any], split: int) -> None:
        fn(arguments if mode == "all" else arguments[0])

    tensors[0]._ref.mesh.check_alive()
    number = _kept(tensors, handler, True)
    dispatch(_MANY, (float(number), tuple(tensors), mode))
    return Handle(tensors, number)


def install() -> None:
    original = torch.autograd.graph.register_multi_grad_hook

    @functools.wraps(original)
    def register(tensors: Any, fn: Any, *, mode: Any = "all") -> Any:
        tensors = list(tensors)
        if any(getattr(t, "is_mesh_tensor", False) for t in tensors):
            return register_multi_grad_hook(tensors, fn, mode=mode)
        return original(tensors, fn, mode=mode)

    torch.autograd.graph.register_multi_grad_hook = register


def register_hook(tensor: Any, hook: Callable[[Any], Any]) -> Handle:
    """As torch's. ``hook(grad)`` runs in this process each time a pass has the gradient of this value; a mesh tensor
    that it returns takes its place. RuntimeError where the value does not require grad."""
    if not tensor._meta.requires_grad:
        raise RuntimeError("cannot register a hook on a tensor that doesn't require gradient")

    def handler(arguments: list[Any], split: int) -> list[Any] | None:
        given = hook(arguments[0])
        return None if given is None else [given]

    return _add(tensor, "tensor", handler)


def register_post_accumulate_grad_hook(tensor: Any, hook: Callable[[Any], None]) -> Handle:
    """As torch's. ``hook(leaf)`` runs in this process each time a pass has added to ``leaf.grad``. RuntimeError for a
    value that is no leaf or does not require grad."""
    if not tensor._meta.requires_grad:
        raise RuntimeError("cannot register a hook on a tensor that doesn't require gradient")
    if not tensor._meta.is_leaf:
        raise RuntimeError("post accumulate grad hooks cannot be registered on non-leaf tensors")

    def handler(arguments: list[Any], split: int) -> None:
        hook(arguments[0])

    return _add(tensor, "accumulated", handler)


class RemoteGradFn:
    """Stands for the graph node of a value, which lives on the workers: its name, and hooks."""

    def __init__(self, tensor: Any) -> None:
        self._tensor = tensor

    def name(self) -> str:
        """The node's class name, asked from the first process."""
        from monarch_lab.controller.calling import call_on

        mesh = self._tensor._ref.mesh
        return call_on(mesh, mesh.ranks_key[0], "monarch_lab.worker.show.grad_fn_name", (self._tensor,))

    def __repr__(self) -> str:
        return f"<{self.name()} on the workers>"

    @property
    def next_functions(self) -> NoReturn:
        """Refused: the nodes behind this one are on the workers."""
        raise needs_remote("grad_fn.next_functions")

    def register_hook(self, hook: Callable[[Any, Any], Any]) -> Handle:
        """As torch's Node: ``hook(grad_inputs, grad_outputs)`` after the node ran; a tuple that it returns takes the
        place of grad_inputs."""

        def handler(arguments: list[Any], split: int) -> Any:
            return _as_many(hook(tuple(arguments[:split]), tuple(arguments[split:])))

        return _add(self._tensor, "node", handler)

    def register_prehook(self, hook: Callable[[Any], Any]) -> Handle:
        """As torch's Node: ``hook(grad_outputs)`` before the node runs; a tuple it returns takes their place."""

        def handler(arguments: list[Any], split: int) -> Any:
            return _as_many(hook(tuple(arguments)))

        return _add(self._tensor, "before node", handler)


def _as_many(given: Any) -> Any:
    return given if given is None or isinstance(given, (tuple, list)) else (given,)


def grad_fn(tensor: Any) -> RemoteGradFn | None:
    return RemoteGradFn(tensor) if tensor._meta.requires_grad and not tensor._meta.is_leaf else None
