"""P5: a function that does next to nothing on each of 4 workers, and its results here.

References: the same through torch.multiprocessing pipes written by hand, in turn with ours; torchmonarch where
``--peers`` has installed it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import torch

import monarch_lab as ml
from tests.bench import _peers
from tests.bench._mesh import mesh_of
from tests.bench._plain import PlainProcesses
from tests.bench._report import Line, interleaved, main, median, percentile

WORKERS = 4
TURN = 50  # calls in a row of one system


def measure(quick: bool) -> Iterator[Line]:
    calls = 100 if quick else 500
    with mesh_of(WORKERS) as mesh, PlainProcesses(WORKERS) as plain:

        @ml.remote
        def two():
            return torch.full((), 2)

        def ours() -> None:
            assert ml.fetch_all(two()).tolist() == [[2] * WORKERS]

        def pipes() -> None:
            assert plain.call(lambda rank, kept: 2) == [2] * WORKERS

        def turn(call: Callable[[], None], times: list[float]) -> Callable[[], float]:
            def run() -> float:
                for _ in range(TURN):
                    began = time.perf_counter()
                    call()
                    times.append((time.perf_counter() - began) * 1e3)
                return times[-1]

            return run

        our_times: list[float] = []
        pipe_times: list[float] = []
        with mesh.activate():
            interleaved(1, turn(ours, []), turn(pipes, []))
            interleaved(calls // TURN, turn(ours, our_times), turn(pipes, pipe_times))
    details = {"calls": calls, "p99_ms": percentile(our_times, 0.99), "pipes_p99_ms": percentile(pipe_times, 0.99)}
    yield Line(
        "P5",
        f"round trip to {WORKERS} workers",
        median(our_times),
        "ms",
        goal=1.2,
        reference=median(pipe_times),
        reference_is="pipes",
        details=details,
    )
    yield Line(
        "P5",
        "round trip, 99 % of calls within",
        percentile(our_times, 0.99),
        "ms",
        goal=3,
        reference=median(our_times),
        reference_is="its median",
    )
    if (theirs := _peers.probe_monarch("round-trip", quick)) is not None:
        yield Line(
            "P5",
            "round trip, times faster than torchmonarch",
            median(our_times),
            "ms",
            goal=4,
            at_least=True,
            inverse=True,
            reference=theirs["ms"],
            reference_is="torchmonarch",
            details=theirs,
        )


if __name__ == "__main__":
    main("p5_round_trip", measure)
