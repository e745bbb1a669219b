"""Cases of the acceptance list (docs/conformance.md) that no other file has: a mesh of two hosts with two processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import monarch_lab as ml
from tests.controller.compare import rank_values


def _collectives(x: Any, r: Any, g: Any) -> dict[str, Any]:
    n, me = g.size(), g.rank()
    out: dict[str, Any] = {}
    for name in ("SUM", "MAX", "MIN"):
        out[name] = x.clone()
        dist.all_reduce(out[name], getattr(dist.ReduceOp, name), group=g)
    gathered = [torch.empty(2) for _ in range(n)]
    dist.all_gather(gathered, torch.cat([x, 2 * x]), group=g)
    out["all_gather"] = torch.stack(gathered)
    rows = r * torch.arange(float(2 * n))
    out["reduce_scatter"] = torch.empty(2)
    dist.reduce_scatter(out["reduce_scatter"], list(rows.chunk(n)), group=g)
    out["all_to_all"] = torch.empty(n)
    dist.all_to_all(list(out["all_to_all"].split(1)), list((n * me + torch.arange(float(n))).split(1)), group=g)
    out["broadcast"] = x.clone()
    dist.broadcast(out["broadcast"], group=g, group_src=n - 1)
    out["reduce"] = x.clone()
    dist.reduce(out["reduce"], group=g, group_dst=0)
    out["reduce"] = out["reduce"] if me == 0 else torch.zeros_like(x)
    parts = [torch.empty(1, 2) for _ in range(n)]
    dist.gather(torch.view_as_real(x * 1j), parts if me == 0 else None, group=g, group_dst=0)
    out["gather"] = (
        torch.stack(parts)[..., 1].clone(memory_format=torch.contiguous_format) if me == 0 else torch.zeros(n, 1)
    )
    out["scatter"] = torch.empty(1)
    dist.scatter(out["scatter"], [x + k for k in range(n)] if me == 0 else None, group=g, group_src=0)
    dist.barrier(group=g)
    return out


def test_collectives_on_the_whole_mesh_by_dim_and_on_a_part(grid: Any) -> None:
    with grid.activate():
        x = grid.process_idx().float().reshape(1) + 3
        everything = ml.remote(_collectives)
        whole, by_gpu, by_host = (grid.process_group(d) for d in (("host", "gpu"), "gpu", "host"))
        assert grid.process_group("gpu") is not by_gpu
        r = grid.process_idx().float()
        found = {k: rank_values(v) for k, v in everything(x, r, whole).items()}
        assert found["SUM"] == [[18]] * 4 and found["MAX"] == [[6]] * 4 and found["MIN"] == [[3]] * 4
        assert found["all_gather"] == [[[3, 6], [4, 8], [5, 10], [6, 12]]] * 4
        assert found["reduce_scatter"] == [[12 * k, 12 * k + 6] for k in range(4)]
        assert found["all_to_all"] == [[0, 4, 8, 12], [1, 5, 9, 13], [2, 6, 10, 14], [3, 7, 11, 15]]
        assert found["broadcast"] == [[6]] * 4 and found["reduce"] == [[18], [0], [0], [0]]
        assert found["gather"][0] == [[3], [4], [5], [6]] and found["scatter"] == [[3], [4], [5], [6]]
        found = {k: rank_values(v) for k, v in everything(x, r, by_gpu).items()}
        assert found["SUM"] == [[7], [7], [11], [11]] and found["broadcast"] == [[4], [4], [6], [6]]
        assert found["reduce_scatter"] == [[0, 1], [2, 3], [0, 5], [10, 15]]
        assert rank_values(everything(x, r, by_host)["SUM"]) == [[8], [10], [8], [10]]
    for host, total in ((1, 11), (0, 7)):
        part = grid.slice(host=host)
        with part.activate():
            y = part.process_idx().float().reshape(1) + 3
            assert rank_values(ml.remote(_collectives)(y, y, part.process_group("gpu"))["SUM"]) == [[total]] * 2
            assert rank_values(y.reduce("gpu")) == [[total]] * 2


def test_a_pipeline_of_loans_and_moves_on_a_stream_of_its_own(grid: Any) -> None:
    """to_mesh_aliasing: lend, move there, lend to the other stage's stream, look, and end the loans."""
    stages = grid.flatten("rank").split(rank=("pp", "dp"), pp=2)
    first, second = stages.slice(pp=0), stages.slice(pp=1)
    between, main = ml.Stream("between"), ml.get_active_stream()
    with first.activate():
        x = torch.full((3, 4), 2.0)
    lent, loan = between.borrow(x)
    with between.activate():
        moved = lent.to_mesh(second)
    arrived, second_loan = main.borrow(moved)
    with second.activate():
        assert ml.inspect(arrived + 1).unique().tolist() == [3]
    second_loan.drop()
    loan.drop()
    assert rank_values(x.add_(1)[0, :1]) == [[3]] * 2
    other = ml.Stream("other")
    there = x.to_mesh(second, stream=other)
    with other.activate():
        assert there.stream is other and rank_values((there * 2)[0, :1]) == [[6]] * 2


def test_deletes_wait_for_the_next_batch(grid: Any) -> None:
    client = grid.client
    with grid.activate():
        a, b = torch.ones(2), torch.zeros(2)
        torch.ones(2)
    grid.sync()
    client.flush()
    with client.lock:
        assert not client.dead
        del a, b
        assert len(client.dead) == 2
        client.flush()
        assert not client.dead


def test_an_exception_that_is_returned_is_a_value(grid: Any) -> None:
    with grid.activate():
        given = ml.call_on_shard_and_fetch(lambda: ValueError("no error"), shard={"host": 1, "gpu": 0}).result()
    assert isinstance(given, ValueError) and str(given) == "no error"


def test_futures_come_as_they_are_done_within_one_time(grid: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with grid.activate():
        futures = [ml.fetch_shard(grid.process_idx(), host=h, gpu=g) for h in range(2) for g in range(2)]
        assert sorted(f.result().item() for f in ml.futures.stream(futures, timeout=30)) == [0, 1, 2, 3]
        gate = ml.remote(_wait_for, propagate="inspect")
        late = grid.slice(host=1, gpu=1)
        with late.activate():
            gate("late")
            slow = ml.fetch_shard(late.process_idx())
        quick = ml.fetch_shard(grid.process_idx())
        came = ml.futures.stream([slow, quick], timeout=5)
        assert next(came) is quick and not slow.done()
        with pytest.raises(TimeoutError):
            list(ml.futures.stream([slow], timeout=0.05))
        assert list(ml.futures.stream([quick], timeout=0)) == [quick], "a result before a time that has passed"
        ml.call_on_shard_and_fetch(_open, "late", shard={"host": 0, "gpu": 0}).result()
        assert next(came) is slow and slow.result().item() == 3


def _path(name: str) -> str:
    import os
    import tempfile

    return os.path.join(tempfile.gettempdir(), f"monarch_lab_gate_{os.getppid()}_{name}")


def _wait_for(name: str) -> None:
    import os
    import time

    path, last = _path(name), time.monotonic() + 60
    while not os.path.exists(path):
        if time.monotonic() > last:
            raise TimeoutError(path)
        time.sleep(0.01)
    os.unlink(path)


def _open(name: str) -> None:
    open(_path(name), "w").close()
