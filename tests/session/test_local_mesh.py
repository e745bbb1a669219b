"""Starting and stopping meshes on this machine; a dead worker; what a mesh leaves behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from typing import Any

import pytest
import torch

import monarch_lab as ml
from monarch_lab.session.pool import warm_pool
from tests.supervisor.recorder import ROOT, wait_until


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"hosts": 0}, "at least 1 of hosts"),
        ({"hosts": -1}, "at least 1 of hosts"),
        ({"gpus_per_host": 0}, "at least 1 of workers"),
        ({"gpus_per_host": -2}, "at least 1 of workers"),
        ({"gpus_per_host": True}, "at least 1 of workers"),
        ({"gpus_per_host": 1.5}, "at least 1 of workers"),
        ({"device": "tpu"}, '"cpu" or "cuda"'),
        ({"name": "my mesh"}, "no name for a mesh"),
        ({"device": "cuda", "env": {"CUDA_VISIBLE_DEVICES": ""}}, 'this machine has none: use .*device="cpu"'),
        ({"socket_type": "udp"}, 'socket_type is "unix" or "tcp", not \'udp\''),
        ({"logging_location": "nowhere"}, 'logging_location is "file" or "default"'),
        ({"labels": {"": "x"}}, "cannot be a label"),
        ({"env": {"A=B": "x"}}, "cannot be a variable"),
        ({"env": {"A": "x\0"}}, "cannot be a variable"),
        ({"name": ""}, "no name for a mesh"),
        ({"supervision_params": ml.SupervisionParams(update_timeout=1)}, "update_timeout .* more than twice"),
    ],
)
def test_a_mesh_that_cannot_be_is_refused_before_anything_starts(options: dict[str, Any], text: str) -> None:
    before = dict(ml.meshes())
    with pytest.raises(ValueError, match=text):
        ml.local_mesh(**options)
    assert ml.meshes() == before


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"supervision_params": 3}, "supervision_params is an ml.SupervisionParams, not 3"),
        ({"controller_params": {"operation_timeout": 1}}, "controller_params is an ml.ControllerParams"),
        ({"labels": ["a"]}, "labels is a dict of strings"),
        ({"labels": {"a": 1}}, "the label 'a': 1 is not two strings"),
        ({"env": {"A": None}}, "the variable 'A': None is not two strings"),
    ],
)
def test_an_option_of_the_wrong_kind_is_a_type_error(options: dict[str, Any], text: str) -> None:
    with pytest.raises(TypeError, match=text):
        ml.local_mesh(**options)


def test_a_name_in_use_is_refused(mesh: Any) -> None:
    with pytest.raises(ValueError, match="running already"):
        ml.local_mesh(name=mesh.name, device="cpu")
    assert ml.meshes()[mesh.name] is mesh


@pytest.fixture
def own_mesh() -> Any:
    """A mesh that the test may break."""
    with ml.local_mesh(gpus_per_host=2, device="cpu", name="own", env={"MY_SETTING": "7"}) as mesh:
        yield mesh


def test_a_mesh_has_the_dims_host_and_gpu_and_its_own_processes(own_mesh: Any) -> None:
    def told(x: Any) -> Any:
        return os.getpid(), os.environ["MY_SETTING"], os.environ.get("MY_OTHER")

    with own_mesh.activate():
        pids = []
        for gpu in range(2):
            pid, setting, other = ml.call_on_shard_and_fetch(
                told, torch.ones(1), shard={"host": 0, "gpu": gpu}
            ).result()
            pids.append(pid)
            assert setting == "7" and other is None
    assert len({*pids, os.getpid()}) == 3
    assert [p.pid for p in own_mesh.status().processes] == pids
    assert own_mesh.sizes == {"host": 1, "gpu": 2} and ml.meshes()["own"] is own_mesh


def _pid(mesh: Any, gpu: int) -> int:
    return ml.call_on_shard_and_fetch(os.getpid, shard={"host": 0, "gpu": gpu}).result()


def test_a_killed_worker_is_named_and_the_others_keep_their_values(own_mesh: Any) -> None:
    with own_mesh.activate():
        x = own_mesh.rank("gpu") + 40
        total = (own_mesh.rank("gpu") + 1).reduce("gpu")
        pid = _pid(own_mesh, 1)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(ml.DeviceException) as raised:
            for _ in range(1000):
                (torch.ones(1) + 1).reduce("gpu")
                own_mesh.sync()
    text = str(raised.value)
    assert raised.value.ranks == (1,) and str(pid) in text and "SIGKILL" in text and re.search(r"rank 1|0\.1", text)
    assert own_mesh.state == "dead"
    for _ in range(2):
        assert ml.fetch_shard(x, host=0, gpu=0).result(60).item() == 40
        assert ml.inspect(total, gpu=0).item() == 3
        with pytest.raises(ml.DeviceException, match=str(pid)):
            ml.inspect(x, gpu=1)
        with pytest.raises(ml.DeviceException):
            ml.fetch_all(x)
        with pytest.raises(ml.DeviceException):
            own_mesh.sync()
        with pytest.raises(ml.DeviceException), own_mesh.activate():
            torch.ones(1)
    assert "40" in repr(x) or "no value" in repr(x)
    part = own_mesh.slice(gpu=0)
    with part.activate():
        assert (torch.ones(2) + 1).tolist() == [2, 2]


def test_a_worker_killed_while_others_wait_for_it_ends_the_wait(own_mesh: Any) -> None:
    @ml.remote
    def die_or_wait(rank: Any) -> Any:
        import os
        import signal

        if rank.item() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return rank

    with own_mesh.activate():
        torch.ones(1).reduce("gpu")
        with pytest.raises(ml.DeviceException, match="SIGKILL"):
            die_or_wait(own_mesh.rank("gpu"))


def test_a_stopped_mesh_says_so_and_stopping_twice_is_fine() -> None:
    mesh = ml.local_mesh(gpus_per_host=1, device="cpu", name="brief")
    x = mesh.replicate(torch.ones(2))
    pid = mesh.status().processes[0].pid
    mesh.exit()
    mesh.exit()
    assert mesh.state == "closed" and "brief" not in ml.meshes()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    calls = [
        lambda: x + 1,
        lambda: ml.inspect(x),
        lambda: x.tolist(),
        lambda: mesh.replicate(torch.ones(1)),
        lambda: mesh.activate(),
        lambda: mesh.sync(),
        lambda: x.reduce("gpu"),
        lambda: x.erfinv(),
        lambda: ml.remote(lambda t: t)(x),
        lambda: mesh.rank("gpu"),
    ]
    for call in calls:
        with pytest.raises(ml.ClosedError, match="brief"):
            call()
    assert "no value" in repr(x), "printing never raises"


def test_an_error_in_the_block_stops_the_mesh_all_the_same() -> None:
    with pytest.raises(RuntimeError, match="mine"), ml.local_mesh(gpus_per_host=1, device="cpu", name="brief") as mesh:
        raise RuntimeError("mine")
    assert mesh.state == "closed" and "brief" not in ml.meshes()


def test_two_meshes_run_side_by_side_and_fail_apart(mesh: Any, own_mesh: Any) -> None:
    x, y = mesh.replicate(torch.ones(2)), own_mesh.replicate(torch.ones(2) * 2)
    assert (x + x).tolist() == [2, 2] and (y + y).tolist() == [4, 4]
    with pytest.raises(TypeError, match="WRONG_MESH"):
        x + y  # noqa: B018
    assert mesh != own_mesh and mesh.slice(gpu=0) != own_mesh.slice(gpu=0)
    with own_mesh.activate():
        os.kill(_pid(own_mesh, 0), signal.SIGKILL)
        with pytest.raises(ml.DeviceException):
            for _ in range(1000):
                own_mesh.sync()
    assert mesh.state == "live" and (x * 3).tolist() == [3, 3]


def test_hosts_are_the_first_dim() -> None:
    with ml.local_mesh(hosts=2, gpus_per_host=1, device="cpu", name="hosts") as mesh, mesh.activate():
        assert mesh.sizes == {"host": 2, "gpu": 1}
        for host in range(2):
            assert ml.inspect(mesh.rank("host"), host=host, gpu=0).item() == host
        assert (mesh.rank("host") + 1).reduce("host").item() == 3
        assert (mesh.rank("host") + 1).reduce("gpu").equal_dims == ("gpu",)


@pytest.mark.slow
def test_a_later_mesh_stands_on_the_spare_which_is_no_mesh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MONARCH_LAB_WARM_POOL_DELAY", "0")
    warm_pool.clear()
    with ml.local_mesh(gpus_per_host=1, device="cpu", name="first"):
        wait_until(lambda: warm_pool.is_ready)
        assert "spare" not in ml.meshes()
        spare = warm_pool._spare
        assert spare is not None
        with ml.local_mesh(hosts=2, gpus_per_host=1, device="cpu", name="later", env={"MINE": "1"}) as later:
            assert later._owner.supervisor.directory == spare.directory
            with later.activate():
                assert (later.rank("host") + 1).reduce("host").item() == 3
                told = ml.call_on_shard_and_fetch(_facts, shard={"host": 1, "gpu": 0}).result()
            assert told == ("1", "2", "1", os.getcwd(), torch.get_num_threads() >= 1)
    wait_until(lambda: warm_pool.is_ready)  # made once more when "later" was up
    warm_pool.clear()


def _facts() -> Any:
    names = ("RANK", "WORLD_SIZE", "MINE")
    return *(os.environ[name] for name in names), os.getcwd(), torch.get_num_threads() >= 1


def _write_in_c(x: Any) -> int:
    os.write(1, b"from C\n")
    return os.getpid()


PRINTING = """
import os, torch, monarch_lab as ml
from tests.session.test_local_mesh import _write_in_c
options = {"logging_location": ml.LoggingLocation.DEFAULT, "labels": {"team": "blue"}}
with ml.local_mesh(hosts=1, gpus_per_host=9, device="cpu", **options) as mesh, mesh.activate():
    ml.call_on_shard_and_fetch(_write_in_c, torch.ones(1), shard={"host": 0, "gpu": 8}).result()
    assert mesh.get_info().mesh_labels == {"team": "blue"} and len(mesh.get_info().devices_labels) == 9
    assert len(mesh.slice(gpu=slice(2, 5)).get_info().devices_labels) == 3
    assert (mesh.rank("gpu")).reduce("gpu").item() == 36
"""


@pytest.mark.slow
def test_output_in_the_default_place_goes_where_the_kernels_own_goes_with_more_than_eight_workers() -> None:
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    words = [sys.executable, "-c", PRINTING]
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, env=environ, timeout=100)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "from C\n"
