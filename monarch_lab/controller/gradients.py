"""Gradients asked for in other ways than backward(): one by one, by a closure, by a Function on the workers."""

from __future__ import annotations

import functools
import itertools
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.autograd.function import Function
from torch.utils._pytree import tree_flatten, tree_unflatten

from monarch_lab.controller import autograd
from monarch_lab.controller.calling import Named
from monarch_lab.controller.dispatch import dispatch
from monarch_lab.controller.learning import learn
from monarch_lab.controller.remote_functions import RemoteFunction
from monarch_lab.controller.return_path import check_stays
from monarch_lab.controller.scanning import scan
from monarch_lab.controller.state import ambient_number, standing_on
from monarch_lab.errors import UsageError, UsageTypeError, UsageValueError
from monarch_lab.tensors.gradient_walk import GradientWalk, execution_order

_BEGIN = Named("monarch_lab.worker.gradient_walks.begin", shown="ml.grad_generator")
_GRADIENT = Named("monarch_lab.worker.gradient_walks.gradient", shown="ml.grad_generator")
_ORDER = Named("monarch_lab.worker.gradient_walks.order", shown="ml.gradient_execution_order")
_END = Named("monarch_lab.worker.gradient_walks.end", shown="ml.grad_generator")
_numbers = itertools.count(2)  # 0.0 and 1.0 are kinds of their own among number operands


def grad_generator(roots: Any, wrt: Any, grad_roots: Any = ()) -> Iterator[torch.Tensor | None]:
    """The gradients of ``roots`` with respect to ``wrt``, one by one in that order; None where no root hangs on it.

    Each runs only the part of the graph that it needs and none before it has run, and frees what that had saved.
    ``grad_roots``: the gradients of the roots, as many or fewer; a missing one, or None, is 1 for a root of one
    element. Tensors or sequences of them, all of one mesh or all local; shapes and dtypes are those of ``wrt``. Does
    not run gradient hooks: UsageError where a mesh has a hook on a tensor. RuntimeError for a root that requires no
    grad or that has more than one element and no gradient. The mesh need not be active when the gradients are asked
    for.
    """
    roots, wrt, grads = _several(roots), _several(wrt), _several(grad_roots)
    if len(grads) > len(roots):
        raise ValueError(f"grad_generator was given {len(grads)} gradients for {len(roots)} roots")
    grads += [None] * (len(roots) - len(grads))
    if any(getattr(t, "is_mesh_tensor", False) for t in roots + wrt):
        return _far(roots, grads, wrt)
    walk = GradientWalk(roots, grads, wrt)
    return (walk.gradient(k) for k in range(len(wrt)))


def gradient_execution_order(roots: Any, wrt: Any) -> list[int]:
    """Indices of ``wrt`` in the order in which a backward pass from ``roots`` has their gradients ready: asked for in
    this order, no gradient of a ``grad_generator`` needs more of the graph to be run than the pass had run by then.

    The order is that of torch's engine: of the nodes that are ready, the one made last comes first. A tensor that no
    root hangs on comes last. Tensors or sequences of them, all of one mesh or all local; the answer is waited for.
    Raises RuntimeError for a root that requires no grad, TypeError for a graph that leaves the mesh and comes back.
    """
    roots, wrt = _several(roots), _several(wrt)
    if not any(getattr(t, "is_mesh_tensor", False) for t in roots + wrt):
        return execution_order(roots, wrt)
    mesh = _check_far("gradient_execution_order", roots, wrt)
    with standing_on(mesh.stream):
        given: list[int] = dispatch(_ORDER, (roots, wrt))
    return given


class GradGenerator:
    """``grad_generator`` for gradients that are collected on the way: name roots and what to take gradients of while a
    forward pass is made, then iterate.

    Iteration gives one tree for each ``grad`` call, the last one first, as a backward pass comes to them: each the
    tree that was registered, with gradients (or None) in the place of its tensors and None in that of other values.
    It may be done once, as the graph is freed on the way.
    """

    def __init__(self) -> None:
        self._roots: list[Any] = []
        self._gradients: list[Any] = []
        self._trees: list[tuple[list[Any], Any]] = []

    def root(self, tensor: Any, grad: Any = None) -> None:
        """The gradients are those of ``tensor``, added to those of other roots. ``grad`` is its own, of its shape; None
        is 1, for a tensor of one element."""
        self._roots.append(tensor)
        self._gradients.append(grad)

    def grad(self, tree: Any) -> None:
        """Gradients with respect to the tensors of this pytree are wanted."""
        self._trees.append(tree_flatten(tree))

    def __iter__(self) -> Iterator[Any]:
        """Raises as grad_generator does, ValueError where no root was given."""
        if not self._roots:
            raise UsageValueError("a GradGenerator was given no root: call .root(loss) before iterating")
        trees = self._trees[::-1]
        wrt = [x for leaves, _ in trees for x in leaves if isinstance(x, torch.Tensor)]
        found = grad_generator(self._roots, wrt, self._gradients)
        for leaves, spec in trees:
            yield tree_unflatten([next(found) if isinstance(x, torch.Tensor) else None for x in leaves], spec)


def _several(tensors: Any) -> list[Any]:
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def _far(roots: list[Any], grads: list[Any], wrt: list[Any]) -> Iterator[torch.Tensor | None]:
    mesh = _check_far("grad_generator", roots, [*wrt, *[g for g in grads if g is not None]])
    if mesh.client.callbacks.has_tensor_hooks:
        raise UsageError(
            "ml.grad_generator does not run gradient hooks, and a tensor of this mesh has one: remove it, or use "
            "torch.autograd.grad"
        )
    equal = autograd.equal_gradients([*roots, *[g for g in grads if g is not None]], mesh)
    number = float(next(_numbers))
    with standing_on(mesh.stream):
        dispatch(_BEGIN, (number, roots, grads, wrt))
    return _each(mesh, number, len(wrt), equal)


def _check_far(name: str, roots: list[Any], others: list[Any]) -> Any:
    """The mesh of a walk's tensors, which are there from now on."""
    for t in (*roots, *others):
        if not getattr(t, "is_mesh_tensor", False):
            raise UsageTypeError(f"LOCAL_TENSOR: {name} takes tensors of one mesh, or local ones alone")
        autograd.send(t)
    check_stays(f"ml.{name}", roots[0]._ref.mesh, roots)
    return roots[0]._ref.mesh


def _each(mesh: Any, number: float, count: int, equal: int) -> Iterator[torch.Tensor | None]:
    try:
        for k in range(count):
            yield _asked(mesh, (_GRADIENT, number, k), equal)
    finally:
        if mesh.client.state == "live":
            _asked(mesh, (_END, number), equal)


def _asked(mesh: Any, call: tuple[Any, ...], equal: int) -> Any:
    """A call without tensors on the walk's mesh, whichever is active; waited for."""
    function, *args = call
    with mesh.activate(), standing_on(mesh.stream):
        given = learn(scan(function, tuple(args), {}, ambient_number()))
    if given is None or given[0] is None:
        return None
    (given[0]._store or given[0]._ref).equal &= equal
    return given[0]


def grad_function(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A function with a gradient of its own, written as a closure. Also a decorator.

    ``fn(*args)`` returns (output, backward); output a tensor or a tuple of them, backward takes the gradient of each
    and returns one for each argument, or for each argument that is a tensor, None where there is none. Tensors that
    backward refers to, also in lists, tuples and dicts, are saved as by ``ctx.save_for_backward``. Both run in this
    process, on mesh tensors or local ones. TypeError where fn does not return such a pair, RuntimeError for a wrong
    number of gradients.
    """

    @functools.wraps(fn)
    def run(*args: Any) -> Any:
        return made.apply(*args)

    class made(Function):  # noqa: N801  named after fn
        @staticmethod
        def forward(ctx: Any, *args: Any) -> Any:
            pair = fn(*args)
            if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[1], types.FunctionType)):
                raise UsageTypeError(f"grad_function: {fn.__name__} must return (output, backward function)")
            output, ctx.backward_of = pair
            values = [c.cell_contents for c in ctx.backward_of.__closure__ or ()]
            leaves, ctx.tree = tree_flatten(values)
            ctx.save_for_backward(*[x for x in leaves if isinstance(x, torch.Tensor)])
            ctx.others = [None if isinstance(x, torch.Tensor) else (x,) for x in leaves]
            ctx.backward_of = _emptied(ctx.backward_of)
            ctx.is_tensor = [isinstance(a, torch.Tensor) for a in args]
            return tuple(output) if isinstance(output, list) else output

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            saved = iter(ctx.saved_tensors)
            values = tree_unflatten([next(saved) if x is None else x[0] for x in ctx.others], ctx.tree)
            given = _filled(ctx.backward_of, values)(*grads)
            found = list(given) if isinstance(given, (tuple, list)) else [given]
            if len(found) == sum(ctx.is_tensor) != len(ctx.is_tensor):
                rest = iter(found)
                found = [next(rest) if is_tensor else None for is_tensor in ctx.is_tensor]
            return tuple(found)

    made.__name__ = made.__qualname__ = getattr(fn, "__name__", "grad_function")
    return run


def _emptied(function: types.FunctionType) -> types.FunctionType:
    return _filled(function, [None] * len(function.__closure__ or ()))


def _filled(function: types.FunctionType, values: Sequence[Any]) -> types.FunctionType:
    """The function with other values of its closure."""
    cells = tuple(types.CellType(v) for v in values)
    made = types.FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__, cells)
    made.__kwdefaults__ = function.__kwdefaults__
    return made


class RemoteAutogradFunction:
    """What ``ml.remote_autograd_function`` gives: ``apply`` runs forward and backward on the workers."""

    def __init__(self, cls: Any) -> None:
        def apply(*args: Any) -> Any:
            return cls.apply(*args)

        apply.__name__ = apply.__qualname__ = f"{cls.__name__}.apply"
        self.__name__ = cls.__name__
        self.__doc__ = cls.__doc__
        self.apply = RemoteFunction(apply)

    def __repr__(self) -> str:
        return f"<remote autograd.Function {self.__name__}>"


def remote_autograd_function(cls: Any) -> RemoteAutogradFunction:
    """The autograd.Function ``cls``, to be run on the workers: it travels by value, its forward and backward see each
    process's own tensors, and no backward pass waits for this process. Also a decorator.

    ``.apply(*args)`` takes mesh tensors and plain values, and gives what forward gives; outputs that are no tensors
    come back as they are, which every call then waits for. Side effects happen on the workers: for a Function whose
    bodies are to run here, call ``cls.apply`` itself. TypeError for what is no autograd.Function.
    """
    if not (isinstance(cls, type) and issubclass(cls, Function)):
        raise UsageTypeError(f"ml.remote_autograd_function takes a torch.autograd.Function, not {cls!r}")
    return RemoteAutogradFunction(cls)
