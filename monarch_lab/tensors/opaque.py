"""OpaqueRef: any Python object that stays on the workers, known to the notebook by a small tensor.

The object hangs on its key tensor: what becomes of that (deleted, failed, lost with its process) becomes of the object.
Made in functions that run on the workers; the same class stands for it in the notebook.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch

from monarch_lab.errors import UsageRuntimeError, UsageTypeError
from monarch_lab.tensors.template import Built

_numbers = itertools.count(1)


class OpaqueRef:
    """Return ``ml.OpaqueRef(value)`` from a remote function to keep ``value`` on each process; give what comes back to
    other remote functions, and ``ref.value`` is the object there. It is let go when the last reference in the notebook
    is. In a propagator, ``ml.OpaqueRef(None)`` stands for one.

    ``value`` raises RuntimeError in the notebook, where the object is not.
    """

    def __init__(self, value: Any) -> None:
        with torch._C.DisableTorchFunction():  # no mesh tensor of an active mesh
            self._key = torch.tensor(next(_numbers))
        self._key._monarch_value = (value,)  # noqa: SLF001  its own mark on a tensor of its own

    @classmethod
    def around(cls, key: Any) -> OpaqueRef:
        """The reference whose key this is."""
        ref = cls.__new__(cls)
        ref._key = key  # noqa: SLF001
        return ref

    @property
    def key(self) -> Any:
        return self._key

    @property
    def value(self) -> Any:
        held = getattr(self._key, "_monarch_value", None)
        if held is None:
            raise UsageRuntimeError(
                "the value of an OpaqueRef is on the workers: give the OpaqueRef to a function called with ml.remote "
                "and read .value there"
            )
        return held[0]

    def __repr__(self) -> str:
        mesh = getattr(self._key, "mesh", None)
        return f"<OpaqueRef on {mesh}>" if mesh is not None else f"<OpaqueRef to {type(self.value).__name__}>"

    def __reduce__(self) -> Any:
        raise UsageTypeError(
            "an OpaqueRef cannot be pickled or fetched: its object stays on the workers; give the OpaqueRef "
            "itself, or in a list, tuple or dict, to a remote function"
        )

    def for_workers(self, walk: Any) -> Built:
        if not getattr(self._key, "is_mesh_tensor", False):
            raise UsageTypeError(
                "this OpaqueRef was made in the notebook, and its object is not on the workers: make it in a function "
                "called with ml.remote and return it"
            )
        return Built("monarch_lab.tensors.opaque.OpaqueRef.around", (walk.value(self._key),))
