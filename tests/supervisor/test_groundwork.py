"""A mesh that stands on an agent and zygote made before it had a name."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from monarch_lab.config import MARK_VARIABLE
from monarch_lab.errors import LaunchError
from monarch_lab.supervisor import Ground, Groundwork, ProcessState, Supervisor
from monarch_lab.transport import platform
from tests.supervisor.recorder import ROOT, SETTINGS, Recorder, command_of, launch_of, wait_until


@pytest.fixture
def spare() -> Iterator[Groundwork]:
    """Agent and zygote, and no mesh."""
    groundwork = Groundwork(Ground.of(launch_of(), SETTINGS), "spare")
    wait_until(lambda: groundwork.is_idle)
    yield groundwork
    groundwork.stop()
    assert platform.marked(MARK_VARIABLE, groundwork.loop._spec.mark) == []
    assert not os.path.exists(groundwork.directory)


def below(groundwork: Groundwork) -> set[int]:
    assert groundwork.loop._agent is not None
    return {groundwork.loop._agent.pid, *platform.descendants(groundwork.loop._agent.pid)}


def test_a_mesh_takes_a_spare_and_its_workers_are_its_own(
    spare: Groundwork, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    before = below(spare)
    monkeypatch.setenv("LATER", "kernel")
    monkeypatch.delenv("HOME")
    launch = launch_of(name="later", env={"LAB_SETTING": "7", "RANK": "9"}, cwd=str(tmp_path), hosts=2, per_host=1)
    assert spare.ground.fits(Ground.of(launch, SETTINGS))
    recorder = Recorder()
    with Supervisor(launch, SETTINGS, recorder, spare) as mesh:
        mesh.wait_ready()
        assert mesh.directory == spare.directory and not spare.is_idle
        assert before < below(spare)
        assert {info.pid for info in mesh.processes.values()} == below(spare) - before
        for name, values in {b"LAB_SETTING": "77", b"LATER": "kernelkernel", b"HOME": "", b"RANK": "01"}.items():
            mesh.send(None, b"env " + name)
            assert "".join(recorder.wait_report(rank)[0].decode() for rank in (0, 1)) == values
        mesh.send([0], b"where")
        assert recorder.wait_report(0)[0].decode().split()[4] == str(tmp_path)
        assert mesh.processes[1].stdout_path.endswith("later.1.out")
    assert all(info.state is ProcessState.EXITED for info in mesh.processes.values())


def test_a_mesh_that_is_asked_for_while_the_spare_still_imports_waits_for_it() -> None:
    groundwork = Groundwork(Ground.of(launch_of(), SETTINGS), "spare")
    assert not groundwork.is_idle
    with Supervisor(launch_of(), SETTINGS, Recorder(), groundwork) as mesh:
        mesh.wait_ready()
    assert not os.path.exists(groundwork.directory)


@pytest.mark.parametrize(
    "name", ["OMP_NUM_THREADS", "LD_PRELOAD", "CUDA_VISIBLE_DEVICES", "TORCH_SHOW_CPP_STACKTRACES"]
)
def test_what_torch_reads_when_it_is_imported_cannot_be_changed_by_a_fork(name: str) -> None:
    ground = Ground.of(launch_of(), SETTINGS)
    assert not ground.fits(Ground.of(launch_of(env={name: "other"}), SETTINGS))


def test_other_preloads_workers_and_settings_need_a_ground_of_their_own() -> None:
    ground = Ground.of(launch_of(), SETTINGS)
    assert ground.fits(Ground.of(launch_of(name="other", per_host=9, seed=3, env={"A": "b"}), SETTINGS))
    assert not ground.fits(Ground.of(launch_of(preload=("json",)), SETTINGS))
    assert not ground.fits(Ground.of(launch_of(worker_module="mute_worker"), SETTINGS))
    assert not ground.fits(Ground.of(launch_of(), replace(SETTINGS, log_dir="/elsewhere")))


def test_a_spare_whose_zygote_or_agent_was_killed_is_idle_no_more(spare: Groundwork) -> None:
    zygote = next(pid for pid in below(spare) if b"agent.zygote" in command_of(pid))
    os.kill(zygote, signal.SIGKILL)
    wait_until(lambda: not spare.is_idle)
    assert "the zygote has ended" in str(spare.loop.start.progress)
    with pytest.raises(LaunchError, match="the zygote has ended"):
        Supervisor(launch_of(), SETTINGS, Recorder(), spare).start()
    assert not os.path.exists(spare.directory)


def test_an_agent_killed_under_a_spare_takes_all_of_it(spare: Groundwork) -> None:
    processes = below(spare)
    assert spare.loop._agent is not None
    os.kill(spare.loop._agent.pid, signal.SIGKILL)
    wait_until(lambda: not spare.is_idle and not any(map(platform.is_alive, processes)))


PRINTING_KERNEL = """
import sys
from monarch_lab.supervisor import Supervisor
from tests.supervisor.recorder import SETTINGS, Recorder, launch_of
recorder = Recorder()
with Supervisor(launch_of(logging_location="default"), SETTINGS, recorder) as mesh:
    mesh.wait_ready()
    assert {info.stdout_path for info in mesh.processes.values()} == {""}
    mesh.send([1], b"print through")
    recorder.wait_report(1)
    mesh.send([0], b"raise my mistake")
    assert recorder.wait_exit(0).last_lines == ""
"""


def test_workers_without_files_write_where_their_kernel_does_and_hold_nothing_of_it_open() -> None:
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    # The pipes end: neither agent, guard, zygote nor worker is left that holds them.
    words = [sys.executable, "-c", PRINTING_KERNEL]
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, env=environ, timeout=60)
    assert done.stdout == "through\n" and done.returncode == 0
    assert "through\n" in done.stderr and "ValueError: my mistake" in done.stderr


def test_output_to_no_file_and_to_files_need_a_ground_of_their_own() -> None:
    ground = Ground.of(launch_of(), SETTINGS)
    assert not ground.fits(Ground.of(launch_of(logging_location="default"), SETTINGS))
    assert not ground.fits(Ground.of(launch_of(socket_type="tcp"), SETTINGS))
