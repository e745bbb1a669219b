"""Deaths of workers and of the agent under real work: who is told what, what is kept, and the way back."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import monarch_lab as ml
from monarch_lab.config import MARK_VARIABLE
from monarch_lab.errors import DeviceException
from monarch_lab.transport import platform
from tests.repeats import repeated
from tests.supervisor.recorder import wait_until

pytestmark = pytest.mark.skipif(not platform.LINUX, reason="/proc")


@pytest.fixture(scope="module")
def three() -> Iterator[Any]:
    with ml.local_mesh(gpus_per_host=3, device="cpu", name="faults") as mesh:
        yield mesh


@pytest.fixture
def mesh(three: Any) -> Iterator[Any]:
    if three.state == "dead":
        three.restart()
    with three.activate():
        yield three


@ml.remote
def hold(x: torch.Tensor, file: str) -> torch.Tensor:
    """On rank 1, once it is armed by another file: makes the file and sleeps."""
    import os
    import time

    if os.environ["RANK"] == "1" and os.path.exists(file + ".armed"):
        with open(file, "w") as f:
            f.write("here")
        time.sleep(600)
    return x + 1


@ml.remote
def holding_the_interpreter(x: torch.Tensor, file: str) -> torch.Tensor:
    import os

    if os.environ["RANK"] == "1":
        with open(file, "w") as f:
            f.write("here")
        sum(range(10**12))  # no signal handler runs, no other thread
    return x + 1


def kill_once(there: Callable[[], bool], pid: int, sig: signal.Signals) -> threading.Thread:
    def act() -> None:
        wait_until(there)
        os.kill(pid, sig)

    thread = threading.Thread(target=act)
    thread.start()
    return thread


@repeated(few=3)
@pytest.mark.parametrize("sig", [signal.SIGKILL, signal.SIGSEGV], ids=["kill", "segv"])
@pytest.mark.parametrize("doing", ["idle", "function", "interpreter", "collective"])
def test_a_death_is_told_with_all_that_is_known_and_the_rest_is_kept(
    mesh: Any, doing: str, sig: signal.Signals, turn: int, tmp_path: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    pid = mesh.status().processes[1].pid
    kept = mesh.rank("gpu") + 10
    file = str(tmp_path / "there")
    if doing == "collective":
        hold(kept, file)  # the next call of the kind waits for no answer
    (tmp_path / "there.armed").touch()
    mesh.sync()
    killer = kill_once(lambda: doing == "idle" or os.path.exists(file), pid, sig)
    with pytest.raises(DeviceException) as caught:
        if doing == "function":
            ml.fetch_all(hold(kept, file))
        elif doing == "interpreter":
            ml.fetch_all(holding_the_interpreter(kept, file))
        elif doing == "collective":
            slow = hold(kept, file)
            ml.fetch_all(slow.reduce("gpu"))
        while True:
            mesh.sync()
    killer.join()
    text = str(caught.value)
    assert caught.value.ranks == (1,)
    assert f"rank 1 (host 0, pid {pid}) was killed by {sig.name}" in text
    assert "%mesh restart --ranks 1" in text
    if sig is signal.SIGSEGV:
        assert "Fatal Python error: Segmentation fault" in text  # its last lines: faulthandler's stack
    told = capfd.readouterr().err
    assert told.count(f"rank 1 (host 0, pid {pid}) was killed by {sig.name}") == 1
    assert ("it had not reported" in told) == (doing != "idle")
    if doing != "idle":
        assert "test_faults.py:" in told and "hold" in told
    assert [ml.inspect(kept, gpu=g).item() for g in (0, 2)] == [10, 12]
    mesh.restart(1)
    assert ml.fetch_all(torch.ones(2).reduce("gpu")).tolist() == [[[3.0, 3.0]] * 3]


@repeated(few=1, many=5)
def test_with_the_agent_go_all_its_workers_whatever_they_do(mesh: Any, turn: int, tmp_path: Any) -> None:
    """Grandchildren in sessions of their own, and a worker that holds the interpreter lock."""
    supervisor = mesh._owner.supervisor
    pids = [process.pid for process in mesh.status().processes]
    mark = platform.variable_of(pids[0], MARK_VARIABLE)
    assert mark

    def family() -> int:
        return subprocess.Popen(["sleep", "600"], start_new_session=True).pid

    children = [ml.call_on_shard_and_fetch(family, shard={"gpu": g}).result() for g in range(3)]
    file = str(tmp_path / "there")
    killer = kill_once(lambda: os.path.exists(file), supervisor.agent_pid, signal.SIGKILL)
    with pytest.raises(DeviceException, match="agent"):
        ml.fetch_all(holding_the_interpreter(torch.ones(1), file))
    killer.join()
    wait_until(lambda: not any(platform.is_alive(pid) for pid in [*pids, *children]))
    wait_until(lambda: not platform.marked(MARK_VARIABLE, mark))
    assert mesh.state == "dead"
    mesh.restart()
    assert ml.fetch_all(torch.ones(1).reduce("gpu")).tolist() == [[[3.0]] * 3]


def test_stop_ends_stopped_deaf_and_locked_workers_in_time(tmp_path: Any) -> None:
    """A worker that is stopped, one that ignores SIGTERM, one that holds the interpreter lock."""
    mesh = ml.local_mesh(gpus_per_host=3, device="cpu", name="stubborn")
    pids = [process.pid for process in mesh.status().processes]

    def deaf() -> None:
        import signal

        signal.signal(signal.SIGTERM, signal.SIG_IGN)

    with mesh.activate():
        ml.call_on_shard_and_fetch(deaf, shard={"gpu": 2}).result()
        file = str(tmp_path / "there")
        holding_the_interpreter_future = ml.call_on_shard_and_fetch(
            holding_the_interpreter, torch.ones(1), file, shard={"gpu": 1}
        )
        wait_until(lambda: os.path.exists(file))
        os.kill(pids[0], signal.SIGSTOP)
    began = time.monotonic()
    mesh.exit()
    assert time.monotonic() - began < mesh.client.settings.timeouts.stop
    assert not any(platform.is_alive(pid) for pid in pids)
    assert isinstance(holding_the_interpreter_future.exception(5), ml.MeshError)
