"""F1, F2 and the second half of P4 in numbers: how soon a death is told, a rank is back, and nobody is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import torch

import monarch_lab as ml
from monarch_lab.config import MARK_VARIABLE
from monarch_lab.transport import platform
from tests.bench._mesh import mesh_of
from tests.bench._peers import ROOT
from tests.bench._report import Line, main, median

WORKERS = 4


class _Ear:
    """A front that notes when it is told."""

    def __init__(self) -> None:
        self.told = threading.Event()
        self.at = 0.0

    def output(self, cell: int, rank: int, label: str, stream: str, text: str) -> None:
        if "was killed by SIGKILL" in text:
            self.at = time.perf_counter()
            self.told.set()

    def ask(self, prompt: object) -> None:
        return None


def _deaths(turns: int) -> tuple[list[float], list[float]]:
    """(seconds until told, seconds from the request for another process until a reduction with it was fetched)"""
    told, back = [], []
    with mesh_of(WORKERS) as mesh:
        ear = mesh.client.front = _Ear()
        for turn in range(turns):
            rank = turn % WORKERS
            with mesh.activate():
                assert ml.inspect(torch.ones(1).reduce("gpu")).item() == WORKERS
                ear.told.clear()
                killed = time.perf_counter()
                os.kill(mesh.status().processes[rank].pid, signal.SIGKILL)
                ear.told.wait(10)
                told.append(ear.at - killed)
                while mesh.state != "dead":
                    pass
                asked = time.perf_counter()
                mesh.restart(rank)
                assert ml.inspect(torch.ones(1).reduce("gpu")).item() == WORKERS
                back.append(time.perf_counter() - asked)
    return told, back


def _sweep(victim: str) -> float:
    """Seconds from SIGKILL of a kernel, or its agent, until no process of the mesh is left, grandchildren included."""
    kernel = subprocess.Popen(
        [sys.executable, "-m", "tests.agent.stand_in_kernel"], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert kernel.stdout is not None
    try:
        facts = json.loads(kernel.stdout.readline())
        killed = time.perf_counter()
        os.kill(kernel.pid if victim == "kernel" else facts["agent"], signal.SIGKILL)
        while platform.marked(MARK_VARIABLE, facts["mark"]):
            pass
        return time.perf_counter() - killed
    finally:
        kernel.kill()
        kernel.wait()
        kernel.stdout.close()


def measure(quick: bool) -> Iterator[Line]:
    turns = 3 if quick else 20
    told, back = _deaths(turns)
    yield Line("F1", "a killed worker is told, median", median(told), "s", goal=0.1, absolute=True)
    yield Line("F1", f"a killed worker is told, worst of {turns}", max(told), "s", goal=1.0, absolute=True)
    details = {"worst_s": max(back), "turns": turns}
    yield Line(
        "P4", "a dead worker replaced, group formed", median(back), "s", goal=0.3, absolute=True, details=details
    )
    for victim in ("kernel", "agent"):
        times = [_sweep(victim) for _ in range(turns)]
        what = f"nobody left after SIGKILL of the {victim}, worst of {turns}"
        yield Line("F2", what, max(times), "s", goal=2.0, absolute=True, details={"median_s": median(times)})


if __name__ == "__main__":
    main("f1_deaths", measure)
