"""What torch.cuda says in a %%mesh cell (rule 22), and the switches of torch that hold on the workers."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import monarch_lab as ml
from monarch_lab.controller import devices
from monarch_lab.controller.state import active_mesh
from monarch_lab.tensors import switches


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What a stand-in for the workers answers, by (name, rank)."""
    answers: dict[Any, Any] = {}

    def send(mesh: Any, rank: int, name: str, args: Any = (), kwargs: Any = None) -> Any:
        return SimpleNamespace(result=lambda: answers[name, rank])

    monkeypatch.setattr(devices, "send_call", send)
    return answers


@pytest.fixture
def gpu_mesh(mesh: Any) -> Iterator[Any]:
    """A stand-in for a mesh of two GPUs; the patches are those of a real mesh."""
    stand_in: Any = SimpleNamespace(device="cuda", ranks_key=(0, 1))
    token = active_mesh.set(stand_in)
    yield stand_in
    active_mesh.reset(token)


def test_a_mesh_of_gpus_has_one_gpu_also_in_a_kernel_without(gpu_mesh: Any) -> None:
    assert torch.cuda.is_available() and torch.cuda.device_count() == 1 and torch.cuda.current_device() == 0
    torch.cuda.set_device(0)
    torch.cuda.set_device("cuda")
    with pytest.raises(ValueError, match="cuda:1: each worker .* sees one GPU, as cuda:0"):
        torch.cuda.set_device(1)


def test_outside_a_cell_torch_answers_for_the_kernel(gpu_mesh: Any) -> None:
    token = active_mesh.set(None)
    try:
        assert torch.cuda.device_count() == 0 and not torch.cuda.is_available()
    finally:
        active_mesh.reset(token)


def test_what_is_alike_on_all_is_asked_of_one(gpu_mesh: Any, asked: dict[Any, Any]) -> None:
    asked["torch.cuda.get_device_name", 0] = "G"
    asked["torch.cuda.is_bf16_supported", 0] = True
    asked["monarch_lab.worker.devices.properties", 0] = SimpleNamespace(total_memory=8)
    assert torch.cuda.get_device_name() == torch.cuda.get_device_name(0) == torch.cuda.get_device_name("cuda") == "G"
    assert torch.cuda.is_bf16_supported()
    assert torch.cuda.get_device_properties(0).total_memory == 8


def test_memory_is_given_where_the_ranks_agree_and_listed_where_not(gpu_mesh: Any, asked: dict[Any, Any]) -> None:
    asked["torch.cuda.memory_allocated", 0] = asked["torch.cuda.memory_allocated", 1] = 5
    assert torch.cuda.memory_allocated() == 5
    asked["torch.cuda.memory_allocated", 1] = 6
    with pytest.raises(ValueError, match="rank 0: 5, rank 1: 6.*call_on_shard_and_fetch"):
        torch.cuda.memory_allocated()


def test_synchronize_reaches_every_rank(gpu_mesh: Any, asked: dict[Any, Any]) -> None:
    asked["torch.cuda.synchronize", 0] = None
    with pytest.raises(KeyError):
        torch.cuda.synchronize()
    asked["torch.cuda.synchronize", 1] = None
    torch.cuda.synchronize()


@pytest.mark.parametrize("name", ["Event", "Stream", "CUDAGraph", "stream", "current_stream", "get_rng_state"])
def test_what_is_about_the_kernels_own_gpu_is_refused(gpu_mesh: Any, name: str) -> None:
    with pytest.raises(TypeError, match=rf"torch.cuda.{name} does not work .* ml.remote"):
        getattr(torch.cuda, name)()


def test_autocast_and_grad_scaler_of_a_gpu_work_in_a_kernel_without(gpu_mesh: Any) -> None:
    with torch.autocast("cuda", dtype=torch.float16):
        assert torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda") is torch.float16
    assert torch.amp.GradScaler("cuda").is_enabled()


def test_a_mesh_of_cpus_has_no_gpu(mesh: Any) -> None:
    with mesh.activate():
        assert not torch.cuda.is_available() and torch.cuda.device_count() == 0
        assert torch.cuda.memory_allocated() == 0 and not torch.cuda.is_bf16_supported()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        for ask in (torch.cuda.current_device, torch.cuda.get_device_name, torch.cuda.get_device_properties):
            with pytest.raises(RuntimeError, match="are on the CPU"):
                ask()


def test_the_devices_default_is_the_cell_and_manual_seed_is_the_workers(mesh: Any) -> None:
    with mesh.activate():
        torch.cuda.manual_seed(7)
        a = ml.inspect(torch.rand(3))
        torch.cuda.manual_seed_all(7)
        assert torch.equal(ml.inspect(torch.rand(3)), a)


# --- switches


def _seen() -> torch.Tensor:
    import torch
    from torch import backends

    flags = [
        backends.cuda.math_sdp_enabled(),
        backends.cuda.flash_sdp_enabled(),
        backends.cudnn.benchmark,
        backends.mkldnn.enabled,
        torch.get_float32_matmul_precision() == "high",
    ]
    return torch.tensor([float(flag) for flag in flags])


DEFAULT = [1.0, 1.0, 0.0, 1.0, 0.0]


def test_switches_of_the_kernel_hold_on_the_workers_and_end_with_their_block(mesh: Any) -> None:
    seen = ml.remote(_seen)

    def now() -> list[float]:
        values = ml.fetch_all(seen()).reshape(2, -1)
        assert torch.equal(values[0], values[1])
        return values[0].tolist()

    with mesh.activate():
        assert now() == DEFAULT
        with sdpa_kernel(SDPBackend.MATH):
            assert now() == [1.0, 0.0, 0.0, 1.0, 0.0]
        assert now() == DEFAULT
        with torch.backends.mkldnn.flags(enabled=False):
            assert now() == [1.0, 1.0, 0.0, 0.0, 0.0]
        try:
            torch.set_float32_matmul_precision("high")
            with torch.backends.cudnn.flags(benchmark=True):
                assert now() == [1.0, 1.0, 1.0, 1.0, 1.0]
        finally:
            torch.set_float32_matmul_precision("highest")
        assert now() == DEFAULT


def test_a_function_may_name_torchs_own_kinds_of_module(mesh: Any) -> None:
    def count() -> torch.Tensor:
        return torch.tensor(float(torch.backends.mkldnn.enabled))

    with mesh.activate():
        assert ml.inspect(ml.remote(count)()).item() == 1.0


def test_threads_are_the_workers_in_a_cell_and_the_kernels_outside(mesh: Any) -> None:
    outside = torch.get_num_threads()
    with mesh.activate():
        before = torch.get_num_threads()
        torch.set_num_threads(before + 1)
        assert torch.get_num_threads() == before + 1
        torch.set_num_threads(before)
    assert torch.get_num_threads() == outside


def test_a_profile_of_a_cell_is_refused_as_it_would_see_no_worker(mesh: Any) -> None:
    with mesh.activate(), pytest.raises(TypeError, match="torch.profiler does not work .* ml.remote"):
        with torch.profiler.profile():
            pass
    with torch.profiler.profile():
        torch.ones(2)


def test_a_switch_that_was_put_back_is_as_it_was(mesh: Any) -> None:
    torch.set_float32_matmul_precision("high")
    assert not switches.are_initial(switches.read())
    torch.set_float32_matmul_precision("highest")
    assert switches.are_initial(switches.read())


def test_a_switch_that_a_function_sets_ends_with_it(mesh: Any) -> None:
    def careless(x: torch.Tensor) -> torch.Tensor:
        torch.backends.cuda.enable_flash_sdp(False)
        return x + 1

    with mesh.activate():
        ml.inspect(ml.remote(careless)(torch.ones(1)))
        assert ml.fetch_all(ml.remote(_seen)()).reshape(2, -1).tolist() == [DEFAULT] * 2
