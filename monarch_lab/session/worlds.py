"""Several independent meshes: each with an agent and processes of its own, so that what ends one leaves the others.

A *world* is what one launch made: the processes of one mesh, until they are gone for good. ``Bootstrap`` starts worlds
and, for tests of faults, kills them; a provider (provider.py) hands out the healthy ones.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from enum import StrEnum
from types import TracebackType
from typing import TYPE_CHECKING

from monarch_lab.errors import UsageKeyError, UsageValueError
from monarch_lab.session.options import Options, check_count, check_name, part_of_gpus
from monarch_lab.session.registry import sessions
from monarch_lab.session.start import Start
from monarch_lab.supervisor import MeshState, Supervisor

if TYPE_CHECKING:
    from monarch_lab.controller.mesh import DeviceMesh


class WorldStatus(StrEnum):
    LIVE = "Live"
    UNHEALTHY = "Unhealthy"  # did not come up, or has lost a process
    AWAITING_CREATION = "Awaiting Creation"


@dataclass(slots=True)
class World:
    index: int
    start: Start
    mesh: DeviceMesh | None = None  # once it was handed out

    @property
    def name(self) -> str:
        return self.start.launch.name

    @property
    def status(self) -> WorldStatus:
        if self.mesh is not None:
            return WorldStatus.LIVE if self.mesh.state == "live" else WorldStatus.UNHEALTHY
        supervisor = self.start.supervisor
        if supervisor.state is MeshState.STARTING:
            return WorldStatus.AWAITING_CREATION
        is_whole = all(info.is_live for info in supervisor.processes.values())
        return WorldStatus.LIVE if supervisor.state is MeshState.LIVE and is_whole else WorldStatus.UNHEALTHY

    @property
    def supervisor(self) -> Supervisor:
        session = sessions.get(self.name)
        # A mesh whose agent was lost and that was restarted has another.
        return session.supervisor if self.mesh is not None and session is not None else self.start.supervisor

    def hand_out(self) -> DeviceMesh:
        """Its mesh; waits for its processes."""
        if self.mesh is None:
            self.mesh = self.start.finish(None)
        return self.mesh

    def end(self) -> None:
        """End what is left of it."""
        if self.mesh is not None:
            self.mesh.exit()
        self.start.abort()


class Bootstrap:
    """The processes of several meshes. ``exit()``, or the end of a ``with``, ends them all.

    A world is named ``mesh_0_worker``, ``mesh_1_worker`` ...; with ``auto_epoch`` each launch of one is another world,
    ``mesh_0_worker_epoch_0``, ``mesh_0_worker_epoch_1`` ...
    """

    def __init__(self, options: Options, meshes: int, auto_epoch: bool = False, name: str = "mesh") -> None:
        """Ask for the processes of so many meshes; returns before they are there."""
        check_count("meshes", meshes)
        check_name(name)
        self._options = options
        self._parts = part_of_gpus(options, meshes)
        self._auto_epoch = auto_epoch
        self._name = name
        self._epochs: dict[int, int] = {}
        self.changed = threading.Condition()  # told when a process of any of them has changed
        self.worlds: dict[str, World] = {}
        try:
            for _ in range(meshes):
                self.launch_mesh()
        except BaseException:
            self.exit()
            raise

    def __enter__(self) -> Bootstrap:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        self.exit()

    @property
    def mesh_worlds(self) -> dict[str, list[int]]:
        """The pids of each world: its agent's, then its workers' by rank."""
        return {name: _pids(world.supervisor) for name, world in self.worlds.items()}

    @property
    def processes(self) -> list[int]:
        """The pids of all worlds."""
        return [pid for pids in self.mesh_worlds.values() for pid in pids]

    def get_mesh_worlds(self) -> list[str]:
        return list(self.worlds)

    def status(self) -> dict[str, WorldStatus]:
        self.forget_closed()
        return {name: world.status for name, world in self.worlds.items()}

    def launch_mesh(self) -> str:
        """Ask for the processes of one more mesh; the name of its world."""
        return self._launch(max(self._epochs, default=-1) + 1)

    def spawn_mesh(self, world: str) -> str:
        """Ask for the processes of this mesh once more, after its world has ended; the name of the new world.

        Without ``auto_epoch`` the new world takes the name, and what is left of the old one is ended.
        """
        old = self._find(world)
        if old.status is WorldStatus.LIVE or old.status is WorldStatus.AWAITING_CREATION:
            raise UsageValueError(f"world {world} runs; kill_mesh({world!r}) ends it")
        if not self._auto_epoch or old.mesh is None:
            self._forget(old)
        return self._launch(old.index)

    def kill_mesh(self, world: str) -> None:
        """SIGKILL to the agent of a world, as a crash: everything below it goes with it. Returns at once."""
        self._find(world).supervisor.kill()

    def forget_closed(self) -> None:
        """Worlds whose mesh was exited are none any more."""
        for world in list(self.worlds.values()):
            if world.mesh is not None and world.mesh.state == "closed":
                self._forget(world)

    def evict(self, world: World) -> None:
        """End what is left of a world that nobody has."""
        self._forget(world)

    def exit(self) -> None:
        for world in list(self.worlds.values()):
            self._forget(world)

    def _launch(self, index: int) -> str:
        epoch = self._epochs.get(index, -1) + 1
        name = f"{self._name}_{index}_worker" + (f"_epoch_{epoch}" if self._auto_epoch else "")
        options = self._parts[index] if index < len(self._parts) else self._options
        labels = {**(options.labels or {}), "world": name}
        world = World(index, Start(replace(options, labels=labels), name, self._tell))
        self._epochs[index] = epoch
        self.worlds[name] = world
        return name

    def _tell(self) -> None:
        with self.changed:
            self.changed.notify_all()

    def _find(self, world: str) -> World:
        if world not in self.worlds:
            raise UsageKeyError(f"there is no world {world!r}; there is {', '.join(self.worlds) or 'none'}")
        return self.worlds[world]

    def _forget(self, world: World) -> None:
        self.worlds.pop(world.name, None)
        world.end()


def _pids(supervisor: Supervisor) -> list[int]:
    workers = [info.pid for _, info in sorted(supervisor.processes.items())]
    return [pid for pid in (supervisor.agent_pid, *workers) if pid]
