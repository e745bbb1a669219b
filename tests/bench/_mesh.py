"""The mesh a benchmark measures."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

import monarch_lab as ml


def _one_thread() -> None:
    torch.set_num_threads(1)


@contextmanager
def mesh_of(workers: int) -> Iterator[Any]:
    """``workers`` CPU workers that compute on one thread each, as this process then does: a ratio of equals."""
    torch.set_num_threads(1)
    os.environ.setdefault("MONARCH_LAB_WARM_POOL", "0")  # its import would run beside what is measured
    with ml.local_mesh(gpus_per_host=workers, device="cpu") as mesh:
        with mesh.activate():
            for rank in range(workers):
                ml.call_on_shard_and_fetch(_one_thread, shard={"host": 0, "gpu": rank}).result()
        yield mesh
