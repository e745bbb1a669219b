"""A name for a value that lives on the workers. When the last handle lets go of it, its deletion joins the stream."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from monarch_lab.controller.mesh import DeviceMesh

GRAPH = 16  # equality bits of the gradient graph lie this much above those of the value


def _nothing(ref: int) -> None:
    pass


class Ref:
    """``equal``: bit d says that processes along mesh dim d hold equal values; bit GRAPH + d says so of everything
    its gradient graph read. Views share the Ref of their storage's first handle for it.

    ``handles`` are the live handles of one storage, kept only once there is a second. ``loans``: see lending.py.
    """

    __slots__ = ("id", "mesh", "equal", "handles", "_let_go", "loans")

    loans: list[Any]

    def __init__(self, id: int, mesh: DeviceMesh, equal: int, is_large: bool = True) -> None:
        self.id = id
        self._let_go = mesh.let_go_large if is_large else mesh.let_go
        self.mesh = mesh
        self.equal = equal
        self.handles: list[weakref.ref[Any]] | None = None

    def __del__(self) -> None:
        try:
            self._let_go(self.id)
        except AttributeError:  # a Ctrl-C cut its __init__ short
            pass

    def end(self) -> None:
        """Let go of the value now, whatever handles there are."""
        self._let_go(self.id)
        self._let_go = _nothing

    def share(self, first: Any, handle: Any) -> None:
        """``handle`` is another view of the storage whose first handle is ``first``."""
        if self.handles is None:
            self.handles = [weakref.ref(first)]
        elif len(self.handles) > 64:
            self.handles = [r for r in self.handles if r() is not None]
        self.handles.append(weakref.ref(handle))

    def others(self, handle: Any) -> list[Any]:
        if self.handles is None:
            return []
        return [h for r in self.handles if (h := r()) is not None and h is not handle]
