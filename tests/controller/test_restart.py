"""Another process under a rank: the others keep their values, and nothing is silently wrong."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import monarch_lab as ml
from monarch_lab.controller.refs import Ref
from monarch_lab.errors import DeviceException, RemoteException, UsageError, UsageValueError

pytestmark = pytest.mark.skipif(os.name != "posix", reason="signals")


@pytest.fixture(scope="module")
def three() -> Iterator[Any]:
    with ml.local_mesh(gpus_per_host=3, device="cpu", name="three") as mesh:
        yield mesh


@pytest.fixture
def mesh(three: Any) -> Iterator[Any]:
    if three.state == "dead":
        three.restart()
    with three.activate():
        yield three


def pids(mesh: Any) -> list[int]:
    return [process.pid for process in mesh.status().processes]


def end(mesh: Any, rank: int, sig: signal.Signals = signal.SIGKILL) -> None:
    """Kill a worker, and wait until the kernel knows."""
    os.kill(pids(mesh)[rank], sig)
    with pytest.raises(DeviceException):
        while True:
            mesh.sync()


@pytest.mark.parametrize("turn", range(3))
def test_the_other_ranks_keep_their_values_and_their_processes(mesh: Any, turn: int) -> None:
    x = mesh.rank("gpu") + 10
    before = pids(mesh)
    end(mesh, 1)
    assert mesh.restart(1) == (1,)
    after = pids(mesh)
    assert [a == b for a, b in zip(before, after, strict=True)] == [True, False, True]
    assert mesh.state == "live"
    assert [ml.inspect(x, gpu=g).item() for g in (0, 2)] == [10, 12]
    with pytest.raises(DeviceException, match="made before rank 1 was restarted"):
        ml.inspect(x, gpu=1)


def test_shared_memory_of_a_rank_that_died_is_let_go_when_the_others_have_let_it_go(mesh: Any) -> None:
    with ml.no_mesh.activate():
        local = torch.arange(700_000.0)
    before = _segments()
    x = mesh.replicate(local)
    assert _segments() == before + 1
    end(mesh, 1)
    mesh.restart(1)
    assert ml.fetch_shard(x, gpu=2).result().equal(local)
    gc.collect()
    assert _segments() == before + 1
    del x
    mesh.sync()
    assert _segments() == before
    assert ml.inspect(mesh.replicate(local), gpu=1).equal(local)


def _segments() -> int:
    paths = [p for f in os.listdir("/proc/self/fd") if os.path.lexists(p := f"/proc/self/fd/{f}")]
    return len({os.stat(p).st_ino for p in paths if "memfd:monarch_lab" in os.readlink(p)})


def test_a_collective_works_with_the_new_process(mesh: Any) -> None:
    ones = torch.ones(2)
    assert ml.inspect(ones.reduce("gpu")).tolist() == [3.0, 3.0]  # the old group is there
    end(mesh, 2)
    mesh.restart(2)
    fresh = torch.ones(2) * (mesh.rank("gpu") + 1)
    assert ml.fetch_all(fresh.reduce("gpu")).tolist() == [[[6.0, 6.0]] * 3]


def test_an_op_on_what_was_lost_is_refused_and_changes_nothing(mesh: Any) -> None:
    kept, fresh_before = torch.zeros(2), None
    mesh.restart([1])
    with pytest.raises(DeviceException, match="LOST"):
        kept.add_(1)
    with pytest.raises(DeviceException, match="LOST"):
        kept + torch.ones(2)
    with pytest.raises(DeviceException, match="LOST"):
        torch.ones(2) + kept
    with pytest.raises(DeviceException, match="LOST"):
        kept.reduce("gpu")
    assert fresh_before is None
    assert ml.inspect(kept, gpu=0).tolist() == [0.0, 0.0]
    assert "gone: made before it was restarted" in repr(kept) and "[0, 2]" not in repr(kept)
    mesh.sync()


def test_what_has_no_part_on_the_rank_goes_on(mesh: Any) -> None:
    part = mesh.slice(gpu=slice(0, 2))
    with part.activate():
        there = torch.ones(3)
    mesh.restart(2)
    with part.activate():
        assert ml.fetch_all(there + torch.ones(3)).tolist() == [[[2.0] * 3] * 2]


def test_what_the_workers_learned_before_serves_after(mesh: Any) -> None:
    def step(scale: float) -> Any:
        return (torch.full((2, 2), scale) @ torch.ones(2, 2)).square().sum(dim=0)

    before = ml.fetch_all(step(0.5))
    misses = mesh.client.cache.misses
    mesh.restart("0,2")
    assert torch.equal(ml.fetch_all(step(0.5)), before)
    assert mesh.client.cache.misses == misses


def test_all_ranks_go_on_drawing_equal_numbers(mesh: Any) -> None:
    torch.manual_seed(3)
    part = mesh.slice(gpu=slice(0, 2))
    torch.rand(5)
    with part.activate():
        torch.rand(3)
    mesh.restart(1)
    drawn = ml.fetch_all(torch.rand(4))
    with part.activate():
        of_part = ml.fetch_all(torch.rand(4))
    assert torch.equal(drawn[0, 0], drawn[0, 1]) and torch.equal(drawn[0, 0], drawn[0, 2])
    assert torch.equal(of_part[0, 0], of_part[0, 1])
    with ml.no_mesh.activate():
        torch.manual_seed(3)
        torch.rand(5)
        assert torch.equal(drawn[0, 0], torch.rand(4))  # as if nothing had been


def test_every_rank_may_be_restarted(mesh: Any) -> None:
    x = torch.ones(1)
    before = pids(mesh)
    assert mesh.restart() == (0, 1, 2)
    assert set(before).isdisjoint(pids(mesh))
    with pytest.raises(DeviceException, match="ranks 0, 1, 2 were restarted"):
        x + 1
    drawn = ml.fetch_all(torch.rand(4))
    assert torch.equal(drawn[0, 0], drawn[0, 2])


def test_a_ref_whose_making_was_cut_short_is_no_hindrance(mesh: Any) -> None:
    half = Ref.__new__(Ref)  # as an interrupt leaves it in the frames of a traceback
    end(mesh, 0)
    assert mesh.restart(0) == (0,)
    assert not hasattr(half, "mesh")
    assert ml.inspect(mesh.rank("gpu"), gpu=0).item() == 0


def test_a_constant_of_the_kernel_is_not_lost(mesh: Any) -> None:
    step = torch.tensor(3.0)
    mesh.restart(0)
    assert (step + 1).item() == 4.0
    assert ml.fetch_all(torch.ones(2) * step).tolist() == [[[3.0, 3.0]] * 3]


def test_a_model_is_trained_on_after_its_values_were_put_back(mesh: Any) -> None:
    model = torch.nn.Linear(3, 2)
    x = torch.ones(4, 3)
    expected = ml.inspect(model(x), gpu=0)
    end(mesh, 1)
    mesh.restart(1)
    state = {name: mesh.replicate(ml.inspect(value, gpu=0)) for name, value in model.named_parameters()}
    again = torch.nn.Linear(3, 2)
    again.load_state_dict(state)
    assert torch.equal(ml.fetch_all(again(torch.ones(4, 3)))[0, 1], expected)


def test_the_agent_itself_may_die(mesh: Any) -> None:
    agent = mesh._owner.supervisor.agent_pid
    os.kill(agent, signal.SIGKILL)
    with pytest.raises(DeviceException, match="agent.*killed by SIGKILL.*%mesh restart"):
        while True:
            mesh.sync()
    assert mesh.restart(1) == (0, 1, 2)  # with it went all
    assert mesh.state == "live"
    assert ml.fetch_all(torch.ones(1).reduce("gpu")).tolist() == [[[3.0]] * 3]


def test_killed_ranks_are_told_and_can_be_restarted(mesh: Any, capfd: pytest.CaptureFixture[str]) -> None:
    assert mesh.kill("gpu=1:") == (1, 2)
    while len(mesh.client.alive) > 1:
        pass
    with pytest.raises(DeviceException, match="rank . .*SIGKILL.*rank . .*SIGKILL.*--ranks 1,2 brings"):
        mesh.check_alive()
    assert mesh.kill([1, 2]) == ()
    mesh.restart([1, 2])
    told = capfd.readouterr().err
    assert told.count("was killed by SIGKILL") == 2


def test_ranks_that_are_not_there_are_refused(mesh: Any) -> None:
    for wrong in (3, "3", [0, 7], "gpu=3", "host=1"):
        with pytest.raises(UsageValueError):
            mesh.restart(wrong)
        with pytest.raises(UsageValueError):
            mesh.kill(wrong)
    with ml.random.vary("gpu"), pytest.raises(UsageError, match="leave the block first"):
        mesh.restart(0)
    assert mesh.state == "live"


def test_a_part_counts_its_own_ranks(mesh: Any) -> None:
    assert mesh.slice(gpu=slice(1, 3)).restart(0) == (1,)


def test_a_worker_that_reads_what_it_never_had_says_so(mesh: Any) -> None:
    """The kernel refuses such ops; were one to slip through, the worker must not hang or crash, and take part."""
    x = torch.ones(2)
    home = x._ref.mesh
    mesh.restart(1)
    x._ref.mesh = home  # as if it had not been found
    with pytest.raises(RemoteException, match="made before rank 1 was restarted") as caught:
        ml.fetch_all(x.reduce("gpu") + 1)
    assert caught.value.ranks == (1,)
    assert ml.fetch_all(torch.ones(1).reduce("gpu")).tolist() == [[[3.0]] * 3]


def test_recordings_are_known_to_the_new_process(mesh: Any) -> None:
    @ml.compile
    def double(x: Any) -> Any:
        return (x * 2 + torch.tensor([1.0, 1.0])).reduce("gpu")

    for _ in range(3):
        assert double(torch.ones(2)).tolist() == [9.0, 9.0]
    end(mesh, 1)
    mesh.restart(1)
    for _ in range(4):
        assert double(torch.ones(2)).tolist() == [9.0, 9.0]
    plain = ml.compile(lambda x: x + x)
    for _ in range(3):
        plain(torch.ones(2))
    end(mesh, 2)
    mesh.restart(2)
    assert ml.fetch_all(plain(torch.ones(2))).tolist() == [[[2.0, 2.0]] * 3]


def test_a_restarted_rank_has_the_streams_again(mesh: Any) -> None:
    side = ml.Stream("side")
    with side.activate():
        before = torch.ones(2) + 1
        mesh.sync()
    end(mesh, 1)
    mesh.restart([1])
    with side.activate():
        with pytest.raises(DeviceException, match="LOST"):
            before + 1
        after = torch.ones(2) + 1
        assert ml.fetch_all(after).tolist() == [[[2, 2]] * 3]
    view, loan = side.borrow(torch.zeros(2), mutable=True)
    with side.activate():
        view.add_(1)
    loan.drop()
