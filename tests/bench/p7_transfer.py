"""P7: 256 MB (and 1 GB) from a worker to the kernel; 256 MB to 4 workers, whole and in parts; the look at a value.

Reference: a copy of as much into memory that was written before, in turn with ours. A fetch ends when the tensor is
there; with ``read`` its pages have also been read once. A replicate or shard ends when each worker has answered for
its value.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from typing import Any

import torch

import monarch_lab as ml
from tests.bench._mesh import mesh_of
from tests.bench._report import Line, interleaved, main, median, seconds

WORKERS = 4
MEGABYTES = 1 << 18  # float32 elements


def measure(quick: bool) -> Iterator[Line]:
    turns = 2 if quick else 5
    with mesh_of(WORKERS) as mesh:
        for megabytes in (256,) if quick else (256, 1024):
            yield from _fetch(mesh, megabytes, turns)
        yield _put(mesh, 256, turns, "replicated to", mesh.replicate)
        yield _put(mesh, 256, turns, "sharded over", lambda t: mesh.shard(t, "gpu"))


def _copies(megabytes: int) -> Any:
    source, target = torch.ones(megabytes * MEGABYTES), torch.ones(megabytes * MEGABYTES)
    return lambda: seconds(lambda: target.copy_(source)) * 1e3


def _fetch(mesh: Any, megabytes: int, turns: int) -> Iterator[Line]:
    with mesh.slice(gpu=0).activate():
        value = torch.ones(megabytes * MEGABYTES)
    mesh.sync()
    reads: list[float] = []

    def fetch(value: Any = value) -> float:
        began = time.perf_counter()
        found = ml.inspect(value)
        fetched = (time.perf_counter() - began) * 1e3
        found.sum()
        reads.append((time.perf_counter() - began) * 1e3)
        return fetched

    first = fetch()
    reads.clear()
    mine, copy = (median(times) for times in interleaved(turns, fetch, _copies(megabytes)))
    yield Line(
        "P7",
        f"{megabytes} MB from a worker to the kernel, after the first",
        mine,
        "ms",
        goal=0.6,
        reference=copy,
        reference_is="memcpy",
        at_least=True,
        inverse=True,
        details={"first_ms": first, "with_a_read_ms": median(reads)},
    )
    found = ml.inspect(value)
    views = [seconds(lambda found=found: found.numpy()[: 1 << 20]) * 1e3 for _ in range(turns)]
    yield Line("P7", f"a view of {megabytes} MB that were fetched", median(views), "ms", goal=1, absolute=True)
    del found, value, fetch
    gc.collect()


def _put(mesh: Any, megabytes: int, turns: int, how: str, put: Any) -> Line:
    source = torch.ones(megabytes * MEGABYTES)

    def timed() -> float:
        began = time.perf_counter()
        value = put(source)
        ml.fetch_all(value[:1])
        took = (time.perf_counter() - began) * 1e3
        del value
        mesh.sync()
        return took

    timed()
    mine, copy = (median(times) for times in interleaved(turns, timed, _copies(megabytes)))
    return Line(
        "P7",
        f"{megabytes} MB {how} {WORKERS} workers",
        mine,
        "ms",
        goal=1.5,
        reference=copy,
        reference_is="memcpy",
    )


if __name__ == "__main__":
    main("p7_transfer", measure)
