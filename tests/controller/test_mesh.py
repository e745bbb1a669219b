"""Meshes and their parts: names, ranks, identity, errors. No op but the ranks' own coordinates."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch

import monarch_lab as ml
from monarch_lab.controller.mesh import DeviceMesh
from monarch_lab.wire.shape import Slice
from tests.controller.compare import rank_values


class _Owner:
    """What a mesh asks of its session."""

    def __init__(self) -> None:
        self.parts: dict[Any, Any] = {}
        self.device, self.state = "cpu", "live"


class _Client:
    """A client that must not be needed."""

    name = "big"

    def label(self, rank: int) -> str:
        return f"{rank // 3}.{rank % 3}"

    dead: list[int] = []
    let_go_large = dead.append

    def dead_of(self, stream: int) -> list[int]:
        return self.dead

    def learn_names(self, mesh: Any) -> None:
        pass


def made(**sizes: int) -> DeviceMesh:
    owner = _Owner()
    whole = Slice.dense(*sizes.values())
    mesh = DeviceMesh(_Client(), whole, tuple(sizes), owner)  # type: ignore[arg-type]
    owner.parts[whole, tuple(sizes)] = mesh
    return mesh


def test_each_index_picks_its_ranks() -> None:
    mesh = made(a=2, b=3, c=4)
    assert mesh.slice(a=0, b=0, c=0).ranks_key == (0,)
    assert mesh.slice(a=0, b=0).ranks_key == (0, 1, 2, 3) and mesh.slice(a=0, b=0).names == ("c",)
    assert mesh.slice(b=2, c=3).ranks_key == (11, 23)
    assert mesh.slice(c=slice(0, 4, 2)).sizes == {"a": 2, "b": 3, "c": 2}
    assert mesh.slice(b=slice(0, 3, 2)).ranks_key == (0, 1, 2, 3, 8, 9, 10, 11, 12, 13, 14, 15, 20, 21, 22, 23)
    assert mesh.slice(a=-1, b=-1, c=-1).ranks_key == (23,)


def test_a_step_that_does_not_divide_keeps_the_last_place() -> None:
    mesh = made(a=5)
    assert mesh.slice(a=slice(None, None, 2)).ranks_key == (0, 2, 4)
    assert mesh.slice(a=slice(1, None, 2)).ranks_key == (1, 3)
    assert mesh.slice(a=slice(None, None, 2)).slice(a=slice(None, None, 2)).ranks_key == (0, 4)


def test_a_wrong_index_says_what_there_is() -> None:
    mesh = made(host=2, gpu=3)
    with pytest.raises(IndexError, match="index out of range.*3"):
        mesh.slice(gpu=3)
    with pytest.raises(IndexError, match="index out of range"):
        mesh.slice(gpu=-4)
    with pytest.raises(TypeError, match="has no dim 'tp'.*host, gpu"):
        mesh.slice(tp=0)
    with pytest.raises(ValueError, match="no process"):
        mesh.slice(gpu=slice(2, 2))
    with pytest.raises(ValueError, match="step"):
        mesh.slice(gpu=slice(None, None, -1))


def test_split_cuts_a_dim_into_several() -> None:
    mesh = made(host=60, gpu=24)
    cut = mesh.split(host=("dp", "pp"), gpu=("tp",), pp=4)
    assert cut.names == ("dp", "pp", "tp") and tuple(cut.sizes.values()) == (15, 4, 24)
    assert cut.slice_.strides == (96, 24, 1)
    assert tuple(mesh.split(host=("dp", "pp"), dp=4).sizes.values()) == (4, 15, 24)
    assert tuple(mesh.split(host=("dp", "pp"), pp=1).sizes.values()) == (60, 1, 24)
    assert tuple(mesh.split(host=("dp", "pp"), pp=60).sizes.values()) == (1, 60, 24)
    renamed = mesh.rename(host="dp")
    assert renamed.names == ("dp", "gpu") and renamed.slice_.strides == mesh.slice_.strides


@pytest.mark.parametrize(
    ("dims", "text"),
    [
        ({"host": ("dp", "pp")}, "Cannot infer size"),
        ({"host": ("dp", "pp"), "pp": 7}, "evenly divided"),
        ({"host": ("dp", "pp"), "pp": 4, "tp": 3}, "unused size constraints"),
        ({"host": ("gpu", "pp"), "pp": 4}, "Duplicate dimension name"),
        ({"host": "dp"}, "sequence"),
        ({"host": ("dp", "pp"), "pp": 2.0}, "whole number"),
    ],
)
def test_a_split_that_cannot_be_says_why(dims: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        made(host=60, gpu=24).split(**dims)


def test_flatten_joins_dense_dims_alone() -> None:
    mesh = made(a=2, b=3, c=4)
    assert mesh.flatten("all").ranks_key == tuple(range(24)) and mesh.flatten("all").names == ("all",)
    assert mesh.slice(a=1).flatten("x").ranks_key == tuple(range(12, 24))
    with pytest.raises(ValueError, match="cannot flatten sparse mesh"):
        mesh.slice(c=0).slice(b=slice(0, 3, 2)).flatten("x")
    with pytest.raises(ValueError, match="cannot flatten sparse mesh"):
        mesh.slice(b=0).flatten("x")


def test_sizes_multiply_over_dims() -> None:
    mesh = made(host=2, gpu=3)
    assert mesh.size("host") == 2 and mesh.size(["host", "gpu"]) == mesh.size() == len(mesh) == 6
    with pytest.raises(KeyError, match="does not have dimension 'tp'"):
        mesh.size("tp")


def test_equal_meshes_are_one_object() -> None:
    mesh = made(host=2, gpu=3)
    assert mesh.slice(gpu=1) is mesh.slice(gpu=1) and mesh.slice(gpu=1) == mesh.slice(gpu=-2)
    assert mesh.rename(host="dp").rename(dp="host") is mesh
    assert mesh.slice() is mesh and hash(mesh.slice(gpu=1)) == hash(mesh.slice(gpu=1))
    assert mesh.slice(gpu=1) != mesh.slice(gpu=2) and mesh.rename(host="dp") != mesh


def test_to_tensor_is_a_local_tensor_of_ranks(cell: Any) -> None:
    ranks = cell.to_tensor()
    assert type(ranks) is torch.Tensor and ranks.tolist() == [[0, 1]]


def test_a_mesh_is_not_pickled(mesh: Any) -> None:
    with pytest.raises(TypeError, match="mesh"):
        pickle.dumps(mesh)


def test_every_process_holds_its_own_coordinates(mesh: Any) -> None:
    for gpu in range(2):
        assert ml.inspect(mesh.rank("host"), host=0, gpu=gpu).item() == 0
        assert ml.inspect(mesh.rank("gpu"), host=0, gpu=gpu).item() == gpu
        assert ml.inspect(mesh.process_idx(), gpu=gpu).item() == gpu
    assert rank_values(mesh.rank(["host", "gpu"])) == [0, 1]
    assert rank_values(mesh.ranks["gpu"]) == [0, 1] and list(mesh.ranks) == ["host", "gpu"]
    assert mesh.rank("gpu").dtype == torch.int64 and mesh.rank("gpu").shape == ()
    with pytest.raises(KeyError, match="does not have dimension"):
        mesh.rank("tp")


def test_parts_of_a_mesh_run_ops_of_their_own(cell: Any) -> None:
    for gpu in range(2):
        part = cell.slice(gpu=gpu)
        with part.activate():
            x = torch.ones(3, 4) * gpu
            assert x.mesh is part and ml.inspect(x).sum().item() == 12 * gpu
            assert ml.inspect(part.process_idx()).item() == gpu
    assert ml.inspect(torch.ones(2), host=0, gpu=1).tolist() == [1, 1]


def test_a_split_mesh_computes_as_the_whole(cell: Any) -> None:
    parts = cell.split(host=("oh", "ih"), ih=1)
    with parts.activate():
        assert ml.inspect(torch.ones(3, 4), oh=0, ih=0, gpu=0).shape == (3, 4)
        assert ml.fetch_all(parts.rank("gpu")).shape == (1, 1, 2)


def test_an_op_runs_on_the_mesh_of_its_tensor_whatever_is_active(cell: Any) -> None:
    part = cell.slice(gpu=0)
    with part.activate():
        x = torch.ones(2)
    with cell.slice(gpu=1).activate():
        assert (x + 1).mesh is part and (x + 1).tolist() == [2, 2]
    with ml.no_mesh.activate():
        assert (x + 1).mesh is part
        assert type(torch.ones(2)) is torch.Tensor


def test_activation_nests_and_ends(mesh: Any) -> None:
    with pytest.raises(ValueError, match="no device mesh is active"):
        ml.get_active_mesh()
    part = mesh.slice(gpu=0)
    with mesh.activate() as nothing:
        assert nothing is None and ml.get_active_mesh() is mesh
        with part.activate():
            assert ml.get_active_mesh() is part
            with ml.no_mesh.activate(), pytest.raises(ValueError, match="no device mesh"):
                ml.get_active_mesh()
        assert ml.get_active_mesh() is mesh
    active = part.activate()
    assert torch.ones(1).mesh is part, "in force when called"
    active.deactivate()
    active.deactivate()
    assert type(torch.ones(1)) is torch.Tensor


def test_an_error_in_the_block_ends_the_activation(mesh: Any) -> None:
    with pytest.raises(RuntimeError, match="mine"), mesh.activate():
        raise RuntimeError("mine")
    assert type(torch.ones(1)) is torch.Tensor


def test_a_mesh_says_what_it_is(mesh: Any) -> None:
    assert mesh.name in repr(mesh) and "gpu=2" in repr(mesh) and mesh.device == "cpu"
    assert mesh.ndim == 2 and mesh.names == ("host", "gpu") and mesh.sizes == {"host": 1, "gpu": 2}
    assert "rank 1" in repr(mesh.slice(host=0, gpu=1))
    assert mesh.state == "live" and mesh.status().name == mesh.name


def test_ops_that_go_back_and_forth_between_parts_stay_within_reach(mesh: Any) -> None:
    """Each change of the scope sends a batch: the workers' reports must keep up, or nothing bounds what is sent."""
    client = mesh.client
    parts = [mesh.slice(gpu=k) for k in range(2)]
    values = [part.replicate(torch.ones(2)) for part in parts]
    furthest = 0
    for _ in range(300):
        values = [v + 1 for v in values]
        furthest = max(furthest, client.batch - min(client.progress.done.values()))
    mesh.sync()
    assert furthest <= client.settings.engine.max_batches_in_flight + 3 * client._report_every
    assert not client.progress._batches
    assert [ml.inspect(v).tolist() for v in values] == [[301, 301], [301, 301]]


def test_a_table_shows_which_process_is_where() -> None:
    mesh = made(host=2, gpu=3)
    assert mesh.to_table().splitlines() == [
        "        gpu 0   gpu 1   gpu 2",
        "host 0  0.0[0]  0.1[1]  0.2[2]",
        "host 1  1.0[3]  1.1[4]  1.2[5]",
    ]
    assert mesh.slice(host=1).to_table().splitlines() == ["gpu 0   gpu 1   gpu 2", "1.0[3]  1.1[4]  1.2[5]"]
    assert mesh.slice(host=1, gpu=2).to_table() == "1.2[5]"
    deep = made(a=2, b=1, c=2).to_table().splitlines()
    assert deep[2].startswith("a 1 b 0  0.2[2]")


def test_a_called_mesh_slices_and_says_that_it_is_deprecated() -> None:
    mesh = made(host=2, gpu=3)
    with pytest.warns(DeprecationWarning, match="mesh.slice"):
        assert mesh(gpu=1) is mesh.slice(gpu=1)


def test_deactivate_ends_the_last_activation_of_the_mesh(mesh: Any) -> None:
    part = mesh.slice(gpu=0)
    with pytest.raises(ValueError, match="is not active"):
        part.deactivate()
    mesh.activate()
    part.activate()
    with part.activate():
        pass
    assert ml.get_active_mesh() is part
    part.deactivate()
    assert ml.get_active_mesh() is mesh
    mesh.deactivate()
    with pytest.raises(ValueError, match="is not active"):
        mesh.deactivate()
    assert type(torch.ones(1)) is torch.Tensor


def _fail_on_first(x: torch.Tensor, rank: torch.Tensor) -> torch.Tensor:
    if rank.item() == 0:
        raise RuntimeError("not today")
    return x


def test_an_idle_host_is_not_needed_for_what_runs_on_another(grid: Any) -> None:
    import os
    import signal

    first = grid.slice(host=0)
    idle = [p.pid for p in grid.client.supervisor.processes.values() if p.rank >= 2]
    for pid in idle:
        os.kill(pid, signal.SIGSTOP)
    try:
        with first.activate():
            x = torch.ones(3, 4)
            assert ml.inspect(x).sum() == 12
            assert ml.inspect(x + 1, gpu=1).sum() == 24
            assert ml.inspect((x + first.rank("gpu")).reduce("gpu")).sum() == 36
            assert (x * 2).reduce("gpu").sum().item() == 48
            with pytest.raises(ml.RemoteException, match="not today"):
                ml.inspect(ml.remote(_fail_on_first)(x, first.rank("gpu")).reduce("gpu"), gpu=1)
    finally:
        for pid in idle:
            os.kill(pid, signal.SIGCONT)
