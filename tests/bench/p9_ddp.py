"""P9: the digits classifier trained data-parallel, in a ``%%spmd`` cell and as a ``%%mesh`` cell, in a real kernel.

Reference: the same script under torchrun. The ``%%mesh`` cell is written as in notebooks/01_first_mesh.ipynb, once as
it stands and once with its step recorded. All read the same batches from the same weights and must end at one loss.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.bench._notebook import ours
from tests.bench._report import Line, interleaved, main, median
from tests.kernel import Kernel

LIMIT_S = 120
# What the script, the cell and the reference share. Labels and pixels are small enough to be in every process whole.
DATA = """
import time
import torch
from sklearn.datasets import load_digits
from torch import nn
digits = load_digits()
size = len(digits.target) // {workers} * {workers}
images = torch.tensor(digits.data, dtype=torch.float32)[:size] / 16
labels = torch.tensor(digits.target)[:size]
WARM_UP, STEPS, BATCH = {warm_up}, {steps}, {batch}
def starts():
    return [n * BATCH % (size // {workers} - BATCH) for n in range(WARM_UP + STEPS)]
"""
# Runs as it stands under torchrun and in a %%spmd cell.
SCRIPT = """
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
dist.init_process_group("gloo")
torch.set_num_threads(1)
rank, world_size = dist.get_rank(), dist.get_world_size()
x, y = images.chunk(world_size)[rank], labels.chunk(world_size)[rank]
torch.manual_seed(0)
net = DDP(nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)))
optimizer = torch.optim.AdamW(net.parameters(), lr=5e-3)
for n, start in enumerate(starts()):
    if n == WARM_UP:
        dist.barrier()
        began = time.perf_counter()
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(net(x[start : start + BATCH]), y[start : start + BATCH])
    loss.backward()
    optimizer.step()
loss = loss.detach()
dist.all_reduce(loss)
if rank == 0:
    print("STEPS", STEPS / (time.perf_counter() - began), "LOSS", float(loss) / world_size)
"""
MESH = """%%mesh
mesh = ml.get_active_mesh()
x, y = mesh.shard((images, labels), "gpu")
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
optimizer = torch.optim.AdamW(net.parameters(), lr=5e-3)
def step(batch, target):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(net(batch), target)
    loss.backward()
    for p in net.parameters():
        p.grad.reduce_("gpu", "avg")
    optimizer.step()
    return loss.detach()
{wrap}
for n, start in enumerate(starts()):
    if n == WARM_UP:
        ml.fetch_shard(loss).result()
        began = time.perf_counter()
    loss = step(x[start : start + BATCH], y[start : start + BATCH])
last = float(loss.reduce("gpu", "avg"))
print("STEPS", STEPS / (time.perf_counter() - began), "LOSS", last)
"""


class Training:
    """Steps a second of each way, and the loss each ended with, on ``workers`` processes."""

    def __init__(self, kernel: Kernel, scratch: Path, workers: int, batch: int, steps: int) -> None:
        self.kernel, self.workers = kernel, workers
        self.losses: dict[str, float] = {}
        data = DATA.format(warm_up=20, steps=steps, batch=batch, workers=workers)
        self.spmd_cell = f"%%spmd\n{data}{SCRIPT}"
        self.script = scratch / f"train_{batch}.py"
        self.script.write_text(data + SCRIPT)
        assert kernel.run(f"import monarch_lab as ml\n{data}") == "ok", kernel.errors()

    def torchrun(self) -> float:
        nodes = ["--standalone", f"--nproc-per-node={self.workers}"]
        command = [sys.executable, "-m", "torch.distributed.run", *nodes, str(self.script)]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, env=env)
        assert done.returncode == 0, done.stderr[-2000:]
        return self._read("torchrun", done.stdout)

    def spmd(self) -> float:
        return self._cell("spmd", self.spmd_cell)

    def mesh(self) -> float:
        return self._cell("mesh", MESH.format(wrap=""))

    def recorded(self) -> float:
        return self._cell("recorded", MESH.format(wrap="step = ml.compile(step)"))

    def _cell(self, way: str, code: str) -> float:
        assert self.kernel.run(code, timeout=LIMIT_S) == "ok", self.kernel.errors()
        return self._read(way, self.kernel.text())

    def _read(self, way: str, text: str) -> float:
        words = text.split()
        self.losses[way] = float(words[words.index("LOSS") + 1])
        return float(words[words.index("STEPS") + 1])


def measure(quick: bool) -> Iterator[Line]:
    turns, steps = (1, 50) if quick else (5, 1500)
    for workers, batch in ((1, 64), (1, 512), (2, 64)):
        with tempfile.TemporaryDirectory() as scratch, ours(workers) as kernel:
            run = Training(kernel, Path(scratch), workers, batch, steps)
            ways: list[Callable[[], float]] = [run.torchrun, run.spmd, run.mesh, run.recorded]
            torchrun, *found = (median(values) for values in interleaved(turns, *ways))
        assert max(run.losses.values()) - min(run.losses.values()) < 1e-4 * run.losses["torchrun"] + 1e-6, run.losses
        for what, ours_is in zip(("%%spmd cell", "%%mesh cell", "%%mesh cell, recorded"), found, strict=True):
            yield Line(
                "P9",
                f"digits, batch {batch}, {workers} worker{'s' * (workers > 1)}: {what}",
                ours_is,
                "steps/s",
                goal=0.97,
                at_least=True,
                reference=torchrun,
                reference_is="torchrun, DDP",
                details={"steps": steps, "runs": turns, "losses": run.losses},
            )


if __name__ == "__main__":
    main("p9_ddp", measure)
