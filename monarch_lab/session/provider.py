"""Hands out the healthy ones of several meshes, each once."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from monarch_lab.errors import MeshError
from monarch_lab.session.worlds import Bootstrap, World, WorldStatus

if TYPE_CHECKING:
    from monarch_lab.controller.mesh import DeviceMesh

log = logging.getLogger(__name__)
# A start that fails before it has a process tells nobody: it is looked for.
_LOOK_S = 0.05


class MeshProvider:
    def __init__(self, bootstrap: Bootstrap) -> None:
        self._bootstrap = bootstrap

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
            free = [world for world in self._bootstrap.worlds.values() if world.mesh is None]
            for world in free:
                match world.status:
                    case WorldStatus.LIVE:
                        try:
                            return world.hand_out()
                        except MeshError as e:  # it died in this moment
                            cause = e
                            self._evict(world)
                    case WorldStatus.UNHEALTHY:
                        self._evict(world)
            left = None if deadline is None else deadline - time.monotonic()
            if left is None and not any(world.status is WorldStatus.AWAITING_CREATION for world in free):
                raise TimeoutError("Could not find a healthy world: none is on its way") from cause
            if left is not None and left <= 0:
                raise TimeoutError(f"Could not find a healthy world in {timeout_in_sec:g}s!") from cause
            with self._bootstrap.changed:
                self._bootstrap.changed.wait(_LOOK_S if left is None else min(left, _LOOK_S))

    def _evict(self, world: World) -> None:
        log.warning("world %s is evicted: %s", world.name, world.start.supervisor.failure_text())
        self._bootstrap.evict(world)
