"""``%%spmd`` cells without a notebook: what is on the ranks, and what the kernel knows after it."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

import monarch_lab as ml
from monarch_lab.controller.spmd import SpmdCell, SpmdResult, pull, push, run_spmd, worker_names
from monarch_lab.errors import RemoteException, UsageTypeError, UsageValueError

_numbers = itertools.count()


def run(mesh: Any, source: str, **options: Any) -> SpmdResult:
    return run_spmd(mesh, SpmdCell(source, f"<test cell {next(_numbers)}>", mesh.ranks_key, **options))


def shown(mesh: Any, source: str, **options: Any) -> list[str]:
    return list(run(mesh, source, **options).shown.values())


def test_dtensor_and_fsdp_work_on_the_default_group(mesh: Any) -> None:
    body = """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
whole = init_device_mesh("cpu", (world_size,))
parts = distribute_tensor(torch.arange(8.0).reshape(4, 2), whole, [Shard(0)])
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))
fully_shard(model, mesh=whole)
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(2):
    optimizer.zero_grad()
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
parts.full_tensor().sum().item(), tuple(parts.to_local().shape)
"""
    assert shown(mesh, body) == ["(28.0, (2, 2))"] * 2


@pytest.mark.parametrize(
    "body",
    [
        "group = dist.new_group([0, 1])\nif rank: raise ValueError('cause')\ndist.barrier(group)",
        "from torch.nn.parallel import DistributedDataParallel as DDP\nmodel = DDP(torch.nn.Linear(3, 3))\n"
        "if rank: raise ValueError('cause')\nmodel(torch.ones(1, 3)).sum().backward()",
    ],
)
def test_a_failure_frees_ranks_in_groups_of_the_users(mesh: Any, body: str) -> None:
    with pytest.raises(
        ValueError, match=r"cause \(on rank 1\); rank 0 waited in line .*new default process group"
    ) as e:
        run(mesh, body)
    assert isinstance(e.value, RemoteException) and e.value.ranks == (1,)
    assert shown(mesh, "t = torch.ones(1)\ndist.all_reduce(t)\nt.item()") == ["2.0", "2.0"]


def test_input_has_nobody_to_ask_outside_a_notebook_and_a_terminal(mesh: Any) -> None:
    with pytest.raises(NotImplementedError, match=r"input\(\): the program that drives the mesh has no terminal"):
        run(mesh, "input('name? ')")


def test_displays_are_text_outside_a_notebook_and_rich_forms_come_with_the_result(
    mesh: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    body = "class P:\n    def _repr_html_(self): return '<b>'\n    def __repr__(self): return 'P'\ndisplay(P())\nP()"
    result = run(mesh, body)
    assert sorted(capsys.readouterr().out.splitlines()) == ["rank 0: P", "rank 1: P"]
    assert result.shown == {0: "P", 1: "P"} and result.rich == {r: '[{"text/html": "<b>"}, {}]' for r in (0, 1)}


def test_a_failure_that_all_ranks_share_keeps_the_group_and_what_uses_it(mesh: Any) -> None:
    run(mesh, "group = dist.new_group([0, 1])")
    with pytest.raises(ValueError, match="both") as e:
        run(mesh, "dist.barrier()\nraise ValueError('both')")
    assert "new default process group" not in str(e.value) and e.value.ranks == (0, 1)  # type: ignore[attr-defined]
    assert shown(mesh, "t = torch.ones(1)\ndist.all_reduce(t, group=group)\nt.item()") == ["2.0", "2.0"]


def test_a_group_that_the_user_destroyed_is_there_again_in_the_next_cell(mesh: Any) -> None:
    reduced = "t = torch.ones(1)\ndist.all_reduce(t)\nt.item()"
    run(mesh, "dist.destroy_process_group()")
    assert shown(mesh, reduced) == ["2.0", "2.0"]
    assert shown(mesh, f"dist.destroy_process_group()\ndist.init_process_group('gloo')\n{reduced}") == ["2.0", "2.0"]
    run(mesh, "if rank: dist.destroy_process_group()")
    assert shown(mesh, reduced) == ["2.0", "2.0"]


@pytest.mark.parametrize(
    ("call", "told"),
    [
        ("world_size=3, rank=rank", r"world_size is 2 here"),
        ("rank=5", r"rank is \d here"),
        ("'nccl'", "its group uses gloo"),
    ],
)
def test_another_group_than_the_meshs_is_refused(mesh: Any, call: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        run(mesh, f"dist.init_process_group({call})")
    assert shown(mesh, "dist.init_process_group('gloo', world_size=2, rank=rank)\ndist.get_world_size()") == ["2", "2"]


def test_cells_keep_settings_of_torch_apart_from_the_meshs_ops(mesh: Any) -> None:
    run(mesh, "torch.set_grad_enabled(False)\ntorch.set_default_dtype(torch.float64)\ntorch.manual_seed(7)")
    run(mesh, "torch.set_default_device('meta')")
    with mesh.activate():
        made = torch.ones(2, requires_grad=True) * 2
    assert made.dtype is torch.float32 and made.requires_grad
    assert ml.inspect(made).tolist() == [2.0, 2.0]
    source = "torch.is_grad_enabled(), torch.get_default_dtype()"
    assert shown(mesh, source) == ["(False, torch.float64)"] * 2
    assert shown(mesh, "torch.ones(1).device.type") == ["'meta'"] * 2
    run(mesh, "torch.set_default_device(None)")
    drawn = shown(mesh, "torch.rand(()).item()")
    torch.manual_seed(7)
    assert drawn == [str(torch.rand((), dtype=torch.float64).item())] * 2
    run(mesh, "torch.set_grad_enabled(True)\ntorch.set_default_dtype(torch.float32)")


def test_a_class_of_a_cell_can_be_pickled_there(mesh: Any) -> None:
    body = "class Kept: pass\nimport pickle\ntype(pickle.loads(pickle.dumps(Kept()))) is Kept"
    assert shown(mesh, body) == ["True", "True"]


def test_what_a_cell_names_is_not_known_equal_any_more(mesh: Any) -> None:
    x, y = mesh.replicate(torch.zeros(2)), mesh.replicate(torch.zeros(2))
    run(mesh, "x.data.add_(rank)\nalias = y", shards={"x": x, "y": y})
    with pytest.raises(UsageTypeError, match="gpu"):
        x.sum().item()
    assert ml.fetch_all(x).tolist() == [[[0.0, 0.0], [1.0, 1.0]]]
    y.zero_()
    run(mesh, "alias.add_(rank)")  # written by another name, in a later cell
    with pytest.raises(UsageTypeError, match="gpu"):
        y.sum().item()


def test_a_graph_and_a_leaf_of_the_notebook_stay_as_they_are(mesh: Any) -> None:
    w = mesh.replicate(torch.ones(2, requires_grad=True))
    assert shown(mesh, "w.requires_grad_(False)\nw.requires_grad", shards={"w": w}) == ["False", "False"]
    (w * 3).sum().backward()
    assert ml.inspect(w.grad).tolist() == [3.0, 3.0]


def test_a_constant_and_a_failed_value_arrive_as_they_are(mesh: Any) -> None:
    with mesh.activate():
        c = torch.tensor(3.0)
        bad = fail(torch.ones(2))
    assert shown(mesh, "c.item()", shards={"c": c}) == ["3.0", "3.0"]
    with pytest.raises(ValueError, match="no value"):
        run(mesh, "bad", shards={"bad": bad})
    with pytest.raises(ValueError, match="no value"):
        mesh.sync()


@ml.remote(propagate=lambda t: t + 1)
def fail(t: torch.Tensor) -> torch.Tensor:
    raise ValueError("no value")


def test_a_tensor_of_a_part_of_the_mesh_is_on_its_ranks(mesh: Any) -> None:
    with mesh.slice(gpu=0).activate():
        part = torch.ones(2)
    assert shown(mesh, "part.sum().item() if rank == 0 else None", shards={"part": part}) == ["2.0"]
    with pytest.raises(NameError, match="part is a tensor of the notebook on rank 0 alone"):
        run(mesh, "part", shards={"part": part})


def test_a_lifted_variable_is_a_copy(mesh: Any) -> None:
    a = run(mesh, "a = torch.full((2,), float(rank))\nb = a.view(2)", out=("a",)).out["a"]
    run(mesh, "a.add_(10)")
    assert ml.fetch_all(a).tolist() == [[[0.0, 0.0], [1.0, 1.0]]]
    with pytest.raises(UsageValueError, match=r"--out a: .* a is rank 0: \(1,\) float32; rank 1: a int"):
        run(mesh, "a = torch.ones(1) if rank == 0 else 1", out=("a",))
    with pytest.raises(UsageValueError, match="run the cell on all ranks"):
        run_spmd(mesh, SpmdCell("a = torch.ones(1)", "<part>", (0,), out=("a",)))


def test_push_and_pull_keep_what_values_are(mesh: Any) -> None:
    with mesh.activate():
        t = torch.ones(2)
    push(mesh, {"data": {"k": torch.arange(3)}, "t": t})
    assert shown(mesh, "data['k'].tolist(), t.tolist()") == ["([0, 1, 2], [1.0, 1.0])"] * 2
    assert {"data", "t"} <= worker_names(mesh.client) and "rank" not in worker_names(mesh.client)
    got = pull(mesh, ["data", "rank"], (1, 0))
    assert got[1]["rank"] == 1 and got[0]["data"]["k"].tolist() == [0, 1, 2]
    with pytest.raises(NameError, match="nowhere"):
        pull(mesh, ["nowhere"], (0,))
    with pytest.raises(UsageTypeError, match="cannot be sent"):
        push(mesh, {"lines": (line for line in "ab")})


def test_a_time_limit_says_where_each_rank_was(mesh: Any) -> None:
    with pytest.raises(TimeoutError, match=r"rank 0 had not ended after 0\.3 s: rank 0 was in line 2"):
        run(mesh, "import time\ntime.sleep(600 * (rank == 0))", timeout_s=0.3)
    assert shown(mesh, "rank") == ["0", "1"]
