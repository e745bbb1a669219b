"""Meshes on this machine."""

from __future__ import annotations

import glob
import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

from monarch_lab import config
from monarch_lab.errors import UsageValueError
from monarch_lab.session.pool import warm_pool
from monarch_lab.session.record import Recorder
from monarch_lab.session.registry import free_name, meshes, reserved
from monarch_lab.session.relay import Relay
from monarch_lab.supervisor import Ground, MeshLaunch, Supervisor

if TYPE_CHECKING:
    from monarch_lab.controller.mesh import DeviceMesh
    from monarch_lab.session.session import Progress


def local_mesh(
    *,
    hosts: int = 1,
    gpus_per_host: int | None = None,
    name: str | None = None,
    device: str | None = None,
    env: Mapping[str, str] | None = None,
) -> DeviceMesh:
    """Start a mesh of worker processes on this machine, with dims ``("host", "gpu")``.

    hosts           simulated hosts: the size of dim "host"
    gpus_per_host   workers for each; None: one for each visible GPU, or 2 CPU workers where there is none
    name            "mesh" by default; must not be that of a running mesh
    device          "cpu" (gloo) or "cuda"; None: cuda where there are GPUs enough
    env             environment variables of the workers

    The handle is a context manager; ``.exit()`` stops it too. Raises ValueError for a number of workers that cannot
    be, LaunchError (with what the process printed) where a worker does not come up.
    """
    return start_local(hosts=hosts, gpus_per_host=gpus_per_host, name=name, device=device, env=env, on_progress=None)


def start_local(
    *,
    hosts: int,
    gpus_per_host: int | None,
    name: str | None,
    device: str | None,
    env: Mapping[str, str] | None,
    on_progress: Progress | None,
) -> DeviceMesh:
    """As ``local_mesh``; ``on_progress(stage, done, total)`` hears how far it is."""
    settings = config.load()
    chosen, per_host = _devices(hosts, gpus_per_host, device, settings)
    if name is not None and not name.isidentifier():
        raise UsageValueError(f"{name!r} is no name for a mesh: use letters, digits and _")
    if name is not None and (name in meshes() or name in reserved):
        raise UsageValueError(f'mesh "{name}" is running already: stop it first, or choose another name')
    launch = MeshLaunch(
        name=name or free_name(),
        hosts=hosts,
        per_host=per_host,
        device=chosen,
        seed=0,
        env=dict(env or {}),
        python_path=[p for p in sys.path if p],
        cwd=os.getcwd(),
    )
    recorder = Recorder(launch)
    relay = Relay(recorder.note)
    reserved.add(launch.name)
    supervisor = Supervisor(launch, settings, relay, warm_pool.take(Ground.of(launch, settings)))
    try:
        supervisor.start()
        recorder.begin(supervisor)
        # The workers' torch is imported meanwhile: importing ours first would double the time of a first mesh.
        from monarch_lab.session.session import Session

        session = Session(launch, settings, supervisor, relay)
        session.start(on_progress)
    except BaseException:
        supervisor.stop()
        raise
    finally:
        reserved.discard(launch.name)
    warm_pool.want(launch, settings)
    return session.mesh


def _visible_gpus() -> int:
    if "torch" not in sys.modules and not glob.glob("/dev/nvidia[0-9]*") and not os.path.exists("/dev/kfd"):
        return 0  # without a device file there is no need to import torch for the question
    from monarch_lab.controller.state import visible_gpus

    return visible_gpus()


def _devices(hosts: int, per_host: int | None, device: str | None, settings: config.Settings) -> tuple[str, int]:
    for what, number in (("hosts", hosts), ("workers for each host", per_host)):
        if number is not None and (not isinstance(number, int) or isinstance(number, bool) or number < 1):
            raise UsageValueError(f"a mesh has at least 1 of {what}, not {number!r}")
    if device not in (None, "cpu", "cuda"):
        raise UsageValueError(f'device is "cpu" or "cuda", not {device!r}')
    gpus = _visible_gpus() if device != "cpu" else 0
    if device == "cuda" and gpus < hosts * (per_host or 1):
        raise UsageValueError(
            f"{hosts * (per_host or 1)} workers with a GPU each were asked for and this machine has {gpus}: use --cpu "
            '(device="cpu") for CPU workers'
        )
    if device is None:
        device = "cuda" if gpus and gpus >= hosts * (per_host or 1) else "cpu"
    if per_host is None:
        per_host = gpus // hosts if device == "cuda" else settings.default_cpu_workers
    return device, per_host
