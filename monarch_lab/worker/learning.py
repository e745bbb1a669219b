"""A first run, described for the controller: what came out, what aliases what, what was written.

Also tells whether the answer may be believed again (rule 2): an aten op under the call that is tagged as data
dependent or dynamic in shape, a layout other than strided, or a Python value in the result make it ``dynamic``.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import nullcontext
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from monarch_lab.tensors.meta import describe
from monarch_lab.tensors.structure import structure
from monarch_lab.wire.engine import Learned, TensorMeta
from monarch_lab.worker.randomness import reseeded

_DYNAMIC_TAGS = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}
# Their result's shape hangs on values although no tag says so.
_UNTAGGED = {
    "aten::_indices",
    "aten::indices",
    "aten::_values",
    "aten::values",
    "aten::coalesce",
    "aten::_coalesce",
    "aten::_pack_padded_sequence",
    "aten::crow_indices",
    "aten::col_indices",
    "aten::ccol_indices",
    "aten::row_indices",
    "aten::resize_",
    "aten::set_",
}
_READS = ("tolist", "numpy")
# Draw as many numbers as it takes: how many hangs on the values.
_REJECTING = {"aten::poisson", "aten::_standard_gamma", "aten::binomial", "aten::_sample_dirichlet"}
# Written although the schema does not say so.
_RUNNING = ("running_mean", "running_var")
_WRITING = {
    "aten::native_batch_norm": _RUNNING,
    "aten::cudnn_batch_norm": _RUNNING,
    "aten::miopen_batch_norm": _RUNNING,
}
_MASKS = (torch.bool, torch.uint8)


class Rejecting(TorchDispatchMode):
    """Around a call that is known to draw as many numbers as it takes."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # see Watch

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name in _REJECTING:
            with reseeded():
                return func(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


# A tensor that such a function takes as a number (``alpha=``) is read for its value, on which nothing hangs that is
# told of the result: optimizers such as LBFGS give them.
_TAKES_NUMBERS = {
    getattr(place, name)
    for place in (torch, torch.Tensor)
    for name in ("add", "sub", "addcmul", "addcdiv", "add_", "sub_", "addcmul_", "addcdiv_")
    if hasattr(place, name)
}


class Watch(TorchDispatchMode):
    """Sees the aten ops of a call: is any of them dynamic, does any draw random numbers?"""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # torch wraps the method below in a guard against its compiler otherwise, and the first call then imports all of
        # the compiler: two seconds and 100 MB in each worker.
        return False

    def __init__(self, function: Any = None) -> None:
        super().__init__()
        self._reads_numbers = isinstance(function, Hashable) and function in _TAKES_NUMBERS
        self.dynamic = False
        self.random = False
        self.private = False
        self.written: set[int] = set()  # storages

    def __enter__(self) -> Watch:
        # Reading values as Python objects is no aten op.
        for name in _READS:
            setattr(torch.Tensor, name, self._noting(getattr(torch._C.TensorBase, name)))
        return super().__enter__()

    def __exit__(self, *exc: Any) -> None:
        for name in _READS:
            if name in torch.Tensor.__dict__:
                delattr(torch.Tensor, name)
        super().__exit__(*exc)

    def _noting(self, read: Any) -> Any:
        def method(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            self.dynamic = True
            return read(tensor, *args, **kwargs)

        return method

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tags = func.tags
        name = func._schema.name
        if torch.is_inference_mode_enabled():
            # Composite functions arrive whole there, and hide what they call.
            with self:
                parts = func.decompose(*args, **(kwargs or {}))
            if parts is not NotImplemented:
                return parts
        if torch.Tag.nondeterministic_seeded in tags:
            self.random = True
            self.private = self.private or name in _REJECTING
        if func._schema.is_mutable or name in _WRITING:
            self._note_written(func, name, args, kwargs or {})
        if name in _UNTAGGED:
            # resize_ and set_ with shapes from the caller's integers are in the key; only aliasing tricks are not.
            self.dynamic = self.dynamic or name not in ("aten::resize_", "aten::set_")
        elif not self.dynamic and not _DYNAMIC_TAGS.isdisjoint(tags):
            if name == "aten::_local_scalar_dense" and self._reads_numbers:
                pass
            elif name in ("aten::index", "aten::_unsafe_index"):
                self.dynamic = any(i is not None and i.dtype in _MASKS for i in args[1])
            else:
                self.dynamic = True
        if name in _REJECTING:
            with reseeded():
                return func(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _note_written(self, func: Any, name: str, args: Any, kwargs: dict[str, Any]) -> None:
        """Version counters miss writes in inference mode, through ``.data``, and of running statistics."""
        if name in _WRITING and not args[5]:  # training
            return
        for k, argument in enumerate(func._schema.arguments):
            value = args[k] if k < len(args) else kwargs.get(argument.name)
            writes = argument.alias_info is not None and argument.alias_info.is_write
            if writes or (name in _WRITING and argument.name in _WRITING[name]):
                for t in value if isinstance(value, (list, tuple)) else (value,):
                    if isinstance(t, torch.Tensor) and (storage := _storage(t)) is not None:
                        self.written.add(storage)


def _storage(tensor: torch.Tensor) -> int | None:
    try:
        return tensor.untyped_storage()._cdata
    except (RuntimeError, NotImplementedError):
        return None  # sparse and other layouts without one storage


def version(tensor: torch.Tensor) -> int:
    try:
        return tensor._version
    except RuntimeError:
        return -1  # inference tensors keep no count


def learn(
    ident: int,
    invoke: Callable[..., Any],
    inputs: list[Any],
    numbers: list[Any],
    *,
    has_out: bool = False,
    function: Any = None,
) -> tuple[Learned, list[torch.Tensor], list[Any]]:
    """Runs the call. Returns the answer, the tensors of the result in its order, and its Python values.

    ``has_out``: with out=, which torch does not write for every function while a dispatch mode is on
    (linalg.matrix_rank in 2.13). Such a call is not watched: it may draw random numbers, and if its result's shape
    hangs on values, the check of later calls finds out. ``function``: the one that is called.
    """
    before: list[TensorMeta] = [describe(t) for t in inputs]
    versions = [version(t) for t in inputs]
    watch = Watch(function)
    with nullcontext() if has_out else watch:
        result = invoke(inputs, numbers)
    tensors: list[torch.Tensor] = []
    values: list[Any] = []
    tree = structure(result, tensors, values)
    keeps, aliases = [], []
    input_storage = [_storage(t) for t in inputs]
    for k, tensor in enumerate(tensors):
        keep = next((j for j, t in enumerate(inputs) if t is tensor), None)
        if keep is None:
            keep = next((-2 - j for j in range(k) if tensors[j] is tensor), -1)
        storage = _storage(tensor)
        alias = -1
        if storage is not None:
            alias = next((j for j, s in enumerate(input_storage) if s == storage), -1)
            if alias == -1:
                alias = next((-2 - j for j in range(k) if _storage(tensors[j]) == storage), -1)
        keeps.append(keep)
        aliases.append(alias)
    if has_out:  # in inference mode nothing counts the writes
        watch.written.update(s for k in keeps if k >= 0 and (s := input_storage[k]) is not None)
    metas = [describe(t) for t in tensors]
    after = [(k, meta) for k, t in enumerate(inputs) if (meta := describe(t)) != before[k]]
    mutated = [k for k, t in enumerate(inputs) if versions[k] != version(t) or input_storage[k] in watch.written]
    odd = any(m.layout != "strided" for m in (*before, *metas))
    answer = Learned(
        ident=ident,
        tree=tree,
        outputs=metas,
        keeps=keeps,
        aliases=aliases,
        after=after,
        mutated=mutated,
        dynamic=watch.dynamic or odd or bool(values),
        random=watch.random or has_out,
        private=watch.private,
    )
    return answer, tensors, values
