"""Functions of the kernel that a gradient graph here comes to: hooks, and backward of an autograd.Function.

The user's function runs in the kernel, where its variables are (rule 13). The rank that comes to it names its
arguments, and obeys orders until the answer is there: the ops of the user's function are among them, and so may be
another backward pass. Only a question of the kernel may do this (``question``), for then the kernel waits and can
serve. Runs on: the main thread; on a GPU, autograd's thread for it, while the main thread waits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from monarch_lab.errors import InternalError, UsageError
from monarch_lab.tensors import saved
from monarch_lab.tensors.meta import describe, is_leaf
from monarch_lab.wire import engine as wire
from monarch_lab.worker import backward
from monarch_lab.worker.calls import refuse_failed

if TYPE_CHECKING:
    from monarch_lab.worker.engine import Engine

_OUT_BITS = 20  # as the kernel's: refs of question n begin at -(n << 20); its outputs have the first half of them


@dataclass(slots=True)
class Question:
    """What the kernel waits for; its calls back are counted, the same on every rank."""

    ident: int
    serial: int = 0
    refs: int = 0

    def next_ref(self) -> int:
        self.refs += 1
        return -(self.ident << _OUT_BITS) - (1 << (_OUT_BITS - 1)) - self.refs


class Ask:
    """Calls one handler of the kernel. Lives in the graph: when it goes, the handler is let go there too."""

    __slots__ = ("_callbacks", "handler")

    def __init__(self, callbacks: Callbacks, handler: int) -> None:
        self._callbacks = callbacks
        self.handler = handler

    def __call__(self, tensors: Sequence[Any], split: int) -> list[Any] | None:
        return self._callbacks.ask(self.handler, tensors, split)

    def keep(self, handle: Any) -> None:
        """What takes the hook away, when the kernel says so."""
        self._callbacks.keep(self.handler, handle)

    def number_for(self, tensor: torch.Tensor) -> int:
        """Of the handler that the kernel has for what its pack hook made of this tensor."""
        return self._callbacks.call(self.handler, [tensor], 1).handler

    def __del__(self) -> None:
        self._callbacks.let_go(self.handler)


class Callbacks:
    def __init__(self, engine: Engine, report: Callable[..., None]) -> None:
        self.serve: Callable[[int, int], wire.Resume] = _cannot_serve  # set by the worker's loop
        self._engine = engine
        self._report = report
        self._question: Question | None = None
        self._asked: set[tuple[int, int]] = set()
        self._handles: dict[int, Any] = {}
        self._released: list[int] = []

    @contextmanager
    def question(self, ident: int) -> Iterator[Question]:
        """While the kernel waits for the answer to ``ident``."""
        outer, self._question = self._question, Question(ident)
        try:
            yield self._question
        finally:
            self._question = outer

    def let_go(self, handler: int) -> None:
        self._handles.pop(handler, None)
        self._released.append(handler)

    def take_released(self) -> list[int]:
        released = self._released
        if released:
            self._released = []
        return released

    def is_asked(self, ident: int, serial: int) -> bool:
        return (ident, serial) in self._asked

    # --- hooks

    def hook(self, order: wire.Hook) -> None:
        tensor = self._engine.cells.get(order.ref)
        ask = Ask(self, order.handler)
        if isinstance(tensor, torch.Tensor):  # a failed value has no graph, and nothing will come to it
            self._handles[order.handler] = _HOOKS[order.kind](tensor, ask)

    def keep(self, handler: int, handle: Any) -> None:
        self._handles[handler] = handle

    def unhook(self, handler: int) -> None:
        handle = self._handles.pop(handler, None)
        if handle is not None:
            handle.remove()

    # --- calls

    def ask(self, handler: int, tensors: Sequence[Any], split: int) -> list[Any] | None:
        """What the kernel's function gives for these arguments (tensors or None): tensors or None, or None itself."""
        reply = self.call(handler, tensors, split)
        if reply.is_none:
            return None
        values = [self._engine.cells[r] if r else None for r in reply.refs]
        refuse_failed(*values)
        return values

    def call(self, handler: int, tensors: Sequence[Any], split: int) -> wire.Resume:
        """Let the kernel run the function, and obey it meanwhile."""
        question = self._question
        if question is None:
            raise UsageError(
                "a gradient hook, autograd.Function, checkpoint or hook for saved tensors of the notebook was reached "
                "inside a remote function, which is not waited for: call backward() in the cell itself"
            )
        engine = self._engine
        question.serial += 1
        key = question.ident, question.serial
        refs, leaves = [], []
        for t in tensors:
            refs.append(0 if t is None else question.next_ref())
            old = getattr(t, "_monarch_ref", 0) if t is not None and is_leaf(t) else 0
            leaves.append(old if engine.cells.get(old) is t else 0)
            if t is not None:
                engine.cells[refs[-1]] = t
                if t.requires_grad and is_leaf(t) and not leaves[-1]:
                    engine.arm(t, refs[-1])
        touched, outs, grads = backward.tell(engine, question.next_ref)
        metas = [None if t is None else describe(t) for t in tensors]
        grad = torch.is_grad_enabled()
        self._asked.add(key)
        hooks = saved.held()
        try:
            with engine.aside():
                self._question = None
                self._report(wire.Called(*key, handler, split, refs, leaves, metas, grad, touched, outs, grads))
                reply = self.serve(*key)
        finally:
            self._asked.discard(key)
            self._question = question
            saved.hold(hooks)
        if reply.error:
            raise RuntimeError(f"a function of the notebook failed here: {reply.error}")
        return reply


def _cannot_serve(ident: int, serial: int) -> wire.Resume:
    raise InternalError("a worker without a loop was asked to serve")


def _on_tensor(tensor: torch.Tensor, ask: Ask) -> Any:
    def hook(gradient: torch.Tensor) -> Any:
        given = ask([gradient], 1)
        return None if given is None else given[0]

    return tensor.register_hook(hook)


def _on_accumulated(tensor: torch.Tensor, ask: Ask) -> Any:
    def hook(leaf: torch.Tensor) -> None:
        ask([leaf], 1)

    return tensor.register_post_accumulate_grad_hook(hook)


def _on_node(tensor: torch.Tensor, ask: Ask) -> Any:
    def hook(inputs: Any, outputs: Any) -> Any:
        given = ask([*inputs, *outputs], len(inputs))
        return None if given is None else tuple(given)

    assert tensor.grad_fn is not None
    return tensor.grad_fn.register_hook(hook)


def _before_node(tensor: torch.Tensor, ask: Ask) -> Any:
    def hook(outputs: Any) -> Any:
        given = ask(list(outputs), len(outputs))
        return None if given is None else tuple(given)

    assert tensor.grad_fn is not None
    return tensor.grad_fn.register_prehook(hook)


_HOOKS: dict[str, Callable[[torch.Tensor, Ask], Any]] = {
    "tensor": _on_tensor,
    "accumulated": _on_accumulated,
    "node": _on_node,
    "before node": _before_node,
}

_own: Callbacks | None = None


def install(callbacks: Callbacks) -> None:
    global _own
    _own = callbacks


def asking(handler: float) -> Ask:
    """An Ask for this handler, of this process."""
    if _own is None:
        raise InternalError("a call of the kernel outside a worker")
    return Ask(_own, int(handler))
