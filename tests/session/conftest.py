from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from monarch_lab.transport import platform
from tests.supervisor.recorder import ROOT, wait_until


@dataclass
class OtherKernel:
    """A process of its own with a mesh (tests/session/other_kernel.py)."""

    process: subprocess.Popen[str]
    directory: str
    agent: int
    workers: list[int]

    @property
    def pid(self) -> int:
        return self.process.pid

    def order(self, rank: int, what: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{rank} {what}\n")
        self.process.stdin.flush()

    def says(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def is_gone(self) -> bool:
        return not any(map(platform.is_alive, [self.agent, *self.workers])) and not os.path.exists(self.directory)


@pytest.fixture
def other_kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., OtherKernel]]:
    started: list[OtherKernel] = []

    def start(name: str = "far", hosts: int = 1, per_host: int = 2, **environ: str) -> OtherKernel:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.session.other_kernel", name, str(hosts), str(per_host)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), **environ},
        )
        assert process.stdout is not None
        directory, *pids = process.stdout.readline().split()
        kernel = OtherKernel(process, directory, int(pids[0]), [int(pid) for pid in pids[1:]])
        started.append(kernel)
        return kernel

    yield start
    for kernel in started:
        kernel.process.kill()
        kernel.process.communicate()
        wait_until(kernel.is_gone)
