"""The meshes of this kernel by name. Ends them with the interpreter at the latest. Does not import torch."""

from __future__ import annotations

import atexit
import itertools
from collections.abc import Iterable
from typing import TYPE_CHECKING

from monarch_lab.session.logs import LogFile, files_of

if TYPE_CHECKING:
    from monarch_lab.controller.mesh import DeviceMesh
    from monarch_lab.session.session import Session
    from monarch_lab.supervisor import Supervisor

sessions: dict[str, Session] = {}
starting: dict[str, Supervisor] = {}  # meshes whose processes have been asked for, and that nobody has a handle of


def meshes() -> dict[str, DeviceMesh]:
    """The meshes of this process that were not stopped, by name."""
    return {name: s.mesh for name, s in sessions.items()}


def log_files(name: str, ranks: Iterable[int]) -> list[LogFile]:
    """Of some ranks of a mesh of this process."""
    processes = sessions[name].supervisor.processes.values()
    return files_of(((p.rank, p.label, p.stdout_path, p.stderr_path) for p in processes), ranks)


def free_name() -> str:
    """mesh, mesh2, mesh3 ..."""
    taken = {*starting, *sessions}
    return next(n for n in itertools.chain(["mesh"], (f"mesh{k}" for k in itertools.count(2))) if n not in taken)


@atexit.register
def _stop_all() -> None:
    for session in list(sessions.values()):
        session.stop()
    for supervisor in list(starting.values()):
        supervisor.stop()
