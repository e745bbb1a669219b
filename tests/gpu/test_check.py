"""The checks of a GPU mesh, tried on CPU workers: what they have in common with a GPU's, and that they run at all."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NEED_A_GPU = {"nccl", "kernel_without_gpu"}


@pytest.mark.slow
def test_every_check_that_needs_no_gpu_holds_on_cpu_workers() -> None:
    command = [sys.executable, "-W", "ignore", "-m", "tests.gpu.check", "--device", "cpu"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    verdicts = dict(re.findall(r"^(\w+) +(holds|not run)", done.stdout, re.M))
    assert {name for name, verdict in verdicts.items() if verdict == "not run"} == NEED_A_GPU
    assert len(verdicts) > 12


def test_without_a_gpu_the_script_says_so() -> None:
    command = [sys.executable, "-W", "ignore", "-m", "tests.gpu.check"]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=60, env={"CUDA_VISIBLE_DEVICES": "", "PATH": ""}
    )
    assert (done.returncode, "there is no GPU here" in done.stdout) == (2, True), done.stderr
