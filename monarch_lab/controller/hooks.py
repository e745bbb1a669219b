"""Gradient hooks of mesh tensors and of their graph nodes. They run in the kernel, on mesh tensors (rule 13)."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NoReturn

from monarch_lab.controller.callbacks import Handler
from monarch_lab.controller.messages import needs_remote
from monarch_lab.wire import engine as wire


class Handle:
    """As torch's RemovableHandle: ``remove()``, or the end of a ``with``, takes the hook away."""

    def __init__(self, tensor: Any, number: int) -> None:
        self._mesh = tensor._ref.mesh
        self._tensor = weakref.ref(tensor)
        self.id = number

    def remove(self) -> None:
        tensor = self._tensor()
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
    is_leaf = tensor._meta.is_leaf
    number = client.callbacks.add(handler, tensor._ref.mesh, is_kept=not is_leaf, on_tensor=kind == "tensor")
    if is_leaf:
        if tensor._hooks is None:
            tensor._hooks = {}
        tensor._hooks[number] = handler
    client.order(wire.Hook(tensor._ref.id, number, kind), tensor._ref.mesh.ranks_key)
    return Handle(tensor, number)


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
        raise needs_remote("grad_fn.next_functions (and torch.autograd.graph.register_multi_grad_hook)")

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
