"""F4 and F5: whatever ranks do, the prompt is back in time, the mesh goes on and values stay. Many turns in soak."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kernel import Kernel
from tests.repeats import repeated

ROOT = str(Path(__file__).parents[2])
SETUP = """
%load_ext monarch_lab
%colors nocolor
%mesh start --cpu
import torch, monarch_lab as ml
"""


@pytest.fixture(scope="module")
def running() -> Iterator[Kernel]:
    with Kernel(cwd=ROOT) as kernel:
        assert kernel.run(SETUP) == "ok", kernel.errors()
        yield kernel


def check_whole(kernel: Kernel) -> None:
    """The same mesh, its values, its group, and all that the next cell prints."""
    body = "s = torch.ones(2)\ndist.all_reduce(s)\nfor k in range(50): print('line', k)\nkept, s[0].item()"
    assert kernel.run(f"%%spmd -q\n{body}") == "ok", kernel.errors()
    assert kernel.displays()[-1]["text/plain"] == "rank 0: (0, 2.0)\nrank 1: (1, 2.0)"
    assert all(f"line {k}" in kernel.text() for k in range(50))
    assert kernel.run("%%mesh -q\nassert float(torch.ones(3).sum()) == 3") == "ok", kernel.errors()


@repeated()
def test_f4_a_rank_that_raises_beside_a_collective_ends_the_cell_in_three_seconds(running: Kernel, turn: int) -> None:
    assert running.run("%%spmd -q\nkept = rank\nt = torch.ones(2)") == "ok", running.errors()
    collective = ["dist.all_reduce(t)", "dist.barrier()", "dist.broadcast(t, 1)"][turn % 3]
    started = time.monotonic()
    assert running.run(f"%%spmd -q\nif rank == 1: raise ValueError('cause')\n{collective}") == "error"
    assert time.monotonic() - started < 3
    text = "\n".join(running.errors()[0]["traceback"])
    assert f"rank 0 waited in line 3 ({collective})" in text and "ValueError: cause" in text
    check_whole(running)


STUCK = {
    "python": "while True: pass",
    "sleep": "import time\ntime.sleep(600)",
    "op": "a = torch.rand(400, 400)\nwhile True: a @ a",
    "collective": "if rank == 0: dist.barrier()\nelse:\n    while True: pass",
    "child": "import subprocess\nsubprocess.run(['sleep', '617.25'])",
}


@repeated(few=1, many=4)
@pytest.mark.parametrize("kind", STUCK)
def test_f5_an_interrupt_brings_the_prompt_back_in_five_seconds(running: Kernel, kind: str, turn: int) -> None:
    assert running.run("%%spmd -q\nkept = rank") == "ok", running.errors()
    at: list[float] = []

    def press() -> None:
        if not at and "waiting" in running.text():
            at.append(time.monotonic())
            running.interrupt()

    assert running.run(f"%%spmd -q\nprint('waiting', flush=True)\n{STUCK[kind]}", during=press) == "error"
    assert time.monotonic() - at[0] < 5
    assert running.errors()[0]["ename"] == "KeyboardInterrupt"
    if kind == "child":
        left = "import subprocess\nprint(subprocess.run(['pgrep', '-f', '^sleep 617.25$']).returncode)"
        assert running.run(left) == "ok" and running.text().strip() == "1"  # none is left
    check_whole(running)


def test_a_rank_that_does_not_hear_is_told_with_its_line_and_restarted(running: Kernel) -> None:
    """A C call that no interrupt reaches: the prompt is back, and says what to do."""
    at: list[float] = []

    def press() -> None:
        if not at and "waiting" in running.text():
            at.append(time.monotonic())
            running.interrupt()

    body = "import os\nif rank == 1:\n    print('waiting', flush=True)\n    os.system('exec sleep 30')"
    assert running.run(f"%%spmd -q\n{body}", during=press) == "error"
    assert time.monotonic() - at[0] < 6 and running.errors()[0]["ename"] == "KeyboardInterrupt"
    told = "rank 1 did not stop, in line 5 (os.system('exec sleep 30')): what runs there goes on"
    assert told in running.text() and "%mesh restart --ranks 1" in running.text()
    assert running.run("%mesh restart --ranks 1") == "ok", running.errors()
    assert running.run("%%spmd -q\nkept = rank") == "ok", running.errors()
    check_whole(running)
