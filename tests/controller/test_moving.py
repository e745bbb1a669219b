"""to_mesh, slice_mesh and reduce to another mesh: values, failures, errors."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import monarch_lab as ml
from tests.controller.compare import rank_values
from tests.controller.moved import all_of, numbered

# --- values (Monarch's movement, broadcast_one, to_mesh_pytree, sub_mesh_reduce)


def test_a_value_moves_between_hosts(grid: Any) -> None:
    first, second = grid.slice(host=0), grid.slice(host=1)
    x = numbered(first) + 10
    for _ in range(2):
        moved = x.to_mesh(second)
        assert moved.mesh is second and all_of(moved) == [10, 11]
        assert all_of(moved + numbered(second)) == [12, 14]
    whole = numbered(grid)
    for host in range(2):
        assert all_of(whole.slice_mesh(host=0).to_mesh(grid.slice(host=host))) == [0, 1]


def test_a_value_is_broadcast_along_dims_that_only_the_other_mesh_has(grid: Any) -> None:
    x = torch.arange(6.0).view(2, 3)
    for dim in ("host", "gpu"):
        part = grid.slice(**{dim: 1})
        source = numbered(part)
        spread = source.to_mesh(grid)
        kept = "gpu" if dim == "host" else "host"
        assert spread.equal_dims == (dim,)
        values = ml.fetch_all(spread)
        expected = ml.fetch_all(source).unsqueeze(0 if dim == "host" else 1).expand(2, 2)
        assert values.equal(expected), kept
    alone = grid.slice(host=1, gpu=0)
    assert ml.fetch_all(alone.replicate(x).to_mesh(grid)).equal(x.expand(2, 2, 2, 3))
    stacked = numbered(grid.slice(host=0, gpu=1)).to_mesh(grid).reduce((), "stack")
    assert ml.inspect(stacked).tolist() == [[1, 1], [1, 1]]


@pytest.mark.parametrize(
    "value",
    [
        torch.arange(6).view(2, 3).t(),
        torch.randn(3, 4)[:, ::2],
        torch.randn(2, 1).expand(2, 3),
        torch.empty(0, 3),
        torch.tensor([True, False]),
        torch.randn(3, dtype=torch.complex64),
        torch.randn(3, dtype=torch.complex64).conj(),
        torch.randn(40_000),
        torch.randn(5).to(torch.bfloat16),
        torch.tensor(7),
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    ],
)
def test_every_kind_of_dense_value_arrives_as_it_was(grid: Any, value: torch.Tensor) -> None:
    first, second = grid.slice(host=0), grid.slice(host=1)
    source = first.replicate(value)
    for there in (second, first, grid):
        moved = source.to_mesh(there)
        assert ml.inspect(moved).equal(value) and moved.dtype == value.dtype
        told = ml.call_on_shard_and_fetch("monarch_lab.worker.show.metadata", [moved]).result()
        assert told == [moved._meta.wire]


def test_a_copy_is_made_before_either_is_written(grid: Any) -> None:
    part = grid.slice(host=0)
    x = part.replicate(torch.ones(1000))
    same, sliced = x.to_mesh(part), x.slice_mesh(gpu=1)
    x.add_(1)
    sliced.mul_(7)
    assert ml.inspect(same).sum() == 1000 and ml.inspect(sliced).sum() == 7000
    assert ml.fetch_all(x).sum() == 4000


def test_pytrees_and_constants_move(grid: Any) -> None:
    first, second = grid.slice(host=0), grid.slice(host=1)
    with first.activate():
        tree = {"a": torch.tensor(0.0), "b": [torch.tensor([1.0]), "text", None]}
    moved = ml.to_mesh(tree, second)
    assert moved["b"][1:] == ["text", None] and (moved["a"] + 1).item() == 1 and (moved["b"][0] + 1).item() == 2
    assert moved["a"].mesh is second
    part = ml.slice_mesh(tree, gpu=1)
    assert part["b"][0].mesh is first.slice(gpu=1) and part["b"][0].item() == 1


def test_values_move_along_renamed_split_and_flat_meshes(grid: Any) -> None:
    line = grid.flatten("rank")
    stages = line.split(rank=("pp", "dp"), pp=2)
    x = numbered(stages.slice(pp=0))
    assert all_of(x.to_mesh(stages.slice(pp=1))) == [0, 1]
    assert all_of(x.to_mesh(stages)) == [[0, 1], [0, 1]]
    renamed = grid.rename(host="a", gpu="b")
    assert all_of(numbered(grid).slice_mesh(gpu=slice(1, 2)).slice_mesh(gpu=0)) == [1, 3]
    assert renamed.sizes == {"a": 2, "b": 2}


def test_a_rank_that_gets_and_gives_at_once_is_served_once_each(grid: Any) -> None:
    line = grid.flatten("r")
    x = numbered(line.slice(r=slice(0, 3)))
    assert all_of(x.to_mesh(line.slice(r=slice(1, 4)))) == [0, 1, 2]
    back = numbered(line.slice(r=slice(1, 4))).to_mesh(line.slice(r=slice(0, 3)))
    assert all_of(back) == [1, 2, 3]


def test_what_is_equal_on_the_one_mesh_is_known_to_be_on_the_other(grid: Any) -> None:
    first, second = grid.slice(host=0), grid.slice(host=1)
    assert first.replicate(torch.ones(2)).to_mesh(second).tolist() == [1, 1]
    assert numbered(first).slice_mesh(gpu=1).to_mesh(second).item() == 1
    with pytest.raises(TypeError, match='"gpu"'):
        numbered(first).to_mesh(second).item()


def test_moving_waits_for_nothing_once_a_kind_is_known(grid: Any) -> None:
    first, second = grid.slice(host=0), grid.slice(host=1)
    x = first.replicate(torch.ones(4))
    (x.to_mesh(second) * 2).to_mesh(first)
    misses = grid.client.cache.misses
    for _ in range(20):
        x = (x.to_mesh(second) * 2).to_mesh(first)
    assert grid.client.cache.misses == misses
    assert x.tolist() == [2.0**20] * 4


def test_a_move_frees_what_it_moved(grid: Any) -> None:
    first, second = grid.slice(host=0), grid.slice(host=1)

    def cells() -> Any:
        with grid.activate():
            return ml.fetch_all(ml.remote(count_cells)()).tolist()

    cells()
    before = cells()
    for k in range(6):
        x = first.replicate(torch.ones(4, requires_grad=True))
        y = (x * 2).to_mesh(second).sum()
        if k % 2:
            y.backward()
        del x, y
    assert cells() == before


def count_cells() -> torch.Tensor:
    import gc

    from monarch_lab.worker.engine import Engine

    (engine,) = [o for o in gc.get_objects() if isinstance(o, Engine)]
    return torch.tensor([len(engine.cells), len(engine.moves._arrived)])


# --- reduce to another mesh


@pytest.mark.parametrize(
    ("reduction", "expected", "gradients"),
    [
        ("sum", 5, [1, 1]),
        ("avg", 2.5, [0.5, 0.5]),
        ("max", 3, [0, 1]),
        ("min", 2, [1, 0]),
        ("product", 6, [3, 2]),
        ("stack", [2, 3], [1, 1]),
    ],
)
def test_a_reduction_to_one_process_and_its_gradient(
    grid: Any, reduction: str, expected: Any, gradients: list[float]
) -> None:
    pair = grid.slice(host=1)
    for there in (pair.slice(gpu=0), grid.slice(host=0, gpu=1)):
        for _ in range(2):
            x = numbered(pair, grad=True)
            y = x.reduce("gpu", reduction, mesh=there)
            assert y.mesh is there and ml.inspect(y).tolist() == expected
            y.sum().backward()
            assert rank_values(x.grad) == gradients


def test_a_reduction_goes_to_the_mesh_of_the_dims_that_are_left(grid: Any) -> None:
    x = numbered(grid)
    column = grid.slice(gpu=0)
    assert all_of(x.reduce("gpu", mesh=column)) == [1, 5]
    assert all_of(x.reduce("host", "max", mesh=grid.slice(host=0))) == [2, 3]
    one = grid.slice(host=0, gpu=0)
    assert ml.inspect(x.reduce((), "stack", mesh=one)).tolist() == [[0, 1], [2, 3]]
    assert ml.inspect(x.reduce(("gpu", "host"), "stack", mesh=one)).tolist() == [[0, 2], [1, 3]]
    assert ml.inspect(ml.reduce({"a": x}, mesh=one)["a"]).item() == 6
    assert all_of(x.slice_mesh(host=1).reduce("gpu", mesh=grid)) == [[5, 5], [5, 5]]
    assert x.reduce((), mesh=grid).item() == 6


def test_a_tie_splits_the_gradient_of_a_reduction_to_one(grid: Any) -> None:
    pair = grid.slice(host=0)
    x = pair.replicate(torch.tensor(3.0, requires_grad=True))
    x.reduce("gpu", "max", mesh=pair.slice(gpu=0)).backward()
    assert rank_values(x.grad) == [0.5, 0.5]


@pytest.mark.parametrize("dtype", [torch.bool, torch.int16, torch.int64, torch.float16, torch.complex64])
def test_every_dtype_adds_up_as_in_reduce(grid: Any, dtype: torch.dtype) -> None:
    pair = grid.slice(host=1)
    x = (pair.rank("gpu") + torch.tensor(1)).to(dtype).expand(2).contiguous()
    there = x.reduce("gpu", mesh=pair.slice(gpu=0))
    assert there.dtype == dtype and ml.inspect(there).tolist() == ([True] * 2 if dtype is torch.bool else [3, 3])
    if not dtype.is_floating_point and not dtype.is_complex:
        for reduction in ("band", "bor", "bxor"):
            here = ml.inspect(x.reduce("gpu", reduction))
            assert ml.inspect(x.reduce("gpu", reduction, mesh=pair.slice(gpu=1))).equal(here)


def test_a_reduction_to_a_mesh_writes_out(grid: Any) -> None:
    one = grid.slice(host=0, gpu=0)
    out = one.replicate(torch.zeros(()))
    assert numbered(grid).reduce((), out=out, mesh=one) is out and out.item() == 6
    with pytest.raises(ValueError, match="shape"):
        numbered(grid).reduce((), out=one.replicate(torch.zeros(2)), mesh=one)
    with pytest.raises(TypeError, match="WRONG_MESH"):
        numbered(grid).reduce((), out=numbered(grid), mesh=one)
    with pytest.raises(TypeError, match="LOCAL_TENSOR"):
        numbered(grid).reduce((), out=torch.zeros(()), mesh=one)


# --- failures and errors


def lookup(table: Any, at: Any) -> Any:
    """Fails where ``at`` is beyond the table; known before, so that nobody waits for it."""
    return table[at]


def test_a_value_that_failed_arrives_as_its_failure_and_nobody_waits(grid: Any) -> None:
    first, second = grid.slice(host=0), grid.slice(host=1)
    table = first.replicate(torch.arange(4.0))
    good = first.replicate(torch.zeros(2, dtype=torch.int64))
    moved = lookup(table, good).to_mesh(second) + 1
    (moved.to_mesh(first) * 2, moved.reduce("gpu", mesh=first.slice(gpu=0)))
    grid.sync()
    bad = good + 100 * first.rank("gpu")  # on rank 1 alone
    moved = lookup(table, bad).to_mesh(second) + 1
    back = moved.to_mesh(first) * 2
    summed = moved.reduce("gpu", mesh=first.slice(gpu=0))
    other = lookup(table, good).to_mesh(second)
    with pytest.raises(IndexError, match="out of bounds") as raised:
        grid.sync()
    assert raised.value.ranks == (1,) and "table[at]" in raised.value.issued[0].source
    for value in (moved, back, summed):
        with pytest.raises(IndexError, match="out of bounds"):
            ml.fetch_all(value)
    assert all_of(other) == [[0, 0], [0, 0]]


def test_a_fetch_of_what_arrived_from_a_failure_tells_the_line_that_failed(grid: Any) -> None:
    first, second = grid.slice(host=0), grid.slice(host=1)
    table = first.replicate(torch.arange(4.0))
    good = first.replicate(torch.zeros(2, dtype=torch.int64))
    lookup(table, good).to_mesh(second)
    bad = good + 100
    moved = lookup(table, bad).to_mesh(second)
    with pytest.raises(IndexError, match="out of bounds") as raised:
        ml.inspect(moved)
    assert raised.value.ranks == (0, 1) and "table[at]" in raised.value.issued[0].source


def test_a_gradient_that_failed_marks_the_gradients_it_would_have_made(grid: Any) -> None:
    first, second = grid.slice(host=0), grid.slice(host=1)
    table = second.replicate(torch.arange(4.0))
    x = first.replicate(torch.ones(2, requires_grad=True))
    for k in (0, 0, 100):
        x.grad = None
        at = second.replicate(torch.zeros(2, dtype=torch.int64)) + k
        ((x * 2).to_mesh(second) * lookup(table, at)).sum().backward()
    gradient = x.grad
    with pytest.raises(IndexError, match="out of bounds"):
        ml.inspect(gradient)
    x.grad = None
    ((x * 2).to_mesh(second) * 3).sum().backward()
    assert x.grad.tolist() == [6, 6]


def test_a_move_that_does_not_fit_says_why(grid: Any) -> None:
    first = grid.slice(host=0)
    x = numbered(grid)
    with pytest.raises(ValueError, match="does not have dimensions host.*slice_mesh\\(host=0\\)"):
        x.to_mesh(first)
    with pytest.raises(ValueError, match='"gpu" has a different length.*2 and 1'):
        numbered(first).to_mesh(grid.slice(gpu=slice(0, 1)))
    with pytest.raises(TypeError, match="takes a mesh"):
        x.to_mesh("host")
    with pytest.raises(TypeError, match="no dim 'tp'"):
        x.slice_mesh(tp=0)
    with pytest.raises(IndexError, match="out of range"):
        x.slice_mesh(gpu=2)
    with pytest.raises(TypeError, match="dense tensors.*to_dense"):
        first.replicate(torch.eye(2)).to_sparse().to_mesh(grid)
    with pytest.raises(ValueError, match='must have dimension "host" of size 2.*slice_mesh\\(host=0\\)'):
        x.reduce("gpu", mesh=grid.slice(host=0))
    with pytest.raises(ValueError, match="scatter"):
        x.reduce("gpu", scatter=True, mesh=grid.slice(gpu=0))
    with pytest.raises(ValueError, match="reduce_"):
        x.reduce_("gpu", mesh=grid.slice(gpu=0))
    with pytest.raises(TypeError, match="not defined for complex"):
        (x + 1j).reduce("gpu", "max", mesh=grid.slice(gpu=0))
    with pytest.raises(TypeError, match="average of torch.int64"):
        grid.rank("gpu").reduce("gpu", "avg", mesh=grid.slice(gpu=0))
    with pytest.raises(TypeError, match="WRONG_MESH.*to_mesh"):
        x + numbered(first)


def test_another_meshs_processes_are_not_reached(grid: Any, mesh: Any) -> None:
    with pytest.raises(TypeError, match="WRONG_MESH.*replicate"):
        numbered(grid.slice(host=0)).to_mesh(mesh)


@pytest.fixture
def stream_cell() -> Iterator[Any]:
    """A mesh with streams takes no process-wide switches any more, which other tests set."""
    with ml.local_mesh(gpus_per_host=2, device="cpu", name="streams") as mesh, mesh.activate():
        yield mesh


def test_a_value_moves_to_another_stream_and_mesh_and_stays_there(stream_cell: Any) -> None:
    cell = stream_cell
    other = ml.Stream("other")
    mesh = cell.slice(gpu=1)
    moved = (torch.ones(3) + 1).slice_mesh(gpu=0).to_mesh(mesh, stream=other)
    assert moved.stream is other and moved.mesh.ranks == mesh.ranks
    with other.activate():
        assert ml.inspect(moved * 2).tolist() == [4, 4, 4]
    with pytest.raises(TypeError, match="WRONG_STREAM"):
        moved + (torch.ones(3)).slice_mesh(gpu=1)
    third = ml.Stream("third")
    back = moved.to_mesh(mesh, stream=third)
    del moved
    gc.collect()
    with third.activate():
        assert ml.inspect(back + 1).tolist() == [3, 3, 3]
    with other.activate():
        there = torch.full((2,), 5.0).slice_mesh(gpu=0).to_mesh(mesh)
    assert there.stream is other and ml.inspect(there).tolist() == [5, 5]


def test_a_gradient_does_not_pass_to_another_stream(stream_cell: Any) -> None:
    cell = stream_cell
    x = torch.ones(2, requires_grad=True)
    with pytest.raises(TypeError, match="REQUIRES_GRAD"):
        x.to_mesh(cell, stream=ml.Stream("other"))
    with pytest.raises(TypeError, match="stream is an ml.Stream, not str"):
        torch.ones(2).to_mesh(cell, stream="other")


def slow(x: torch.Tensor) -> torch.Tensor:
    import time

    time.sleep(30)
    return x


def test_a_rank_that_dies_before_it_has_sent_leaves_nobody_waiting(grid: Any) -> None:
    first, second = grid.slice(host=0), grid.slice(host=1)
    x = numbered(first, grad=True)
    (x.to_mesh(second) + 1).detach()  # known, so that nobody waits for it below
    kept = numbered(second)
    wait = ml.remote("tests.controller.test_moving.slow").call_on_shard_and_fetch(x.detach(), shard={"gpu": 0})
    moved = x.to_mesh(second) + 1
    grid.kill(0)
    with pytest.raises(ml.DeviceException, match="rank 0"):
        ml.inspect(moved, gpu=0)
    with pytest.raises(ml.DeviceException, match="rank 0"):
        wait.result()
    assert all_of(kept) == [2, 3]
    with pytest.raises(ml.DeviceException, match="rank 0"):
        grid.sync()
    grid.restart([0])
    y = numbered(first, grad=True)
    (y.to_mesh(second) * kept).backward()
    assert rank_values(y.grad) == [2, 3]
    with pytest.raises(ml.DeviceException, match="LOST"):
        x.to_mesh(second)
