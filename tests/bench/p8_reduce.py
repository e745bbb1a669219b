"""P8: ``reduce`` over a mesh dim, 1 MB and 64 MB, 2 workers.

Reference: the bare gloo all-reduce between two plain processes, in turn with ours: of a fresh copy for ``reduce``,
which returns a new tensor, and in place for ``reduce_``.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from typing import Any

import torch

from tests.bench._mesh import mesh_of
from tests.bench._plain import PlainProcesses
from tests.bench._report import Line, interleaved, main, median

WORKERS = 2


def form_group(rank: int, kept: dict[str, Any], directory: str) -> None:
    import os

    import torch.distributed as dist

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = dist.FileStore(f"{directory}/store", WORKERS)
    kept["group"] = dist.ProcessGroupGloo(store, rank, WORKERS)


def bare_all_reduce(rank: int, kept: dict[str, Any], numel: int, count: int, is_copied: bool) -> float:
    """Seconds a call."""
    group = kept["group"]
    tensor = torch.zeros(numel)
    group.barrier().wait()
    began = time.perf_counter()
    for _ in range(count):
        value = tensor.clone() if is_copied else tensor
        group.allreduce([value]).wait()
    return (time.perf_counter() - began) / count


def measure(quick: bool) -> Iterator[Line]:
    with (
        tempfile.TemporaryDirectory() as directory,
        mesh_of(WORKERS) as mesh,
        PlainProcesses(WORKERS) as plain,
    ):
        plain.call(form_group, directory)
        for megabytes, count in ((1, 50), (64, 3)):
            numel = megabytes << 18
            with mesh.activate():
                tensor = torch.zeros(numel)

            def ours(tensor: Any = tensor, count: int = count, in_place: bool = False) -> float:
                mesh.sync()
                began = time.perf_counter()
                for _ in range(count):
                    tensor.reduce_("gpu") if in_place else tensor.reduce("gpu")
                mesh.sync()
                return (time.perf_counter() - began) * 1e3 / count

            def bare(numel: int = numel, count: int = count, is_copied: bool = False) -> float:
                return max(plain.call(bare_all_reduce, numel, count, is_copied)) * 1e3

            fns = (
                ours,
                lambda bare=bare: bare(is_copied=True),
                lambda ours=ours: ours(in_place=True),
                bare,
            )
            interleaved(1, *fns)
            found = [median(times) for times in interleaved(2 if quick else 7, *fns)]
            del tensor, ours, fns
            for what, mine, reference, reference_is in (
                ("reduce", found[0], found[1], "bare gloo on a fresh copy"),
                ("reduce_", found[2], found[3], "bare gloo in place"),
            ):
                yield Line(
                    "P8",
                    f"{what} {megabytes} MB over {WORKERS} workers",
                    mine,
                    "ms",
                    goal=1.05,
                    reference=reference,
                    reference_is=reference_is,
                    details={"calls_a_run": count},
                )


if __name__ == "__main__":
    main("p8_reduce", measure)
