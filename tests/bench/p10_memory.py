"""P10: memory of idle workers: the proportional set size of 4 that have each run an op.

Reference: 4 plain processes that torch.multiprocessing spawned and that have run an op too. The spare for a later mesh
(agent, guard and zygote; config.Settings.warm_pool) is a line of its own, against one such process.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence

import psutil
import torch

from monarch_lab.session.pool import warm_pool
from tests.bench._mesh import mesh_of
from tests.bench._plain import PlainProcesses
from tests.bench._report import Line, main
from tests.bench.peers._util import mem

WORKERS = 4


def mean_pss(pids: Sequence[int]) -> float:
    return sum(mem(pid)["Pss"] for pid in pids) / len(pids)


def spare_pss() -> dict[str, float]:
    """MB of the spare's processes, by what they are, while no mesh runs that would share its pages."""
    os.environ.update(MONARCH_LAB_WARM_POOL="1", MONARCH_LAB_WARM_POOL_DELAY="0")
    with mesh_of(1):
        while not warm_pool.is_ready:
            time.sleep(0.05)
    agents = [child for child in psutil.Process().children() if "monarch_lab.agent" in child.cmdline()]
    parts = [*agents, *(below for agent in agents for below in agent.children(recursive=True))]
    found = {_kind(process): mem(process.pid)["Pss"] for process in parts}
    warm_pool.clear()
    return found


def _kind(process: psutil.Process) -> str:
    command = " ".join(process.cmdline())
    return next((kind for kind in ("zygote", "guard") if f"agent.{kind}" in command), "agent")


def measure(quick: bool) -> Iterator[Line]:
    # One after the other: what both map would count half in each.
    with mesh_of(WORKERS) as mesh:
        with mesh.activate():
            torch.ones(2) + 1  # noqa: B018
        mesh.sync()
        processes = mesh.status().processes
        ours = mean_pss([p.pid for p in processes])
        rss = sum(p.rss_bytes for p in processes) / len(processes) / 2**20
    spare = spare_pss()
    with PlainProcesses(WORKERS) as plain:
        spawned = mean_pss(plain.pids)
    details = {"workers": WORKERS, "mean_rss_MB": rss}
    yield Line("P10", "an idle worker, PSS", ours, "MB", goal=45, absolute=True, details=details)
    yield Line(
        "P10",
        "an idle worker, PSS",
        ours,
        "MB",
        goal=0.3,
        reference=spawned,
        reference_is="a spawned torch process",
    )
    yield Line(
        "P10",
        "the spare for a later mesh, PSS",
        sum(spare.values()),
        "MB",
        goal=1.5,
        reference=spawned,
        reference_is="a spawned torch process",
        details={f"{kind}_MB": value for kind, value in spare.items()},
    )


if __name__ == "__main__":
    main("p10_memory", measure)
