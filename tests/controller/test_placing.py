"""replicate and shard: local values onto the mesh."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import monarch_lab as ml
from tests.controller.compare import assert_metadata_is_true, by_rank, rank_values

_KINDS: dict[str, Any] = {
    "plain": lambda: torch.arange(6.0).view(2, 3),
    "transposed": lambda: torch.arange(6.0).view(2, 3).t(),
    "a part": lambda: torch.arange(10.0)[3:],
    "strided": lambda: torch.arange(12.0).view(3, 4)[:, ::2],
    "expanded": lambda: torch.ones(3).expand(2, 3),
    "complex": lambda: torch.ones(2, dtype=torch.complex64) * 1j,
    "conjugate": lambda: (torch.ones(2, dtype=torch.complex64) * 1j).conj(),
    "negative view": lambda: torch._neg_view(torch.ones(2)),
    "bool": lambda: torch.tensor([True, False]),
    "scalar": lambda: torch.tensor(3, dtype=torch.int16),
    "empty": lambda: torch.empty(0, 3),
    "channels last": lambda: torch.rand(2, 3, 4, 4).to(memory_format=torch.channels_last),
    "leaf": lambda: torch.ones(2).requires_grad_(),
    "result with a graph": lambda: torch.ones(2).requires_grad_() * 2,
    "parameter": lambda: nn.Parameter(torch.ones(2)),
    "frozen parameter": lambda: nn.Parameter(torch.ones(2), requires_grad=False),
    "bfloat16": lambda: torch.ones(2, dtype=torch.bfloat16),
    "float8": lambda: torch.ones(2).to(torch.float8_e4m3fn),
    "zero gradient": lambda: torch._efficientzerotensor((2, 2)),
    "inference": lambda: _inference(),
}


def _inference() -> torch.Tensor:
    with torch.inference_mode():
        return torch.ones(2)


@pytest.mark.parametrize("kind", list(_KINDS))
def test_a_replicated_value_is_whole_and_equal_on_every_process(mesh: Any, kind: str) -> None:
    local = _KINDS[kind]()
    far = mesh.replicate(local)
    assert far.shape == local.shape and far.dtype == local.dtype and far.requires_grad == local.requires_grad
    assert isinstance(far, nn.Parameter) == isinstance(local, nn.Parameter)
    assert_metadata_is_true(far)
    assert far.equal_dims == ("host", "gpu")
    for value in by_rank(far):
        torch.testing.assert_close(value.float().resolve_neg(), local.detach().float().resolve_neg())


@pytest.mark.parametrize("elements", [3, 30_000, 200_000, 600_000])
def test_a_local_value_changed_later_does_not_change_the_mesh(mesh: Any, elements: int) -> None:
    local = torch.ones(elements)
    far = mesh.replicate(local), mesh.shard(local.view(1, -1), "host")
    local.zero_()
    for value in ml.fetch_all(far):
        assert value.min() == 1


def test_a_value_put_on_the_mesh_can_grow(mesh: Any) -> None:
    for far in (mesh.replicate(torch.ones(2)), mesh.shard(torch.ones(4), "gpu")):
        far.resize_(10)
        assert far.shape == (10,) and by_rank(far)[1][:2].tolist() == [1, 1]


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_a_sharded_value_is_cut_in_order(mesh: Any, dim: int) -> None:
    local = torch.arange(16.0).view(4, 4).t()
    far = mesh.shard(local, "gpu", dim)
    for value, part in zip(by_rank(far), local.chunk(2, dim), strict=True):
        assert torch.equal(value, part)
    assert_metadata_is_true(far)
    assert far.equal_dims == ("host",)
    with pytest.raises(TypeError, match="fetch_all"):
        far.tolist()


def test_sharding_over_a_dim_of_one_process_replicates(mesh: Any) -> None:
    far = mesh.shard(torch.arange(3.0), "host")
    assert far.tolist() == [0, 1, 2]


def test_a_sharded_leaf_requires_grad(mesh: Any) -> None:
    far = mesh.shard(torch.ones(4).requires_grad_(), "gpu")
    (far * 3).sum().backward()
    assert rank_values(far.grad) == [[3, 3], [3, 3]]


def test_what_cannot_be_cut_says_why(mesh: Any) -> None:
    with pytest.raises(ValueError, match='size 5 of dim 0 does not divide by 2.*"gpu"'):
        mesh.shard(torch.ones(5, 2), "gpu")
    with pytest.raises(KeyError, match="does not have dimension 'tp'"):
        mesh.shard(torch.ones(4), "tp")
    with pytest.raises(ValueError, match="has no dim 3"):
        mesh.shard(torch.ones(4), "gpu", 3)
    with pytest.raises(ValueError, match="no dim"):
        mesh.shard(torch.tensor(1.0), "gpu")


def test_a_mesh_tensor_is_not_put_on_the_mesh_again(mesh: Any) -> None:
    far = mesh.replicate(torch.ones(2))
    for put in (mesh.replicate, lambda t: mesh.shard(t, "gpu")):
        with pytest.raises(TypeError, match="already"):
            put(far)


def test_pytrees_go_leaf_by_leaf_and_keep_what_is_shared(mesh: Any) -> None:
    t = torch.ones(2)
    far = mesh.replicate({"a": [t, 1, "x"], "b": (t, None, np.arange(3.0))})
    assert far["a"][0] is far["b"][0] and far["a"][1:] == [1, "x"] and far["b"][1] is None
    assert far["b"][2].tolist() == [0, 1, 2]
    cut = mesh.shard([torch.arange(4), torch.arange(2)], "gpu")
    assert [rank_values(t) for t in cut] == [[[0, 1], [2, 3]], [[0], [1]]]


def test_a_replicated_module_keeps_tied_weights_and_leaves_the_local_one(mesh: Any) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 2))
    model[2].weight = model[0].weight
    far = mesh.replicate(model)
    assert far[2].weight is far[0].weight and isinstance(far[0].weight, nn.Parameter)
    assert far[1].running_mean.mesh is mesh and type(model[1].running_mean) is torch.Tensor
    assert set(far.state_dict()) == set(model.state_dict())
    far(mesh.replicate(torch.randn(3, 2))).sum().backward()
    assert model[0].weight.grad is None and far[0].weight.grad is not None


def test_the_training_mode_and_plain_attributes_of_a_module_come_along(mesh: Any) -> None:
    model = nn.Dropout(0.25).eval()
    far = mesh.replicate(nn.ModuleList([model]))
    assert not far[0].training and far[0].p == 0.25


def test_replicating_with_the_mesh_active_takes_local_values(cell: Any) -> None:
    with ml.no_mesh.activate():
        local = torch.arange(4.0)
        model = nn.Linear(2, 2)
    assert cell.replicate(local).tolist() == [0, 1, 2, 3]
    assert cell.replicate(model).weight.mesh is cell
    assert cell.replicate(np.ones((2, 2))).shape == (2, 2)


def test_a_part_of_a_mesh_takes_values_of_its_own(mesh: Any) -> None:
    part = mesh.slice(gpu=slice(1, 2))
    far = part.shard(torch.arange(3), "gpu")
    assert far.mesh is part and far.tolist() == [0, 1, 2]
    assert ml.inspect(mesh.slice(host=0, gpu=1).replicate(torch.ones(2))).tolist() == [1, 1]


@pytest.mark.parametrize("values", [[1.0, 2.0], [[1, 2], [3, 4]], [], [True], [1 + 2j], 5, 2.5, True])
def test_literals_become_mesh_tensors(cell: Any, values: Any) -> None:
    for make in (torch.tensor, torch.as_tensor, torch.asarray):
        far = make(values)
        with ml.no_mesh.activate():
            local = make(values)
        assert far.mesh is cell and far.dtype == local.dtype and far.tolist() == local.tolist()


def test_what_torch_makes_past_the_mode_is_local_and_says_so_when_mixed(cell: Any) -> None:
    for local in (torch.from_numpy(np.ones(2, np.float32)), torch.Tensor(2), torch.FloatTensor([1.0, 2.0])):
        assert type(local) is torch.Tensor
        with pytest.raises(TypeError, match="LOCAL_TENSOR.*mesh.shard.*mesh.replicate"):
            torch.ones(2) + local


_LARGE: list[Any] = [
    lambda: torch.arange(600_000.0),
    lambda: torch.arange(600_000.0).to(torch.bfloat16),
    lambda: torch.arange(600_000.0).view(1000, 600).t(),
    lambda: torch.arange(1_200_000)[1:-1:2],
    lambda: torch.arange(600_000.0).requires_grad_(),
    lambda: nn.Parameter(torch.arange(600_000.0)),
]


@pytest.mark.parametrize("make", _LARGE)
def test_a_large_value_is_put_whole_on_every_process_and_is_each_ones_own(cell: Any, make: Any) -> None:
    with ml.no_mesh.activate():
        local = make()
        expected = local.detach().clone()
    far = cell.replicate(local)
    other = cell.replicate(local)
    assert_metadata_is_true(far)
    with torch.no_grad():
        local.zero_()
        far.add_(cell.rank("gpu"))
    for rank in range(2):
        assert ml.inspect(far, host=0, gpu=rank).equal(expected + rank) and ml.inspect(other, gpu=rank, host=0).equal(
            expected
        )


@pytest.mark.parametrize("dim", [0, 1])
def test_the_large_parts_of_a_value_are_each_ones_own(cell: Any, dim: int) -> None:
    with ml.no_mesh.activate():
        local = torch.arange(1_200_000.0).view(1000, 1200).requires_grad_()
        expected = local.detach().clone().chunk(2, dim)
    far = cell.shard(local, "gpu", dim)
    assert_metadata_is_true(far)
    with torch.no_grad():
        local.zero_()
        far.add_(cell.rank("gpu"))
    for rank in range(2):
        assert ml.inspect(far, host=0, gpu=rank).equal(expected[rank] + rank)


def test_the_memory_of_large_values_is_used_again_when_no_process_reads_it(cell: Any) -> None:
    with ml.no_mesh.activate():
        local = torch.arange(700_000.0)
        expected = local + 0
    far = view = None
    kept = cell.replicate(local)
    open_segments = []
    for k in range(5):
        far = cell.replicate(local.add_(1))
        view = far[5:]
        far = None
        cell.sync()
        assert ml.inspect(view, host=0, gpu=1)[0] == expected[5] + k + 1
        view = None
        cell.sync()
        open_segments.append(_open_segments())
    assert max(open_segments) == open_segments[1]
    assert ml.inspect(kept, host=0, gpu=1).equal(expected)


def _open_segments() -> int:
    paths = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    return sum("memfd:monarch_lab" in os.readlink(p) for p in paths if os.path.lexists(p))


def test_a_value_that_could_not_be_put_there_is_told_at_the_next_wait(mesh: Any, monkeypatch: Any) -> None:
    mesh.sync()
    with monkeypatch.context() as patched:
        patched.setattr(type(mesh), "torch_device", "hpu:3")  # as memory that does not suffice: it is refused there
        with mesh.activate():
            far = torch.tensor([1.0, 2.0])
    with pytest.raises(ml.RemoteException, match="rank 0|ranks 0, 1") as told:
        mesh.sync()
    assert told.value.issued[0].source == "far = torch.tensor([1.0, 2.0])"
    mesh.sync()
    with pytest.raises(ml.RemoteException):
        ml.inspect(far + 1)


def test_a_wait_ends_when_what_was_put_there_is_there(mesh: Any) -> None:
    mesh.sync()
    before = mesh.client.batch
    mesh.shard(torch.arange(4.0), "gpu")
    mesh.sync()
    assert mesh.client.batch > before
    assert all(mesh.client.progress.is_done(rank, before + 1) for rank in mesh.ranks_key)
