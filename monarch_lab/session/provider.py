"""Hands out the healthy ones of several meshes, each once."""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING

from monarch_lab.errors import LaunchError, MeshError
from monarch_lab.session.worlds import Bootstrap, World, WorldStatus

if TYPE_CHECKING:
    from monarch_lab.controller.mesh import DeviceMesh

log = logging.getLogger(__name__)
# A start that fails before it has a process tells nobody: it is looked for.
_LOOK_S = 0.05


class MeshProvider:
    def __init__(self, bootstrap: Bootstrap) -> None:
        self._bootstrap = bootstrap
        self._lock = threading.Lock()  # guards the choice: no two callers get one mesh

    def status(self) -> dict[str, WorldStatus]:
        """By the names of the worlds; one is there until its mesh was exited, or its place was taken (spawn_mesh)."""
        return self._bootstrap.status()

    def new_mesh(self, timeout_in_sec: float | None = None) -> DeviceMesh:
        """The mesh of a healthy world that was not handed out before; waits for one that is on its way.

        Worlds that nobody has and that are not healthy are evicted. TimeoutError where none is found in time; without a
        ``timeout_in_sec`` where none is on its way.
        """
        deadline = None if timeout_in_sec is None else time.monotonic() + timeout_in_sec
        cause: MeshError | None = None
        while True:
            with self._lock:
                mesh, cause, is_one_on_its_way = self._look(cause)
            if mesh is not None:
                return mesh
            left = None if deadline is None else deadline - time.monotonic()
            if left is None and not is_one_on_its_way:
                raise TimeoutError("Could not find a healthy world: none is on its way") from cause
            if left is not None and left <= 0:
                raise TimeoutError(f"Could not find a healthy world in {timeout_in_sec:g}s!") from cause
            with self._bootstrap.changed:
                self._bootstrap.changed.wait(_LOOK_S if left is None else min(left, _LOOK_S))

    def _look(self, cause: MeshError | None) -> tuple[DeviceMesh | None, MeshError | None, bool]:
        """(a mesh, what kept another from being one, whether to wait for more)."""
        is_one_on_its_way = False
        for world in [world for world in self._bootstrap.worlds.values() if world.mesh is None]:
            match world.status:
                case WorldStatus.LIVE:
                    try:
                        return world.hand_out(), None, True
                    except MeshError as e:  # it died in this moment
                        cause = e
                        self._evict(world)
                case WorldStatus.UNHEALTHY:
                    cause = LaunchError(f"world {world.name}: {world.start.supervisor.failure_text()}")
                    self._evict(world)
                case WorldStatus.AWAITING_CREATION:
                    is_one_on_its_way = True
        return None, cause, is_one_on_its_way

    def _evict(self, world: World) -> None:
        log.warning("world %s is evicted: %s", world.name, world.start.supervisor.failure_text())
        self._bootstrap.evict(world)
