"""Meshes on this machine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from monarch_lab.config import ControllerParams, LoggingLocation, SocketType, SupervisionParams
from monarch_lab.session.options import Options
from monarch_lab.session.start import Start

if TYPE_CHECKING:
    from monarch_lab.controller.mesh import DeviceMesh
    from monarch_lab.session.session import Progress


def local_mesh(
    *,
    hosts: int = 1,
    gpus_per_host: int | None = None,
    name: str | None = None,
    device: str | None = None,
    socket_type: SocketType | str = SocketType.UNIX,
    logging_location: LoggingLocation | str = LoggingLocation.FILE,
    supervision_params: SupervisionParams | None = None,
    controller_params: ControllerParams | None = None,
    labels: Mapping[str, str] | None = None,
    env: Mapping[str, str] | None = None,
) -> DeviceMesh:
    """Start a mesh of worker processes on this machine, with dims ``("host", "gpu")``.

    hosts               simulated hosts: the size of dim "host"
    gpus_per_host       workers for each; None: one for each visible GPU, or 2 CPU workers where there is none
    name                "mesh" by default; must not be that of a running mesh
    device              "cpu" (gloo) or "cuda" (NCCL); None: cuda where there are GPUs enough. With "cuda" and more
                        workers than GPUs they share them in turn, and those that share one reduce with gloo
    socket_type         "unix": sockets in a directory of this user's; "tcp": loopback, encrypted
    logging_location    where C code of the workers writes: "file", or "default", where the kernel's own goes.
                        What Python prints appears in the cell either way
    supervision_params  how the host is watched (ml.SupervisionParams)
    controller_params   when an operation counts as stuck (ml.ControllerParams)
    labels              strings of yours, shown in ``get_info()`` and where meshes are listed
    env                 environment variables of the workers

    The handle is a context manager; ``.exit()`` stops it too. Raises ValueError for a number of workers that cannot
    be, LaunchError (with what the process printed) where a worker does not come up.
    """
    options = Options(
        hosts=hosts,
        gpus_per_host=gpus_per_host,
        device=device,
        socket_type=socket_type,
        logging_location=logging_location,
        supervision_params=supervision_params,
        controller_params=controller_params,
        labels=labels,
        env=env,
    )
    return Start(options, name).finish(None)


def start_local(*, on_progress: Progress | None, name: str | None, **options: Any) -> DeviceMesh:
    """As ``local_mesh``; ``on_progress(stage, done, total)`` hears how far it is."""
    return Start(Options(**options), name).finish(on_progress)
