"""The worker's device, against stand-ins for CUDA and for the process groups."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from monarch_lab.wire import engine as wire
from monarch_lab.worker import devices


class CudaTensor(torch.Tensor):
    """On the CPU, and says that it is not."""

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True

    def cpu(self, *args: Any) -> torch.Tensor:
        return self.as_subclass(torch.Tensor).clone()


class Group:
    def __init__(self) -> None:
        self.heard: list[tuple[str, list[type]]] = []

    def allreduce(self, tensors: list[torch.Tensor], options: Any) -> Any:
        self.heard.append(("allreduce", [type(t) for t in tensors]))
        for t in tensors:
            t.mul_(2)
        return SimpleNamespace(wait=lambda: True)


def on_gpu(*values: float) -> torch.Tensor:
    return torch.tensor(values).as_subclass(CudaTensor)


@pytest.mark.parametrize(
    ("rank", "gpus", "visible", "seen"),
    [(0, 1, None, "0"), (1, 1, None, "0"), (3, 2, None, "1"), (1, 2, "4,6", "6"), (2, 2, "4,6", "4")],
)
def test_a_worker_sees_one_gpu_and_more_workers_share_them_in_turn(
    monkeypatch: pytest.MonkeyPatch, rank: int, gpus: int, visible: str | None, seen: str
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    spec: Any = SimpleNamespace(device="cuda", rank=rank, gpus=gpus)
    devices.open_device(spec)
    import os

    assert os.environ["CUDA_VISIBLE_DEVICES"] == seen


def test_a_cpu_worker_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    devices.open_device(SimpleNamespace(device="cpu", rank=1, gpus=0))  # type: ignore[arg-type]
    import os

    assert os.environ["CUDA_VISIBLE_DEVICES"] == "7"


@pytest.mark.parametrize(
    ("ranks", "gpus", "apart"), [((0, 1), 2, True), ((0, 2), 2, False), ((0,), 1, True), ((0, 1), 0, False)]
)
def test_ranks_are_apart_where_none_shares_a_gpu(ranks: tuple[int, ...], gpus: int, apart: bool) -> None:
    assert devices.are_apart(ranks, gpus) is apart


def test_tensors_of_a_gpu_go_by_nccl_which_is_made_once_and_others_by_gloo() -> None:
    gloo, nccl, made = Group(), Group(), []

    def make() -> Group:
        made.append(1)
        return nccl

    backend = devices.Backend(gloo, make)
    here, there = torch.ones(2), on_gpu(1.0, 1.0)
    backend.allreduce([here], None).wait()
    assert not made
    backend.allreduce([there], None).wait()
    backend.allreduce([there], None).wait()
    assert (made, gloo.heard, nccl.heard) == (
        [1],
        [("allreduce", [torch.Tensor])],
        [("allreduce", [CudaTensor])] * 2,
    )
    assert there.tolist() == [4.0, 4.0]


def test_ranks_that_share_a_gpu_reduce_in_host_memory_and_get_the_result_back() -> None:
    gloo = Group()
    backend = devices.Backend(gloo, None)
    there = on_gpu(1.0, 3.0)
    work = backend.allreduce([there], None)
    assert there.tolist() == [1.0, 3.0]
    work.wait()
    assert there.tolist() == [2.0, 6.0]
    assert gloo.heard == [("allreduce", [torch.Tensor])]


def test_what_a_gpu_holds_is_told_when_it_changes_once_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []
    clock, held = [0.0], [0]
    monkeypatch.setattr(devices, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(devices, "allocated_bytes", lambda: held[0])
    tell = devices.MemoryTeller(told.append)
    for now, bytes_ in ((0.0, 0), (0.5, 9), (1.1, 9), (1.5, 12), (2.2, 12), (3.5, 12)):
        clock[0], held[0] = now, bytes_
        tell()
    assert told == [wire.DeviceMemory(9), wire.DeviceMemory(12)]


def test_without_cuda_nothing_is_held() -> None:
    assert devices.allocated_bytes() == 0


def test_properties_travel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(name="G", total_memory=8))
    assert devices.properties() == SimpleNamespace(name="G", total_memory=8)
