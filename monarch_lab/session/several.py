"""``local_meshes`` and its kin: several meshes of this machine at once."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Any

from monarch_lab.session.options import Options, check_count, part_of_gpus
from monarch_lab.session.provider import MeshProvider
from monarch_lab.session.start import Start
from monarch_lab.session.worlds import Bootstrap

if TYPE_CHECKING:
    from monarch_lab.controller.mesh import DeviceMesh


class Meshes(list["DeviceMesh"]):
    """Meshes that end together, after a ``with`` or by ``exit()``; each alone by its own ``exit()``."""

    def exit(self, error: BaseException | None = None) -> None:
        first: Exception | None = None
        for mesh in self:
            try:
                mesh.exit(error)
            except Exception as e:
                first = first or e
        if first is not None:
            raise first

    def __enter__(self) -> Meshes:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        self.exit(e)


def local_meshes(
    *, meshes: int = 1, hosts_per_mesh: int = 1, gpus_per_host: int | None = None, **options: Any
) -> Meshes:
    """Start several meshes, at the same time and independent of each other: what ends one leaves the others.

    ``options`` are those of ``local_mesh`` but for ``hosts``; ``name="a"`` calls them a_0, a_1 ... The list is a
    context manager that ends those that are left. LaunchError where one does not come up: then none is left.
    """
    check_count("meshes", meshes)
    name = options.pop("name", None)
    parts = part_of_gpus(Options(hosts=hosts_per_mesh, gpus_per_host=gpus_per_host, **options), meshes)
    starts: list[Start] = []
    found = Meshes()
    try:
        for index, part in enumerate(parts):
            starts.append(Start(part, None if name is None else f"{name}_{index}"))
        found.extend(start.finish(None) for start in starts)
    except BaseException:
        found.exit()
        for start in starts:
            start.abort()
        raise
    return found


def local_meshes_and_bootstraps(
    *,
    meshes: int = 1,
    hosts_per_mesh: int = 1,
    gpus_per_host: int | None = None,
    auto_epoch: bool = False,
    **options: Any,
) -> tuple[Meshes, Bootstrap]:
    """As ``local_meshes``, with a handle to kill and start their processes: for tests of faults."""
    bootstrap = _bootstrap(meshes, hosts_per_mesh, gpus_per_host, auto_epoch, options)
    try:
        return Meshes([world.hand_out() for world in list(bootstrap.worlds.values())]), bootstrap
    except BaseException:
        bootstrap.exit()
        raise


def local_mesh_provider(
    *,
    meshes: int = 1,
    hosts_per_mesh: int = 1,
    gpus_per_host: int | None = None,
    auto_epoch: bool = False,
    **options: Any,
) -> tuple[MeshProvider, Bootstrap]:
    """Ask for the processes of several meshes; the provider hands out each that is healthy, once.

    ``options`` are those of ``local_mesh`` but for ``hosts``.
    """
    bootstrap = _bootstrap(meshes, hosts_per_mesh, gpus_per_host, auto_epoch, options)
    return MeshProvider(bootstrap), bootstrap


def _bootstrap(meshes: int, hosts: int, gpus: int | None, auto_epoch: bool, options: dict[str, Any]) -> Bootstrap:
    name = options.pop("name", None) or "mesh"
    return Bootstrap(Options(hosts=hosts, gpus_per_host=gpus, **options), meshes, auto_epoch, name)
