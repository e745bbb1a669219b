"""What a mesh of GPUs must do, as one script that prints a table:  python -m tests.gpu.check [--device cpu] [--json F]

Every check says what it is about and raises where it does not hold. On one GPU two workers share it, which is what
most checks need; those of NCCL want two GPUs and say so. ``--device cpu`` runs the same on CPU workers: that tries the
checks themselves, and what they have in common with a GPU's, on a machine without one (tests/gpu/test_check.py).
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch

import monarch_lab as ml

Check = Callable[["Place"], None]
CHECKS: list[tuple[str, Check]] = []
LIMIT_S = 460  # for all: the machine may be lent for eight minutes


class Missing(Exception):
    """What a check needs is not here."""


class Place:
    """The mesh of two workers that checks share, and the device it is on."""

    def __init__(self, device: str, mesh: Any) -> None:
        self.device, self.mesh = device, mesh
        self.on_gpu = device == "cuda"
        self.name = "cuda:0" if self.on_gpu else "cpu"  # of a worker's device, by torch's name
        self.gpus = torch.cuda.device_count() if self.on_gpu else 0


def check(function: Check) -> Check:
    CHECKS.append(((function.__doc__ or "").strip().rstrip("."), function))
    return function


def same(found: Any, expected: Any, tolerance: float = 0.0) -> None:
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance, check_device=False)


@check
def default_device(p: Place) -> None:
    """Factories and literals of a cell live on the workers' device."""
    made = [torch.rand(3), torch.zeros(()), torch.tensor([1, 2]), torch.arange(4), torch.eye(2), torch.full((2,), 0.5)]
    for t in made:
        assert str(t.device) == p.name, (t.device, p.name)
        assert t.is_cuda == p.on_gpu
    for there in ml.fetch_all(ml.remote(_device_of)(made[0])).flatten().tolist():
        assert there == float(p.on_gpu)


def _device_of(t: torch.Tensor) -> torch.Tensor:
    return torch.full((), float(t.is_cuda), device="cpu")


@check
def queries(p: Place) -> None:
    """torch.cuda answers for the mesh inside a cell."""
    assert torch.cuda.is_available() == p.on_gpu
    assert torch.cuda.device_count() == int(p.on_gpu)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    if p.on_gpu:
        assert torch.cuda.current_device() == 0
        assert torch.cuda.get_device_name(0)
        assert torch.cuda.get_device_properties(0).total_memory > 1 << 30
        assert torch.cuda.get_device_capability()[0] >= 3
        torch.cuda.set_device(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    moved = torch.nn.Linear(4, 2).to(device)
    assert str(moved.weight.device) == p.name
    if p.on_gpu:
        assert str(torch.ones(2, device="cpu").cuda().device) == p.name
        assert str(torch.ones(2, device="cpu").device) == "cpu"


@check
def arithmetic(p: Place) -> None:
    """Ops, views, in-place ops and indexing give what the CPU gives."""
    x = torch.arange(12.0).reshape(3, 4)
    y = (x @ x.T).softmax(-1)
    x[1] = 7
    x.add_(1).t_()
    with ml.no_mesh.activate():
        expected = torch.arange(12.0).reshape(3, 4)
        softmax = (expected @ expected.T).softmax(-1)
        expected[1] = 7
        expected.add_(1).t_()
    same(ml.inspect(x), expected)
    same(ml.inspect(y), softmax, 1e-5)
    same(ml.inspect(x[x > 5]), expected[expected > 5])


@check
def random_numbers(p: Place) -> None:
    """All ranks draw equal numbers, vary() parts them, a state can be put back."""
    torch.manual_seed(3)
    a = ml.fetch_all(torch.randn(4)).reshape(2, 4)
    same(a[0], a[1])
    torch.cuda.manual_seed_all(3)
    same(ml.fetch_all(torch.randn(4)).reshape(2, 4), a)
    with ml.random.vary("gpu"):
        b = ml.fetch_all(torch.randn(4)).reshape(2, 4)
    assert not torch.equal(b[0], b[1])


def _step(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor, steps: int) -> list[torch.Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(steps):
        loss = torch.nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


@check
def training(p: Place) -> None:
    """A model trains as it does locally."""
    with ml.no_mesh.activate():
        torch.manual_seed(0)
        local = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 4))
        x, y = torch.randn(8, 16), torch.randn(8, 4)
        model = copy.deepcopy(local)
        expected = [float(loss) for loss in _step(local, x, y, 5)]
    state = model.state_dict()
    there = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 4))
    there.load_state_dict({name: p.mesh.replicate(value) for name, value in state.items()})
    losses = [float(ml.inspect(loss)) for loss in _step(there, p.mesh.replicate(x), p.mesh.replicate(y), 5)]
    assert all(abs(a - b) < 1e-4 for a, b in zip(losses, expected, strict=True)), (losses, expected)


@check
def mixed_precision(p: Place) -> None:
    """autocast and GradScaler of the device."""
    kind = torch.float16 if p.on_gpu else torch.bfloat16
    model = torch.nn.Linear(8, 8)
    with torch.autocast(p.device, dtype=kind):
        out = model(torch.ones(2, 8))
    assert out.dtype is kind
    scaler = torch.amp.GradScaler(p.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler.scale(out.float().sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() > 0


@check
def switches(p: Place) -> None:
    """Precision and attention switches of the kernel hold on the workers."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    asked = ml.remote(_flags)
    with sdpa_kernel(SDPBackend.MATH):
        assert ml.inspect(asked(torch.ones(()))).tolist() == [1.0, 0.0]
    assert ml.inspect(asked(torch.ones(()))).tolist() == [1.0, 1.0]


def _flags(like: torch.Tensor) -> torch.Tensor:
    from torch.backends import cuda

    return torch.tensor([float(cuda.math_sdp_enabled()), float(cuda.flash_sdp_enabled())], device="cpu")


@check
def reductions(p: Place) -> None:
    """reduce of every kind over two workers, those that share a GPU by way of host memory."""
    r = p.mesh.rank("gpu").float() + 1
    with ml.no_mesh.activate():
        wanted = {"sum": 3.0, "avg": 1.5, "max": 2.0, "min": 1.0, "product": 2.0}
    for kind, value in wanted.items():
        assert ml.inspect(r.reduce("gpu", kind)).item() == value, kind
        assert str(r.reduce("gpu", kind).device) == p.name
    assert ml.inspect(r.reduce("gpu", "stack")).tolist() == [1.0, 2.0]
    parts = torch.stack([r, 10 * r]).reduce("gpu", "sum", scatter=True)
    assert ml.fetch_all(parts).flatten().tolist() == [3.0, 30.0]
    w = torch.ones(3, requires_grad=True)
    ((r * w).reduce("gpu", "avg").sum()).backward()
    assert ml.fetch_all(w.grad).reshape(2, 3)[:, 0].tolist() == [0.5, 1.0]


@check
def nccl(p: Place) -> None:
    """Workers with a GPU each reduce with NCCL."""
    if p.gpus < 2:
        raise Missing("two GPUs")
    with ml.local_mesh(gpus_per_host=2, device="cuda", name="nccl") as mesh, mesh.activate():
        big = torch.full((1 << 20,), 1.0) * (mesh.rank("gpu") + 1)
        assert ml.inspect(big.reduce("gpu"))[0].item() == 3.0
        name = ml.call_on_shard_and_fetch(_backend, shard={"gpu": 0}).result()
        assert name == "nccl", name


def _backend() -> str:
    from monarch_lab.worker.groups import current

    backends = current()._backends.values()
    return "nccl" if any(getattr(b, "_nccl", None) is not None for b in backends) else "gloo"


@check
def memory(p: Place) -> None:
    """What torch holds on the GPU is told, by rank."""
    kept = torch.ones(64, 1024, 1024)
    ml.inspect(kept.sum())
    if not p.on_gpu:
        assert torch.cuda.memory_allocated() == 0
        return
    assert torch.cuda.memory_allocated() >= kept.numel() * 4
    until = time.monotonic() + 10
    while not p.mesh.client.progress.device_bytes.get(0) and time.monotonic() < until:
        time.sleep(0.1)
    assert p.mesh.client.progress.device_bytes[0] >= kept.numel() * 4


@check
def failures(p: Place) -> None:
    """A failing op is told with its rank, and the mesh goes on; out of memory is one such failure."""
    try:
        torch.ones(2, 3) @ torch.ones(2, 3)
    except RuntimeError as e:
        assert "shape" in str(e)
    else:
        raise AssertionError("no error")
    if p.on_gpu:
        try:
            ml.inspect(torch.empty(1 << 50, dtype=torch.uint8)[0])
        except RuntimeError as e:
            assert "memory" in str(e)
        else:
            raise AssertionError("2**50 bytes were allocated")
    assert ml.inspect(torch.ones(2).sum()).item() == 2.0


@check
def refused(p: Place) -> None:
    """What would be about the kernel's own GPU is refused in a cell."""
    for name in ("Event", "Stream", "CUDAGraph"):
        if not hasattr(torch.cuda, name):
            continue
        try:
            getattr(torch.cuda, name)()
        except TypeError as e:
            assert "ml.remote" in str(e)
        else:
            raise AssertionError(name)


@check
def restart(p: Place) -> None:
    """A killed worker comes back on the same GPU; the other keeps its values."""
    with ml.local_mesh(gpus_per_host=2, device=p.device, name="again") as mesh:
        with mesh.activate():
            x = torch.full((2,), 5.0)
            assert ml.inspect(x, gpu=1).tolist() == [5.0, 5.0]
        mesh.restart([0])
        assert ml.inspect(x, gpu=1).tolist() == [5.0, 5.0]
        with mesh.activate():
            assert ml.inspect(torch.ones(2).reduce("gpu"), gpu=0).tolist() == [2.0, 2.0]


@check
def kernel_without_gpu(p: Place) -> None:
    """A kernel that sees no GPU drives workers that have one."""
    if not p.on_gpu:
        raise Missing("a GPU")
    program = (
        "import torch, monarch_lab as ml\n"
        "assert not torch.cuda.is_available()\n"
        "with ml.local_mesh(gpus_per_host=2, device='cuda', env={'CUDA_VISIBLE_DEVICES': '0'}) as m, m.activate():\n"
        "    assert torch.cuda.is_available()\n"
        "    with torch.autocast('cuda', dtype=torch.float16):\n"
        "        y = torch.nn.Linear(4, 4)(torch.ones(2, 4))\n"
        "    assert y.dtype is torch.float16 and y.is_cuda\n"
        "    print(ml.inspect(y.float().sum() * 0 + 1).item())\n"
    )
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout.strip() == "1.0", done.stderr[-1500:]


def run(device: str, only: str = "") -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    until = time.monotonic() + LIMIT_S
    with ml.local_mesh(gpus_per_host=2, device=device, name="check") as mesh:
        for about, function in CHECKS:
            if only and only not in function.__name__:
                continue
            began, verdict, note = time.monotonic(), "holds", ""
            try:
                if began > until:
                    raise Missing("time")
                with mesh.activate():
                    function(Place(device, mesh))
            except Missing as e:
                verdict, note = "not run", f"needs {e}"
            except Exception as e:
                verdict, note = "FAILS", f"{type(e).__name__}: {e}".splitlines()[0][:200]
                traceback.print_exc()
            seconds = time.monotonic() - began
            rows.append(dict(check=function.__name__, about=about, verdict=verdict, seconds=seconds, note=note))
            print(
                f"{function.__name__:20} {verdict:8} {seconds:6.1f} s  {about}{'; ' + note if note else ''}", flush=True
            )
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--only", default="", help="checks with this in their name")
    parser.add_argument("--json", help="also write the rows there")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        print("there is no GPU here: --device cpu tries the checks themselves on CPU workers")
        return 2
    what = torch.cuda.get_device_name(0) if options.device == "cuda" else "CPU workers"
    print(f"torch {torch.__version__}, {what}, {torch.cuda.device_count()} GPUs")
    rows = run(options.device, options.only)
    counts = {verdict: sum(r["verdict"] == verdict for r in rows) for verdict in ("holds", "FAILS", "not run")}
    print(", ".join(f"{number} {verdict}" for verdict, number in counts.items()))
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(rows, file, indent=1)
    return 1 if counts["FAILS"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
