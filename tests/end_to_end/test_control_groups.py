"""What only the system can do to a process: out of memory, and a state in which SIGKILL does nothing.

As root, with the memory and freezer controllers of version 1.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

import monarch_lab as ml
from monarch_lab.errors import LaunchError
from monarch_lab.transport import platform
from tests.supervisor.recorder import wait_until

pytestmark = [pytest.mark.netlab, pytest.mark.timeout(180)]
ROOT = Path(__file__).parents[2]
CONTROLLERS = Path("/sys/fs/cgroup")


def make_group(controller: str) -> Path:
    parent = CONTROLLERS / controller
    if os.getuid() != 0 or not parent.is_dir():
        raise RuntimeError(f"this test needs root and the {controller} controller at {parent}")
    group = parent / f"monarch-lab-test-{uuid.uuid4().hex[:8]}"
    group.mkdir()
    return group


def remove(group: Path) -> None:
    def is_gone() -> bool:
        try:
            group.rmdir()
        except OSError:
            return False
        return True

    wait_until(is_gone)


@pytest.fixture
def freezer() -> Iterator[Path]:
    group = make_group("freezer")
    yield group
    (group / "freezer.state").write_text("THAWED")
    remove(group)


@pytest.fixture
def scarce_memory() -> Iterator[Path]:
    group = make_group("memory")
    (group / "memory.limit_in_bytes").write_text(str(900 << 20))
    yield group
    remove(group)


_HUNGRY = """
import sys
open(sys.argv[1] + "/cgroup.procs", "w").write("0")
import torch
import monarch_lab as ml

def eat():
    import os
    kept = []
    while os.environ["RANK"] == "1":
        kept.append(torch.ones(8 << 20))

with ml.local_mesh(gpus_per_host=2, device="cpu") as mesh, mesh.activate():
    kept = torch.ones(2)
    try:
        ml.call_on_shard_and_fetch(eat, shard={"gpu": 1}).result()
    except ml.DeviceException as e:
        print(e)
    print(ml.inspect(kept, gpu=0).tolist())
"""


def test_a_worker_that_the_system_killed_for_memory_is_told_as_that(scarce_memory: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _HUNGRY, str(scarce_memory)], capture_output=True, text=True, timeout=120, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    assert "was killed by SIGKILL: the system was out of memory" in done.stdout
    assert "[1.0, 1.0]" in done.stdout


def test_a_worker_that_cannot_be_killed_is_named_and_the_stop_returns(
    freezer: Path, caplog: pytest.LogCaptureFixture
) -> None:
    mesh = ml.local_mesh(gpus_per_host=2, device="cpu", name="frozen")
    pid = mesh.status().processes[1].pid
    (freezer / "cgroup.procs").write_text(str(pid))
    (freezer / "freezer.state").write_text("FROZEN")
    wait_until(lambda: (freezer / "freezer.state").read_text().strip() == "FROZEN")
    with pytest.raises(LaunchError, match=rf"rank 1 \(pid {pid}, state D\) did not end within 15 s of SIGKILL"):
        mesh.restart(1)
    began = time.monotonic()
    with caplog.at_level(logging.WARNING):
        mesh.exit()
    assert time.monotonic() - began < mesh.client.settings.timeouts.stop + 2
    assert any(f"process {pid} does not end" in r.getMessage() and "is D" in r.getMessage() for r in caplog.records)
    (freezer / "freezer.state").write_text("THAWED")
    wait_until(lambda: not platform.is_alive(pid))


def test_a_frozen_worker_is_no_dead_one(freezer: Path) -> None:
    with ml.local_mesh(gpus_per_host=2, device="cpu", name="frozen") as mesh:
        pid = mesh.status().processes[1].pid
        (freezer / "cgroup.procs").write_text(str(pid))
        (freezer / "freezer.state").write_text("FROZEN")
        os.kill(pid, signal.SIGCONT)
        assert mesh.state == "live"
        (freezer / "freezer.state").write_text("THAWED")
        mesh.sync()
