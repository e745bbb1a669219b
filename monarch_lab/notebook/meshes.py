"""The meshes of this kernel as the notebook sees them, and the one its cells run on.

``monarch_lab.session`` is imported when a mesh is started, not before: it brings torch, and ``%load_ext`` or a look
at the (empty) list must not wait for that.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from monarch_lab.arguments import suggestion
from monarch_lab.errors import UsageKeyError, UsageValueError
from monarch_lab.notebook.names import readable
from monarch_lab.wire.snapshot import KernelSnapshot

if TYPE_CHECKING:
    from monarch_lab.controller import DeviceMesh
    from monarch_lab.session.found import FoundMesh
    from monarch_lab.session.logs import LogReader

SESSION = "monarch_lab.session"
DEFAULT_NAME = "mesh"
NONE_RUNS = "No mesh is running: type %mesh start"


class Meshes:
    """Also what the panel's buttons do (comm.PanelCommands), then on a thread beside the running cell."""

    def __init__(self, on_import: Callable[[], None] = lambda: None) -> None:
        """``on_import``: called when the session was imported, before a mesh starts."""
        self._on_import = on_import
        self._current = ""
        self._seq = 0

    def all(self) -> dict[str, DeviceMesh]:
        """Every mesh that was not stopped, by name; a dead one is still there."""
        # Looked up each time: another thread may be in the middle of importing it.
        meshes = getattr(sys.modules.get(SESSION), "meshes", None)
        return dict(meshes()) if meshes is not None else {}

    @property
    def current(self) -> str:
        """The name of the mesh that cells run on; "" if it cannot be told."""
        there = self.all()
        if self._current in there:
            return self._current
        # Made in Python, not by %mesh start: alone, it is meant.
        return next(iter(there)) if len(there) == 1 else ""

    def find(self, name: str | None = None) -> DeviceMesh:
        """The named mesh, else the current one. Raises one sentence that says what to type."""
        there = self.all()
        if name is None:
            name = self.current
            if not there:
                raise UsageValueError(NONE_RUNS)
            if not name:
                raise UsageValueError(f"No mesh is current: type %mesh use NAME, one of {', '.join(sorted(there))}")
        if name not in there:
            if (other := self._elsewhere(name)) is not None:
                raise UsageKeyError(other)
            raise UsageKeyError(f"No mesh is named {name!r}{suggestion(name, there) or ': type %mesh start'}")
        return there[name]

    def _elsewhere(self, name: str) -> str | None:
        """Whose a mesh of that name is, where another kernel has one."""
        for mesh in self.found():
            if not mesh.is_ours and mesh.record.name == name:
                return (
                    f"Mesh {name!r} belongs to another kernel (process {mesh.record.kernel.pid}), which alone can use "
                    f"it: %mesh start --name {name} starts one here; monarch-lab stop {name} in a shell ends that one"
                )
        return None

    def use(self, name: str) -> DeviceMesh:
        mesh = self.find(name)
        self._current = name
        return mesh

    def start(self, name: str, on_progress: Callable[[str, int, int], None], **options: Any) -> DeviceMesh:
        session = importlib.import_module(SESSION)
        self._on_import()
        mesh: DeviceMesh = session.start_local(name=name, on_progress=on_progress, **options)
        self._current = name
        return mesh

    def stop_all(self) -> list[DeviceMesh]:
        """Stop every mesh; those that were stopped. The first error is raised when all were tried."""
        stopped, first = [], None
        for mesh in self.all().values():
            try:
                mesh.exit()
                stopped.append(mesh)
            except Exception as error:
                first = first or error
        if first is not None:
            raise first
        return stopped

    def found(self) -> list[FoundMesh]:
        """The meshes of this user on this machine, those of other kernels too."""
        return list(importlib.import_module(f"{SESSION}.found").find_meshes())

    def log_reader(self, mesh: DeviceMesh, ranks: str | None, pattern: str | None) -> LogReader | None:
        """Of what its workers wrote to their files; None where they have none."""
        logs = importlib.import_module(f"{SESSION}.logs")
        registry = importlib.import_module(f"{SESSION}.registry")
        files = registry.log_files(mesh.name, mesh.chosen(ranks))
        wanted = logs.compiled(pattern)
        return logs.LogReader(files, wanted) if files else None

    def drop_spare(self) -> None:
        """End what was kept ready for a later mesh."""
        spares = getattr(sys.modules.get(SESSION), "warm_pool", None)
        if spares is not None:
            spares.clear()

    def snapshot(self) -> KernelSnapshot:
        self._seq += 1
        return KernelSnapshot(self._seq, self.current, [readable(mesh.status()) for mesh in self.all().values()])

    def interrupt(self, mesh: str) -> None:
        self.find(mesh).interrupt()

    def stop(self, mesh: str) -> None:
        self.find(mesh).exit()

    def debug_attach(self, mesh: str, session: str) -> None:
        self.find(mesh).client.prompts.hold(session)

    def debug_line(self, mesh: str, session: str, line: str) -> str:
        return str(self.find(mesh).client.prompts.type_line(session, line))

    def debug_detach(self, mesh: str, session: str) -> None:
        self.find(mesh).client.prompts.release(session)


def workers(mesh: DeviceMesh) -> str:
    """As in "2 workers"."""
    number = 1
    for size in mesh.sizes.values():
        number *= size
    return f"{number} worker{'s' if number != 1 else ''}"
