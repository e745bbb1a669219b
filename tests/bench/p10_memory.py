"""P10: memory of idle workers: the proportional set size of 4 that have each run an op.

Reference: 4 plain processes that torch.multiprocessing spawned and that have run an op too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from tests.bench._mesh import mesh_of
from tests.bench._plain import PlainProcesses
from tests.bench._report import Line, main
from tests.bench.peers._util import mem

WORKERS = 4


def mean_pss(pids: Sequence[int]) -> float:
    return sum(mem(pid)["Pss"] for pid in pids) / len(pids)


def measure(quick: bool) -> Iterator[Line]:
    # One after the other: what both map would count half in each.
    with mesh_of(WORKERS) as mesh:
        with mesh.activate():
            torch.ones(2) + 1  # noqa: B018
        mesh.sync()
        processes = mesh.status().processes
        ours = mean_pss([p.pid for p in processes])
        rss = sum(p.rss_bytes for p in processes) / len(processes) / 2**20
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


if __name__ == "__main__":
    main("p10_memory", measure)
