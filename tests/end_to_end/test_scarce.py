"""Disk full or read-only for logs, few descriptors: a clear message, and work goes on where it can."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import monarch_lab as ml
from monarch_lab.transport import platform

pytestmark = pytest.mark.skipif(not platform.LINUX, reason="/dev/full, /proc")
ROOT = Path(__file__).parents[2]


def works(mesh: Any) -> bool:
    with mesh.activate():
        return ml.fetch_all(torch.ones(1).reduce("gpu")).tolist() == [[[2.0], [2.0]]]


def write_to_stdout() -> str:
    import os

    try:
        return f"wrote {os.write(1, b'x' * 1000)}"
    except OSError as e:
        return e.strerror or ""


@pytest.mark.parametrize("place", ["/proc/self", "{file}/below", "/proc/nothing/here"])
def test_a_log_directory_that_cannot_be_written_to_is_told_and_done_without(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    wanted = place.format(file=tmp_path / "file")
    monkeypatch.setenv("MONARCH_LAB_LOG_DIR", wanted)
    with caplog.at_level(logging.WARNING), ml.local_mesh(gpus_per_host=2, device="cpu", name="scarce") as mesh:
        assert works(mesh)
        assert mesh._owner.supervisor.processes[0].stdout_path.startswith(mesh._owner.supervisor.directory)
    (told,) = [record.getMessage() for record in caplog.records if "log directory" in record.getMessage()]
    assert wanted in told and "cannot be written to" in told


@pytest.mark.slow
def test_a_full_disk_under_the_logs_stops_no_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for rank, end in ((0, "out"), (0, "err"), (1, "out"), (1, "err")):
        (tmp_path / f"scarce.{rank}.{end}").symlink_to("/dev/full")
    monkeypatch.setenv("MONARCH_LAB_LOG_DIR", str(tmp_path))
    with ml.local_mesh(gpus_per_host=2, device="cpu", name="scarce") as mesh:
        assert works(mesh)
        with mesh.activate():
            assert ml.call_on_shard_and_fetch(write_to_stdout, shard={"gpu": 0}).result() == "No space left on device"
        mesh.kill(1)
        while mesh.state != "dead":
            pass
        mesh.restart(1)
        assert works(mesh)


_FEW = """
import resource, sys
import monarch_lab as ml
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[1]), int(sys.argv[1])))
try:
    with ml.local_mesh(gpus_per_host=2, device="cpu"):
        print("up")
except ml.LaunchError as e:
    print("LaunchError", e)
"""


@pytest.mark.parametrize("limit", [12, 40, pytest.param(100, marks=pytest.mark.slow)])
def test_too_few_descriptors_are_told_and_nothing_is_left(limit: int) -> None:
    tag = f"test-{os.getpid()}-{limit}"
    done = subprocess.run(
        [sys.executable, "-c", _FEW, str(limit)],
        capture_output=True,
        text=True,
        timeout=100,
        cwd=ROOT,
        env={**os.environ, "LAB_TEST_SCARCE": tag},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(("up", "LaunchError mesh mesh cannot start")), done.stdout
    assert "up" in done.stdout or "descriptors" in done.stdout
    assert not platform.marked("LAB_TEST_SCARCE", tag)
