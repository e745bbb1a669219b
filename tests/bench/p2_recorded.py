"""P2: a recorded region of 1,000 small adds, replayed; one worker runs it, the value is fetched and checked.

References: the same adds in local eager torch. Several replays in a row stand for a loop of a cell.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch

import monarch_lab as ml
from tests.bench._mesh import mesh_of
from tests.bench._report import Line, interleaved, main, median

OPS = 1000
REPLAYS = 20


def region(z: Any, y: Any) -> Any:
    for _ in range(OPS):
        z = z + y
    return z


def measure(quick: bool) -> Iterator[Line]:
    turns = 7 if quick else 31
    with mesh_of(1) as mesh:
        recorded = ml.compile(region)
        issued: list[float] = []

        def run(fn: Any, zero: Any, one: Any, value: Any) -> float:
            z = zero
            began, cpu = time.perf_counter(), time.thread_time()
            for _ in range(REPLAYS):
                z = fn(z, one)
            issued.append(time.thread_time() - cpu)
            got = float(value(z)[0])
            wall = time.perf_counter() - began
            assert got == OPS * REPLAYS, got
            return wall * 1e6 / (OPS * REPLAYS)

        with mesh.activate():
            ours = torch.zeros(16), torch.ones(16)
        local = torch.zeros(16), torch.ones(16)

        def on_mesh() -> float:
            with mesh.activate():
                return run(recorded, *ours, ml.inspect)

        interleaved(3, on_mesh, lambda: run(region, *local, lambda z: z))
        issued.clear()
        walls, eager = interleaved(turns, on_mesh, lambda: run(region, *local, lambda z: z))
        cpu = [s * 1e6 / (OPS * REPLAYS) for s in issued[::2]]
    yield Line(
        "P2",
        "recorded small ops, end to end, 1 worker",
        median(walls),
        "us/op",
        goal=1.3,
        reference=median(eager),
        reference_is="local eager",
        details={"runs": turns, "ops": OPS, "replays": REPLAYS, "best_us": min(walls), "best_eager_us": min(eager)},
    )
    yield Line("P2", "recorded small ops, CPU of the calling thread", median(cpu), "us/op", goal=0.1, absolute=True)


if __name__ == "__main__":
    main("p2_recorded", measure)
