from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from monarch_lab.config import MARK_VARIABLE
from monarch_lab.transport import platform
from monarch_lab.transport.marks import is_orphaned, make_mark, sweep_orphans

pytestmark = pytest.mark.skipif(not platform.LINUX, reason="/proc")
_SLEEP = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)"]
_KERNEL = "from monarch_lab.transport.marks import make_mark; print(make_mark())"


def mark_of_an_ended_kernel() -> str:
    return subprocess.run([sys.executable, "-c", _KERNEL], capture_output=True, text=True, check=True).stdout.strip()


def test_a_mark_is_orphaned_when_its_kernel_has_ended() -> None:
    assert not is_orphaned(make_mark())
    assert is_orphaned(mark_of_an_ended_kernel())


@pytest.mark.parametrize("part", [0, 1, 2, 3, 4])
def test_a_mark_of_elsewhere_or_of_another_kind_is_left_alone(part: int) -> None:
    parts = mark_of_an_ended_kernel().split("/")
    parts[part] = "other" if part else "x/y"
    assert not is_orphaned("/".join(parts))


def test_a_reused_pid_does_not_make_an_orphan_look_owned() -> None:
    parts = make_mark().split("/")
    parts[2] = str(int(parts[2]) - 1)  # the process with our pid was started at another time
    assert is_orphaned("/".join(parts))


def test_only_what_an_ended_kernel_left_is_swept() -> None:
    marks = {"orphan": mark_of_an_ended_kernel(), "ours": make_mark()}
    started = {
        name: subprocess.Popen(_SLEEP, env={**os.environ, MARK_VARIABLE: mark}, stdout=subprocess.PIPE)
        for name, mark in marks.items()
    }
    try:
        for process in started.values():
            assert process.stdout is not None and process.stdout.readline() == b"up\n"
        assert sweep_orphans() >= 1
        assert started["orphan"].wait(30) == -signal.SIGKILL
        assert started["ours"].poll() is None
    finally:
        for process in started.values():
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()
