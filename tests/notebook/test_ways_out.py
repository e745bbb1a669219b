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


# A lock taken twice: no signal ends the wait. PyDLL: with Python's own lock held, so that no thread there answers.
DEAF = {"c": "CDLL", "locked": "PyDLL"}


def stick(kernel: Kernel, dll: str, presses: int) -> float:
    """Rank 1 waits in C; Ctrl-C as often as that, a second apart. Seconds from the first press to the prompt."""
    body = f"""
import ctypes, time
lock, c = ctypes.create_string_buffer(64), ctypes.{dll}(None)
c.pthread_mutex_lock(lock)
if rank == 1:
    print('waiting', flush=True)
    time.sleep(0.2)  # what a thread sends is on its way
    c.pthread_mutex_lock(lock)"""
    seen: list[float] = []
    at: list[float] = []

    def press() -> None:
        now = time.monotonic()
        if not seen and "waiting" in kernel.text():
            seen.append(now)
        if seen and len(at) < presses and now - (at or seen)[-1] > (1.0 if at else 0.4):
            at.append(now)
            kernel.interrupt()

    assert kernel.run(f"%%spmd -q{body}", during=press) == "error"
    assert kernel.errors()[0]["ename"] == "KeyboardInterrupt"
    return time.monotonic() - at[0]


def check_replaced(kernel: Kernel) -> None:
    """What rank 1 had is gone, and the rest is as it was."""
    assert "rank 1 did not stop" in kernel.text() and "ended, and given another process" in kernel.text()
    assert "gone there: w, net (of the notebook), " in kernel.text() and "kept" in kernel.text()
    assert kernel.run("ml.inspect(w, gpu=0).item()") == "ok", kernel.errors()
    assert kernel.displays()[-1]["text/plain"] == "7.0"
    assert kernel.run("%%mesh -q\nw + 1") == "error"
    assert "made before rank 1 was restarted" in kernel.errors()[0]["evalue"]
    assert kernel.run("%%spmd -q\nglobals().get('kept', 'gone')") == "ok", kernel.errors()
    assert kernel.displays()[-1]["text/plain"] == "rank 0: 0\nrank 1: 'gone'"
    assert kernel.run("%%spmd -q\nkept = rank") == "ok", kernel.errors()
    check_whole(kernel)


def prepare(kernel: Kernel) -> None:
    assert kernel.run("%%spmd -q\nkept = rank") == "ok", kernel.errors()
    body = "w = torch.full((1,), 7.0)\nfour = torch.tensor(4.0)\nnet = torch.nn.Linear(1, 1)"
    assert kernel.run(f"%%mesh -q\n{body}") == "ok", kernel.errors()


@pytest.mark.parametrize("kind", DEAF)
def test_a_second_press_ends_and_restarts_the_rank_that_hears_none(running: Kernel, kind: str) -> None:
    prepare(running)
    assert stick(running, DEAF[kind], presses=2) < 6
    assert ("c.pthread_mutex_lock(lock))" in running.text()) == (kind == "c")  # a locked one cannot say where it is
    check_replaced(running)


def test_a_rank_that_does_not_hear_is_told_with_its_line_and_restarted(running: Kernel) -> None:
    """The prompt is back and says what to do; one press in a cell that waits for that rank does it."""
    prepare(running)
    assert stick(running, "CDLL", presses=1) < 6
    told = "rank 1 did not stop, in line 8 (c.pthread_mutex_lock(lock)): what runs there goes on"
    assert told in running.text() and "%mesh restart --ranks 1" in running.text()
    at: list[float] = []

    def press() -> None:
        if not at:
            at.append(time.monotonic())
            time.sleep(0.2)
            running.interrupt()

    assert running.run("%%mesh -q\ntorch.ones(1)", during=press) == "error"
    assert time.monotonic() - at[0] < 6 and running.errors()[0]["ename"] == "KeyboardInterrupt"
    check_replaced(running)
