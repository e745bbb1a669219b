"""Several meshes at once: independent of each other, handed out while they are healthy, killed as a crash would."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import monarch_lab as ml
from monarch_lab.config import Settings
from monarch_lab.session import options as session_options
from monarch_lab.session.options import Options, part_of_gpus
from monarch_lab.transport import platform
from tests.supervisor.recorder import wait_until

CPU: dict[str, Any] = {"device": "cpu", "gpus_per_host": 1}


@ml.remote
def fail(x: torch.Tensor) -> torch.Tensor:
    raise ValueError("mine")


@pytest.fixture
def pair() -> Iterator[tuple[Any, ml.Bootstrap]]:
    """Two meshes of one worker, and what kills them."""
    meshes, bootstrap = ml.local_meshes_and_bootstraps(meshes=2, **CPU)
    with bootstrap:
        yield meshes, bootstrap
    assert not any(map(platform.is_alive, bootstrap.processes)) and bootstrap.get_mesh_worlds() == []


@pytest.mark.slow
def test_several_meshes_of_one_kernel_each_give_their_own_values() -> None:
    with ml.local_meshes(meshes=4, hosts_per_mesh=1, name="many", **CPU) as meshes:
        assert [mesh.name for mesh in meshes] == ["many_0", "many_1", "many_2", "many_3"]
        found = []
        for number, mesh in enumerate(meshes, 1):
            with mesh.activate():
                found.append(ml.fetch_shard(torch.ones(3) * number))
        random.Random(3).shuffle(order := list(range(4)))
        for at in order:
            assert found[at].result().tolist() == [at + 1.0] * 3
        meshes[1].exit()
        assert [mesh.state for mesh in meshes] == ["live", "closed", "live", "live"], "each ends alone"
    assert {mesh.state for mesh in meshes} == {"closed"} and not {m.name for m in meshes} & set(ml.meshes())


@pytest.mark.slow
def test_eight_meshes_fetched_in_any_order_give_their_own_values() -> None:
    with ml.local_meshes(meshes=8, **CPU) as meshes:
        found = {}
        for number, mesh in enumerate(meshes):
            with mesh.activate():
                found[number] = ml.fetch_shard(torch.full((2,), float(number)))
        for number in random.Random(5).sample(range(8), 8):
            assert found[number].result().tolist() == [number, number]


def test_a_mesh_that_does_not_come_up_leaves_none_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    before = dict(ml.meshes())
    with ml.local_mesh(name="twice_1", **CPU):
        with pytest.raises(ValueError, match='mesh "twice_1" is running already'):
            ml.local_meshes(meshes=3, name="twice", **CPU)
        assert set(ml.meshes()) == {*before, "twice_1"}
    for wrong in (0, -1, True, 1.5):
        with pytest.raises(ValueError, match="at least 1 of meshes"):
            ml.local_meshes(meshes=wrong, **CPU)


def test_a_world_has_an_agent_and_workers_of_its_own(pair: tuple[Any, ml.Bootstrap]) -> None:
    meshes, bootstrap = pair
    assert bootstrap.get_mesh_worlds() == ["mesh_0_worker", "mesh_1_worker"]
    pids = bootstrap.mesh_worlds
    assert [len(pids[name]) for name in pids] == [2, 2] and len(set(bootstrap.processes)) == 4
    assert [pids[mesh.name][1] for mesh in meshes] == [mesh.status().processes[0].pid for mesh in meshes]
    info = meshes[1].get_info()
    assert info.mesh_labels == {"world": "mesh_1_worker"}
    assert [(d["rank"], d["host"], d["gpu"], d["device"]) for d in info.devices_labels] == [("0", "0", "0", "cpu")]


def test_a_killed_mesh_raises_and_the_other_goes_on(pair: tuple[Any, ml.Bootstrap]) -> None:
    (one, two), bootstrap = pair
    with pytest.raises(KeyError, match="there is no world 'mesh_7'; there is mesh_0_worker, mesh_1_worker"):
        bootstrap.kill_mesh("mesh_7")
    with pytest.raises(ValueError, match="world mesh_0_worker runs"):
        bootstrap.spawn_mesh("mesh_0_worker")
    killed = bootstrap.mesh_worlds["mesh_0_worker"]
    bootstrap.kill_mesh("mesh_0_worker")
    with pytest.raises(ml.DeviceException), one.activate():
        for _ in range(1000):
            ml.inspect(torch.ones(1) + 1)
    with two.activate():
        with pytest.raises(ml.RemoteException, match="mine"):
            ml.inspect(fail(torch.ones(1)))
        assert ml.inspect(torch.ones(1) + 1).item() == 2
    wait_until(lambda: not any(map(platform.is_alive, killed)))
    name = bootstrap.spawn_mesh("mesh_0_worker")
    assert name == "mesh_0_worker" and one.state == "closed" and two.state == "live"
    again = bootstrap.worlds[name].hand_out()
    with again.activate():
        assert ml.inspect(torch.ones(1) + 2).item() == 3


def test_a_worker_that_is_killed_makes_its_world_unhealthy_and_no_other() -> None:
    provider, bootstrap = ml.local_mesh_provider(meshes=2, auto_epoch=True, labels={"team": "blue"}, **CPU)
    with bootstrap:
        names = [f"mesh_{index}_worker_epoch_0" for index in (0, 1)]
        assert provider.status().keys() == set(names)
        meshes = {mesh.name: mesh for mesh in (provider.new_mesh(60), provider.new_mesh(60))}
        assert set(meshes) == set(names) and set(provider.status().values()) == {ml.WorldStatus.LIVE}
        assert meshes[names[0]].get_info().mesh_labels == {"team": "blue", "world": names[0]}
        with pytest.raises(TimeoutError, match=r"Could not find a healthy world in 0.1s!"):
            provider.new_mesh(timeout_in_sec=0.1)
        with pytest.raises(TimeoutError, match="none is on its way"):
            provider.new_mesh()
        os.kill(bootstrap.mesh_worlds[names[1]][-1], 9)
        with pytest.raises(ml.DeviceException, match="SIGKILL"), meshes[names[1]].activate():
            for _ in range(1000):
                ml.inspect(torch.ones(1) + 1)
        assert provider.status() == {names[0]: ml.WorldStatus.LIVE, names[1]: ml.WorldStatus.UNHEALTHY}
        later = bootstrap.spawn_mesh(names[1])
        assert later == "mesh_1_worker_epoch_1"
        assert provider.status()[later] is ml.WorldStatus.AWAITING_CREATION
        meshes[names[1]].exit()
        assert provider.status().keys() == {names[0], later}, "evicted with its mesh"
        assert provider.new_mesh(60).name == later
        assert bootstrap.launch_mesh() == "mesh_2_worker_epoch_0"
        bootstrap.kill_mesh("mesh_2_worker_epoch_0")
        with pytest.raises(TimeoutError) as raised:
            provider.new_mesh(1)
        assert "mesh_2_worker_epoch_0: the agent" in str(raised.value.__cause__)
        assert "mesh_2_worker_epoch_0" not in provider.status(), "nobody had it: evicted"
    assert not any(map(platform.is_alive, bootstrap.processes))


@pytest.mark.parametrize("device", [None, "cuda"])
def test_meshes_share_the_gpus_of_the_machine_where_there_are_enough(
    device: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_options, "_visible_gpus", lambda: 4)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4, 5,6,7")

    def seen(parts: int, **given: Any) -> list[Any]:
        return [(part.env or {}).get("CUDA_VISIBLE_DEVICES") for part in part_of_gpus(Options(**given), parts)]

    assert seen(2, device=device) == ["4,5", "6,7"]
    assert seen(2, device=device, hosts=2, gpus_per_host=1) == ["4,5", "6,7"]
    assert seen(4, device=device) == ["4", "5", "6", "7"]
    assert seen(1, device=device) == [None]
    assert seen(2, device="cpu") == [None, None]
    if device == "cuda":
        with pytest.raises(ValueError, match='5 meshes of 1 workers.*device="cpu"'):
            seen(5, device=device)
    else:
        assert [part.device for part in part_of_gpus(Options(), 5)] == ["cpu"] * 5


def test_the_options_reach_the_settings_of_the_mesh() -> None:
    supervision = ml.SupervisionParams(update_timeout=30, query_interval=2, update_interval=0.5)
    controller = ml.ControllerParams(operation_timeout=7, fail_on_worker_timeout=True)
    settings = Options(supervision_params=supervision, controller_params=controller).applied(Settings())
    assert (settings.timeouts.lost, settings.timeouts.look, settings.timeouts.beat) == (30, 2, 0.5)
    assert settings.controller is controller
    launch = Options(hosts=3, gpus_per_host=16, device="cpu", socket_type=ml.SocketType.TCP).launch("m", settings)
    assert (launch.hosts, launch.per_host, launch.socket_type, launch.logging_location) == (3, 16, "tcp", "file")
