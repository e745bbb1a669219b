"""MeshTensor: a torch.Tensor whose data lives on the workers.

Every function of torch that is given one comes here (``__torch_function__``, or a method of this class, which is
quicker) and goes to dispatch. What is a pure function of the metadata is answered here; what needs a value fetches
it where the processes are known to hold the same one, and explains itself otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch

from monarch_lab.controller import answers, autograd, constants, dispatch, hooks, operands, operators, scanning
from monarch_lab.controller.lending import behind, drop, is_dropped
from monarch_lab.controller.messages import needs_remote
from monarch_lab.controller.refs import Ref
from monarch_lab.controller.state import recorder as _recorder
from monarch_lab.errors import UsageError, UsageTypeError
from monarch_lab.tensors.meta import Meta

_base = torch._C.TensorBase
_plain_mode = torch._C.DisableTorchFunction
_dispatch = dispatch.dispatch
_special = dispatch.special


class MeshTensor(torch.Tensor):
    """Made by ops, factories in a %%mesh cell, ``mesh.replicate`` and ``mesh.shard``; never by its constructor.

    ``shape``, ``dtype``, ``device`` and the like are those of each process's own tensor.
    """

    is_mesh_tensor = True
    _meta: Meta
    _ref: Ref
    _store: Ref | None = None  # the Ref that stands for its storage, where that is another's
    _sig = 0  # signature of the gradient graph; 0: none
    _grad: MeshTensor | None = None
    _hooks: dict[int, Any] | None = None  # of a leaf (hooks.py)
    _crossings: tuple[Any, ...] = ()  # where its graph goes on on other meshes, oldest first (crossings.py)

    @staticmethod
    def __new__(cls, *args: Any, **kwargs: Any) -> NoReturn:
        raise UsageTypeError("a mesh tensor is made by ops in a %%mesh cell, mesh.replicate(t) or mesh.shard(t, dim)")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        handler = _special.get(func)
        return _dispatch(func, args, kwargs) if handler is None else handler(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        # Not a TypeError: torch's operators take one of those for "not implemented" and say something else.
        raise needs_remote(f"{func}, called below torch's function layer,", UsageError)

    # --- the mesh

    @property
    def mesh(self) -> Any:
        """The mesh that holds it."""
        mesh = behind(self._ref.mesh)
        return mesh if mesh.stream is None else mesh.on(None)

    @property
    def stream(self) -> Any:
        """The stream it is on: ops with it run there, while it is active."""
        from monarch_lab.controller.streams import MAIN

        return behind(self._ref.mesh).stream or MAIN

    @property
    def dropped(self) -> bool:
        """Whether ``drop`` ended it, or the end of its loan."""
        return is_dropped(self)

    def drop(self) -> None:
        """Let its memory go now, with every other view of it: using one of them is an error from now on."""
        drop(self)

    @property
    def equal_dims(self) -> tuple[str, ...]:
        """Mesh dims along which the processes are known to hold equal values."""
        mask = (self._store or self._ref).equal
        return tuple(name for k, name in enumerate(self._ref.mesh.names) if mask >> k & 1)

    def reduce(
        self, dims: Any = (), reduction: str = "sum", scatter: bool = False, mesh: Any = None, out: Any = None
    ) -> Any:
        """See ``ml.reduce``."""
        from monarch_lab.controller.moves import reduce_tensor

        return reduce_tensor(self, dims, reduction, scatter=scatter, mesh=mesh, out=out)

    def reduce_(self, dims: Any = (), reduction: str = "sum", scatter: bool = False, mesh: Any = None) -> Any:
        """As ``reduce``, in place: the result must have this tensor's shape."""
        from monarch_lab.controller.moves import reduce_tensor_

        return reduce_tensor_(self, dims, reduction, scatter=scatter, mesh=mesh)

    def to_mesh(self, mesh: Any, stream: Any = None) -> Any:
        """See ``ml.to_mesh``."""
        from monarch_lab.controller.crossings import to_mesh

        return to_mesh(self, mesh, stream)

    def slice_mesh(self, **dims: int | slice) -> Any:
        """See ``ml.slice_mesh``."""
        from monarch_lab.controller.crossings import slice_mesh

        return slice_mesh(self, **dims)

    # --- metadata

    def _refresh(self, meta: Meta) -> None:
        """Take on new metadata, on torch's C++ side too: functions of its that read sizes there see them."""
        if meta is self._meta:
            return
        fresh = dispatch.make_handle(meta, self._ref)
        with _plain_mode():  # the mode of an active mesh would make an op of it
            _base.data.__set__(self, fresh)
        self._meta = meta

    def size(self, dim: int | None = None) -> Any:
        return self._meta.shape if dim is None else self._meta.shape[dim]

    def stride(self, dim: int | None = None) -> Any:
        return self._meta.stride if dim is None else self._meta.stride[dim]

    def __len__(self) -> int:
        if not self._meta.shape:
            raise TypeError("len() of a 0-d tensor")
        return self._meta.shape[0]

    def __hash__(self) -> int:
        return id(self)

    def __iter__(self) -> Any:
        if not self._meta.shape:
            raise TypeError("iteration over a 0-d tensor")
        return iter(self.unbind(0))

    # --- gradients

    @property
    def grad(self) -> MeshTensor | None:
        if (recorder := _recorder.get()) is not None:
            recorder.touch(self)
        return self._grad

    @grad.setter
    def grad(self, value: MeshTensor | None) -> None:
        autograd.set_grad(self, value)

    @grad.deleter
    def grad(self) -> None:
        autograd.set_grad(self, None)

    @property
    def requires_grad(self) -> bool:
        return self._meta.requires_grad

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.requires_grad_(value)

    @property
    def data(self) -> MeshTensor:
        return _dispatch(_DATA_GET, (self,))

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        autograd.set_data(self, value)

    @property
    def grad_fn(self) -> Any:
        return hooks.grad_fn(self)

    @property
    def retains_grad(self) -> bool:
        return self._ref.id in self._ref.mesh.client.retained

    @property
    def _base(self) -> Any:
        return answers.base(self)

    def backward(
        self, gradient: Any = None, retain_graph: Any = None, create_graph: bool = False, inputs: Any = None
    ) -> None:
        """As torch's: on each process, for its own value. ``.grad`` of the leaves is there at once."""
        autograd.backward([self], [gradient], retain_graph, create_graph, inputs)

    # --- values

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        from monarch_lab.controller.display import text

        return text(self)

    def __format__(self, spec: str) -> str:
        from monarch_lab.controller.display import formatted

        return formatted(self, spec)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        from monarch_lab.controller.display import bundle

        return bundle(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> MeshTensor:
        from monarch_lab.controller.copying import deepcopy

        return deepcopy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise UsageTypeError(
            "a mesh tensor cannot be pickled or saved: take its value first, with ml.inspect(t) for one process's "
            "or ml.fetch_all(t) for all"
        )

    def __dir__(self) -> list[str]:
        return dir(torch.Tensor)

    @property
    def _is_param(self) -> bool:
        return False

    @_is_param.setter
    def _is_param(self, value: bool) -> None:
        # torch.nn.Parameter marks what it is given; ``type(p)`` then says so, as it does for a local one.
        if value:
            self.__class__ = Parameter


class Parameter(MeshTensor):
    """A mesh tensor that is an nn.Parameter (``isinstance`` holds by the mark)."""

    @property
    def _is_param(self) -> bool:
        return True

    @_is_param.setter
    def _is_param(self, value: bool) -> None:
        pass


class ConstantTensor(MeshTensor):
    """A 0-dim mesh tensor whose value the controller knows (constants.py). Becomes a MeshTensor when it is sent."""

    _value: torch.Tensor

    def __iadd__(self, other: Any) -> Any:
        # What optimizers do to their step counters: the general way (constants.resolve) costs ten times as much.
        if type(other) not in (int, float) or _recorder.get() is not None:
            return _dispatch(torch.Tensor.__iadd__, (self, other))
        with _plain_mode():
            self._value += other
        return self

    def item(self) -> Any:
        recorder = _recorder.get()
        return self._value.item() if recorder is None else recorder.item(self)


def _method(func: Any, name: str) -> Callable[..., Any]:
    """A method that goes straight to dispatch; two common arities are written out, for speed."""

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return _dispatch(func, (self, *args), kwargs)

    method.__name__, method.__qualname__, method.__doc__ = name, f"MeshTensor.{name}", getattr(func, "__doc__", None)
    return method


_KEEP = {
    "__new__",
    "__init__",
    "__class__",
    "__getattribute__",
    "__setattr__",
    "__delattr__",
    "__init_subclass__",
    "__subclasshook__",
    "__dict__",
    "__doc__",
    "__module__",
    "__torch_function__",
    "__torch_dispatch__",
    "__weakref__",
    "__setstate__",
    "__reduce__",
    "__getstate__",
    "__sizeof__",
    "__dir__",
    "__hash__",
    "__priority__",
    "__cuda_array_interface__",
    "_make_subclass",
    "_make_wrapper_subclass",
    "_make_dtensor",
    "_convert",
    "as_subclass",
    "_dispatch_keys",
    "_fix_weakref",
    "_clear_non_serializable_cached_data",
    "_reduce_ex_internal",
    "_typed_storage",
    "__torch_dispatch_mode__",
}


def _add_methods() -> None:
    """Every method and attribute of torch.Tensor that this class does not define itself."""
    for name in dir(torch.Tensor):
        if name in _KEEP or name in MeshTensor.__dict__:
            continue
        member = getattr(torch.Tensor, name, None)
        raw = next((k.__dict__[name] for k in torch.Tensor.__mro__ if name in k.__dict__), None)
        if (
            raw is None
            or isinstance(raw, (staticmethod, classmethod))
            or raw.__class__.__name__ == "wrapper_descriptor"
        ):
            if not (name.startswith("__") and callable(member) and raw.__class__.__name__ == "wrapper_descriptor"):
                continue
            if name in object.__dict__:
                continue
        if type(raw).__name__ in ("getset_descriptor", "property", "member_descriptor"):
            setattr(MeshTensor, name, _attribute(name, member))
        elif callable(member):
            setattr(MeshTensor, name, _method(member, name))
    MeshTensor.__getitem__ = operators.getitem
    for name in operators.NAMES:
        name = f"__{name}__"
        method = operators.binary_method(getattr(torch.Tensor, name))
        method.__name__, method.__qualname__ = name, f"MeshTensor.{name}"
        setattr(MeshTensor, name, method)
        setattr(ConstantTensor, name, _method(getattr(torch.Tensor, name), name))  # its ref is unknown to the workers


def _attribute(name: str, descriptor: Any) -> property:
    known = answers.ATTRIBUTES.get(name)
    if known is not None:
        return property(lambda self: known(self._meta))
    getter = descriptor.__get__
    setter = getattr(descriptor, "__set__", None)

    def write(self: Any, value: Any) -> None:
        _dispatch(setter, (self, value))

    return property(lambda self: _dispatch(getter, (self,)), write if name in ("real", "imag") else None)


_DATA_GET = torch.Tensor.data.__get__
_add_methods()
answers.install(MeshTensor)
dispatch.handle_class = operators.handle_class = scanning.handle_class = MeshTensor
dispatch.handle_classes = operators.handle_classes = frozenset((MeshTensor, Parameter))
scanning.handle_classes = operands.handle_classes = dispatch.handle_classes
scanning.constant_class = ConstantTensor
dispatch.all_classes = frozenset((MeshTensor, Parameter, ConstantTensor))
scanning.resolve_constants = constants.resolve
