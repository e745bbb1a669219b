"""Objects and modules that live on the workers alone, used from the notebook through proxies."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_map

from monarch_lab.controller.activation import get_active_mesh
from monarch_lab.controller.futures import Future
from monarch_lab.controller.remote_functions import RemoteFunction, remote
from monarch_lab.errors import UsageTypeError
from monarch_lab.tensors.opaque import OpaqueRef

_CALL = "monarch_lab.worker.opaque.call_method"
_construct = remote("monarch_lab.worker.opaque.construct")
_construct_module = remote("monarch_lab.worker.opaque.construct_module")
_learned = remote(_CALL)


class OpaqueObject:
    """An object made on each process of the active mesh by ``maker`` (a class, a function or the dotted path of one).

    Subclass it and mark methods with ``@ml.opaque_method``, whose bodies say what the far method gives, or use
    ``call_method``. Attributes set on it are the notebook's own. Raises ValueError where no mesh is active, and
    RemoteException where ``maker`` fails.
    """

    def __init__(self, maker: Callable[..., Any] | str, *args: Any, **kwargs: Any) -> None:
        get_active_mesh()
        self._propagators: dict[Any, RemoteFunction] = {}
        self._ref: OpaqueRef = _construct(maker, *args, **kwargs)

    def _far(self, propagator: Callable[..., Any] | None) -> RemoteFunction:
        if propagator is None:
            return _learned
        if propagator not in self._propagators:
            if not callable(propagator):
                raise UsageTypeError(f"a propagator is a function or None, not {type(propagator).__name__}")

            def tell(ref: Any, name: str, *args: Any, **kwargs: Any) -> Any:
                return propagator(*args, **kwargs)

            self._propagators[propagator] = remote(_CALL, propagate=tell)
        return self._propagators[propagator]

    def call_method(self, name: str, propagator: Callable[..., Any] | None, *args: Any, **kwargs: Any) -> Any:
        """The far object's method ``name`` on each process; mesh tensors of its result.

        ``propagator`` is called with stand-ins of ``args`` and tells the result (see ``ml.remote``); None learns it.
        """
        return self._far(propagator)(self._ref, name, *args, **kwargs)

    def call_method_on_shard_and_fetch(
        self, name: str, *args: Any, shard: dict[str, int] | None = None, **kwargs: Any
    ) -> Future[Any]:
        """A Future of what the method gives on one process: any value that pickles."""
        return _learned.call_on_shard_and_fetch(self._ref, name, *args, shard=shard, **kwargs)


def opaque_method(method: Callable[..., Any]) -> Callable[..., Any]:
    """Marks a method of an OpaqueObject: a call runs the far object's method of that name, and this body, given
    stand-ins of the arguments, tells its result (see ``propagate`` of ``ml.remote``)."""

    @functools.wraps(method)
    def call(self: OpaqueObject, *args: Any, **kwargs: Any) -> Any:
        bound = self._propagators.get(method)
        if bound is None:

            def tell(ref: Any, name: str, *fakes: Any, **named: Any) -> Any:
                return method(self, *fakes, **named)

            bound = self._propagators[method] = remote(_CALL, propagate=tell)
        return bound(self._ref, method.__name__, *args, **kwargs)

    return call


class OpaqueModule(OpaqueObject):
    """An nn.Module made on each process of the active mesh; its parameters are mesh tensors here.

    Calling it runs its forward there, and gradients reach ``parameters()`` as they do of a local module. Each process
    initialises it with numbers of its own stream for users' functions, equal on all from one seed.
    """

    def __init__(self, maker: Callable[..., Any] | str, *args: Any, **kwargs: Any) -> None:
        get_active_mesh()
        self._propagators = {}
        self._ref, parameters, names = _construct_module(maker, *args, **kwargs)
        for p in parameters:
            p._is_param = True
        self._parameters = dict(zip(names, parameters, strict=True))

    def parameters(self) -> Iterator[Any]:
        """Its parameters: the same mesh tensors each time."""
        return iter(self._parameters.values())

    def named_parameters(self) -> Iterator[tuple[str, Any]]:
        return iter(self._parameters.items())

    def __call__(self, *args: Any, propagator: Callable[..., Any] | None = None, **kwargs: Any) -> Any:
        """The far module's forward. ``propagator`` tells its result (see ``ml.remote``); where gradients are on and a
        parameter requires grad, floating-point results do too, whatever it says."""
        if propagator is not None and propagator not in self._propagators:
            inner = propagator
            parameters = list(self._parameters.values())

            def tell(ref: Any, name: str, *fakes: Any, **named: Any) -> Any:
                result = inner(*fakes, **named)
                if torch.is_grad_enabled() and any(p.requires_grad for p in parameters):
                    return tree_map(_with_graph, result)
                return result

            self._propagators[propagator] = remote(_CALL, propagate=tell)
        return self.call_method("__call__", propagator, *args, **kwargs)


def _with_graph(x: Any) -> Any:
    if not isinstance(x, torch.Tensor) or not (x.is_floating_point() or x.is_complex()) or not x.is_leaf:
        return x
    return x.detach().requires_grad_().view(x.shape)
