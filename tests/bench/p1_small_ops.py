"""P1: 1,000 small adds in a row, issued one by one by a cell, run by one worker, the value fetched and checked.

References: the same cell in local eager torch, and torchmonarch's tensor engine where ``--peers`` has installed it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch

import monarch_lab as ml
from tests.bench import _peers
from tests.bench._mesh import mesh_of
from tests.bench._report import Line, interleaved, main, median

OPS = 1000
CELL = compile(f"for _ in range({OPS}):\n    z = z + y\n", "<cell>", "exec")


def measure(quick: bool) -> Iterator[Line]:
    turns = 7 if quick else 31
    with mesh_of(1) as mesh:
        issued: list[float] = []

        def run(names: dict[str, Any], value: Any) -> float:
            names.update(z=names["zero"], y=names["one"])
            began, cpu = time.perf_counter(), time.thread_time()
            exec(CELL, names)
            got = float(value(names["z"])[0])
            issued.append(time.thread_time() - cpu)
            wall = time.perf_counter() - began
            assert got == OPS, got
            return wall * 1e6 / OPS

        with mesh.activate():
            ours = {"zero": torch.zeros(16), "one": torch.ones(16)}
        local = {"zero": torch.zeros(16), "one": torch.ones(16)}

        def on_mesh() -> float:
            with mesh.activate():
                return run(ours, ml.inspect)

        interleaved(3, on_mesh, lambda: run(local, lambda z: z))
        issued.clear()
        walls, eager = interleaved(turns, on_mesh, lambda: run(local, lambda z: z))
        cpu = [s * 1e6 / OPS for s in issued[::2]]
    details = {"runs": turns, "ops": OPS, "best_us": min(walls), "best_eager_us": min(eager)}
    yield Line(
        "P1",
        "small ops, end to end, 1 worker",
        median(walls),
        "us/op",
        goal=4,
        reference=median(eager),
        reference_is="local eager",
        details=details,
    )
    yield Line("P1", "small ops, CPU of the issuing thread", median(cpu), "us/op", goal=10, absolute=True)
    if (theirs := _peers.probe_monarch("ops", quick)) is not None:
        yield Line(
            "P1",
            "small ops, times faster than torchmonarch's tensor engine",
            median(walls),
            "us/op",
            goal=200,
            at_least=True,
            inverse=True,
            reference=theirs["us_per_op"],
            reference_is="torchmonarch",
            details=theirs,
        )


if __name__ == "__main__":
    main("p1_small_ops", measure)
