"""Cases from bug reports on tools of this kind, by their numbers in the project's list; and where the others are shown.

3, 8   test_magics: a start that tells what it chose, a second one that changes nothing
4, 52  test_spmd_with_workers: DDP trains equally; a rank dies of SIGSEGV, rank 0 goes on
7      controller/test_spmd: another group than the mesh's is refused; test_stalls: ranks that do not come are named
13     test_spmd_with_workers: push_and_pull        17-23, 28-30  test_output_with_workers, test_folding
26     test_output_with_workers: bars                34-36  test_errors_with_workers
37, 45, 46, 48  test_debugger, test_magics (debugpy) 41  test_spmd_input, test_terminal, browser/test_debugger
43     test_with_workers: an interrupt at a breakpoint ends it, whatever became of the page
50, 58 test_ways_out                                 60  controller/test_placing, bench P7
64     end_to_end/test_control_groups                72  notebooks/test_notebooks
73     test_cell, test_spmd_rich                     6, 56  test_terminal
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kernel import Kernel

ROOT = str(Path(__file__).parents[2])
BUSY_BEFORE = """
import concurrent.futures, threading, torch
pool = concurrent.futures.ThreadPoolExecutor(4)
list(pool.map(abs, range(100)))
torch.set_num_threads(2)
(torch.ones(300, 300) @ torch.ones(300, 300)).sum()
"""
SETUP = "%load_ext monarch_lab\n%colors nocolor\nimport torch, monarch_lab as ml\n%mesh start"


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    """In a Kaggle or Colab notebook without a GPU, another Python first on the path, torch's usual port taken."""
    folder = tmp_path_factory.mktemp("bin")
    for name in ("python", "python3"):
        (folder / name).write_text("#!/bin/sh\nexit 3\n")
        (folder / name).chmod(0o755)
    env = {
        "KAGGLE_KERNEL_RUN_TYPE": "Interactive",
        "KAGGLE_URL_BASE": "https://www.kaggle.com",
        "COLAB_GPU": "",
        "COLAB_RELEASE_TAG": "release",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
        "CUDA_VISIBLE_DEVICES": "",
        "PATH": f"{folder}:{os.environ['PATH']}",
    }
    with socket.socket() as taken, Kernel(cwd=ROOT, env=env) as kernel:
        with contextlib.suppress(OSError):  # by another one
            taken.bind(("127.0.0.1", 29500))
            taken.listen()
        assert kernel.run(BUSY_BEFORE) == "ok", kernel.errors()
        assert kernel.run(SETUP) == "ok", kernel.errors()
        yield kernel


def value(kernel: Kernel, body: str) -> str:
    assert kernel.run(f"%%spmd -q\n{body}") == "ok", kernel.errors()
    return str(kernel.displays()[-1]["text/plain"])


REDUCED = "t = torch.ones(1)\ndist.all_reduce(t)\nt.item()"


def test_1_2_9_16_a_mesh_starts_in_odd_surroundings(running: Kernel) -> None:
    assert value(running, REDUCED) == "ranks 0, 1: 2.0"
    assert value(running, "import os, sys\nsys.executable") == f"ranks 0, 1: {sys.executable!r}"
    assert value(running, "os.environ['COLAB_RELEASE_TAG']") == "ranks 0, 1: 'release'"
    assert running.run("%mesh start --name other --per-host 2") == "ok", running.errors()
    assert running.run("%%spmd -q\nt = torch.ones(1)\ndist.all_reduce(t)\nassert t.item() == 2") == "ok"
    assert running.run("%mesh stop other\n%mesh use mesh") == "ok", running.errors()


def test_5_what_the_workers_trained_is_the_notebooks_in_the_next_cell(running: Kernel) -> None:
    body = """
from torch.nn.parallel import DistributedDataParallel as DDP
torch.manual_seed(0)
model = DDP(torch.nn.Linear(4, 1))
before = {k: v.clone() for k, v in model.module.state_dict().items()}
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(20):
    optimizer.zero_grad()
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
state = model.module.state_dict()"""
    for _ in range(2):
        assert running.run(f"%%spmd -q{body}") == "ok", running.errors()
    assert running.run("%mesh pull before state --from all\nlocal = torch.nn.Linear(4, 1)") == "ok", running.errors()
    check = """
local.load_state_dict(state[0])
assert all(torch.equal(state[0][k], state[1][k]) for k in state[0])
assert not torch.equal(local.weight, before[0]['weight'])"""
    assert running.run(check) == "ok", running.errors()


def test_8_the_cells_that_set_up_may_run_twice(running: Kernel) -> None:
    for _ in range(2):
        assert running.run("%mesh start") == "ok" and "already running" in running.text()
        assert value(running, f"dist.init_process_group('gloo')\n{REDUCED}") == "ranks 0, 1: 2.0"


def test_15_a_function_is_sent_to_the_processes_that_are_there_now(running: Kernel) -> None:
    assert running.run("@ml.remote\ndef twice(t):\n    return t * 2") == "ok"
    call = "%%mesh -q\nprint(ml.inspect(twice(torch.ones(1))).item())"
    assert running.run(call) == "ok" and running.text() == "2.0\n"
    assert running.run("%mesh stop\n%mesh start --cpu") == "ok", running.errors()
    assert running.run(call) == "ok" and running.text() == "2.0\n", running.errors()


def test_44_a_cell_stops_at_its_breakpoint_after_an_interrupt(running: Kernel) -> None:
    pressed: list[None] = []
    asked: list[str] = []

    def press() -> None:
        if not pressed and "waiting" in running.text():
            pressed.append(running.interrupt())

    def answer(prompt: str) -> str:
        asked.append(prompt)
        return "p place" if len(asked) == 1 else "c"

    assert running.run("%%spmd -q\nimport time\nprint('waiting')\ntime.sleep(600)", during=press) == "error"
    cell = "%%spmd -q\nplace = 'here'\nif rank: breakpoint()\nplace"
    for _ in range(2):
        asked.clear()
        assert running.run(cell, answer=answer) == "ok", running.errors()
        assert asked == ["[0.1] (Pdb) "] * 2 and "[0.1] 'here'" in running.text()


def test_56_an_idle_kernel_loses_nothing_to_interrupts(running: Kernel) -> None:
    assert value(running, "kept = rank\nkept") == "rank 0: 0\nrank 1: 1"
    for _ in range(3):
        running.interrupt()
        time.sleep(0.1)
    assert value(running, f"{REDUCED}\nkept, t.item()") == "rank 0: (0, 2.0)\nrank 1: (1, 2.0)"


@pytest.mark.parametrize(
    "body",
    ["# a comment\nrank", "\n\nrank", "%pwd\nrank", "!true\nrank", "import asyncio\nawait asyncio.sleep(0, rank)"],
)
def test_74_a_cell_says_how_it_ran_whatever_its_first_line(running: Kernel, body: str) -> None:
    assert running.run(f"%%spmd\n{body}") == "ok", running.errors()
    texts = [shown["text/plain"] for shown in running.displays()]
    assert texts[0].startswith('spmd · mesh "mesh" · 2 workers') and "rank 1: 1" in texts[-1]


def test_74_an_empty_cell_and_a_comment_alone_are_cells_too(running: Kernel) -> None:
    for cell in ("%%spmd\n", "%%spmd\n# nothing", "%%mesh\n", "%%mesh\n# nothing"):
        assert running.run(cell) == "ok", (cell, running.errors())
        assert "2 workers" in running.displays()[0]["text/plain"]


def test_52_a_mesh_with_a_dead_rank_is_usable_and_stops(running: Kernel) -> None:
    assert running.run("%%spmd -q\nimport os, signal\nif rank: os.kill(os.getpid(), signal.SIGSEGV)") == "error"
    assert "SIGSEGV" in running.errors()[0]["evalue"]
    assert running.run("%%spmd[0] -q\nrank") == "ok", running.errors()
    assert running.displays()[-1]["text/plain"] == "rank 0: 0"
    assert running.run("%%mesh -q\ntorch.ones(1)") == "error" and running.errors()[0]["ename"] == "DeviceException"
    assert running.run("%mesh stop") == "ok", running.errors()
    assert running.run("%mesh start --cpu") == "ok", running.errors()


@pytest.mark.slow
def test_55_a_kernel_restarts_five_times_in_the_middle_of_a_cell() -> None:
    nap = f"618.{os.getpid()}"
    with Kernel(cwd=ROOT) as kernel:
        for _ in range(5):
            assert kernel.run(SETUP) == "ok", kernel.errors()
            kernel.start(f"%%spmd\nimport subprocess\nprint('waiting')\nsubprocess.run(['sleep', '{nap}'])")
            kernel.wait_for(lambda: "waiting" in kernel.text())
            kernel.restart()
            deadline = time.monotonic() + 10
            while (left := _sleepers(nap)) and time.monotonic() < deadline:
                time.sleep(0.05)
            assert not left
            assert kernel.run("1") == "ok"


def _sleepers(nap: str) -> bytes:
    return subprocess.run(["pgrep", "-f", f"^sleep {nap}$"], capture_output=True, check=False).stdout


@pytest.mark.soak
def test_61_two_thousand_cells_leave_kernel_and_workers_as_they_were(running: Kernel) -> None:
    """Megabytes after the first quarter and at the end."""
    run = """
ip, sizes = get_ipython(), []
import psutil
def megabytes():
    found = [psutil.Process().memory_info().rss, *(m.rss for m in ml.meshes()['mesh'].memory().values())]
    return [size >> 20 for size in found]
for k in range(500): ip.run_cell('%%spmd -q\\nx = torch.ones(100)', silent=True)
for k in range(500): ip.run_cell('%%mesh -q\\ny = torch.ones(100) + 1', silent=True)
before = megabytes()
for k in range(500): ip.run_cell('%%spmd -q\\nx = torch.ones(100)', silent=True)
for k in range(500): ip.run_cell('%%mesh -q\\ny = torch.ones(100) + 1', silent=True)
print([b - a for a, b in zip(before, megabytes())])"""
    assert running.run(run, timeout=600) == "ok", running.errors()
    assert all(grown < 20 for grown in eval(running.text().splitlines()[-1])), running.text()
