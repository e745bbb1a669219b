"""Which mesh factory calls use: ``with mesh.activate()``, ``ml.no_mesh``, ``ml.get_active_mesh()``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from monarch_lab.controller import mode
from monarch_lab.controller.state import active_mesh, active_stream
from monarch_lab.errors import UsageValueError

if TYPE_CHECKING:
    from monarch_lab.controller.mesh import DeviceMesh


class Activation:
    """An activated mesh (or none): in force at once, until ``deactivate`` or the end of a ``with``."""

    def __init__(self, mesh: DeviceMesh | None) -> None:
        self._token = active_mesh.set(mesh and mesh.on(active_stream.get()))
        self._pushed = mesh is not None
        self._active = True
        if self._pushed:
            mode.push()

    def __enter__(self) -> None:
        return None

    def __exit__(self, *exc: object) -> None:
        self.deactivate()

    @property
    def is_active(self) -> bool:
        return self._active

    def deactivate(self) -> None:
        if not self._active:
            return
        self._active = False
        try:
            active_mesh.reset(self._token)
        except ValueError:  # ended in another context than it began in: an await moved us
            active_mesh.set(None)
        if self._pushed:
            mode.pop()


class _NoMesh:
    """``with ml.no_mesh.activate():`` factory calls are local again."""

    def activate(self) -> Activation:
        return Activation(None)

    def __repr__(self) -> str:
        return "no_mesh"


no_mesh = _NoMesh()


def get_active_mesh() -> DeviceMesh:
    """The mesh that factory calls of this context use. Raises ValueError where none is active."""
    mesh = active_mesh.get()
    if mesh is None:
        raise UsageValueError("no device mesh is active: use a %%mesh cell or `with mesh.activate():`")
    return mesh
