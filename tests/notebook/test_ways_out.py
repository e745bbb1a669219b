"""F4 and F5: whatever ranks do, the prompt is back, the mesh goes on and values stay.

Many turns in soak. Left alone each would last minutes, and end by the test's time-out; how soon it ends is
tests/bench/f4_interrupts.py's.
"""

from __future__ import annotations

import os
import subprocess
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
import torch, threading, monarch_lab as ml
raised = []
threading.excepthook = raised.append
"""


@pytest.fixture(scope="module")
def running() -> Iterator[Kernel]:
    with Kernel(cwd=ROOT) as kernel:
        assert kernel.run(SETUP) == "ok", kernel.errors()
        yield kernel
        assert kernel.run("assert raised == [], raised") == "ok", kernel.errors()


def check_whole(kernel: Kernel) -> None:
    """The same mesh, its values, its group, and all that the next cell prints."""
    body = "s = torch.ones(2)\ndist.all_reduce(s)\nfor k in range(50): print('line', k)\nkept, s[0].item()"
    assert kernel.run(f"%%spmd -q\n{body}") == "ok", kernel.errors()
    assert kernel.displays()[-1]["text/plain"] == "rank 0: (0, 2.0)\nrank 1: (1, 2.0)"
    assert all(f"line {k}" in kernel.text() for k in range(50))
    assert kernel.run("%%mesh -q\nassert float(torch.ones(3).sum()) == 3") == "ok", kernel.errors()


@repeated()
def test_f4_a_rank_that_raises_beside_a_collective_ends_the_cell(running: Kernel, turn: int) -> None:
    assert running.run("%%spmd -q\nkept = rank\nt = torch.ones(2)") == "ok", running.errors()
    collective = ["dist.all_reduce(t)", "dist.barrier()", "dist.broadcast(t, 1)"][turn % 3]
    assert running.run(f"%%spmd -q\nif rank == 1: raise ValueError('cause')\n{collective}") == "error"
    text = "\n".join(running.errors()[0]["traceback"])
    assert f"rank 0 waited in line 3 ({collective})" in text and "ValueError: cause" in text
    check_whole(running)


NAP = f"617.{os.getpid()}"  # seconds; names the processes of this run
STUCK = {
    "python": "while True: pass",
    "sleep": "import time\ntime.sleep(600)",
    "op": "a = torch.rand(400, 400)\nwhile True: a @ a",
    "collective": "if rank == 0: dist.barrier()\nelse:\n    while True: pass",
    "child": "import subprocess\nsubprocess.run(['sleep', '" + NAP + "'])",
    "shell": "import os\nwhile True: os.system('sleep " + NAP + "')",
}


@repeated()
@pytest.mark.parametrize("kind", STUCK)
def test_f5_an_interrupt_brings_the_prompt_back(running: Kernel, kind: str, turn: int) -> None:
    assert running.run("%%spmd -q\nkept = rank") == "ok", running.errors()
    pressed: list[None] = []

    def press() -> None:
        if not pressed and "waiting" in running.text():
            pressed.append(running.interrupt())

    assert running.run(f"%%spmd -q\nprint('waiting', flush=True)\n{STUCK[kind]}", during=press) == "error"
    assert running.errors()[0]["ename"] == "KeyboardInterrupt"
    if kind in ("child", "shell"):
        assert sleeping() == 0
    check_whole(running)


def sleeping() -> int:
    """How many of them there are."""
    return len(subprocess.run(["pgrep", "-f", f"^sleep {NAP}$"], capture_output=True, check=False).stdout.split())


# Those that catch Ctrl-C and go on are killed; those that were told to ignore it, or left the group, go on.
CHILDREN = f"""
import multiprocessing, os, signal, subprocess, time
def deaf():
    signal.signal(signal.SIGINT, lambda *_: None)
    print('started', flush=True)
    while True: time.sleep(600)
NAP = '{NAP}'
older = subprocess.Popen(['sleep', NAP])"""
MORE = """
p = subprocess.Popen(['sleep', NAP])
q = multiprocessing.get_context('fork').Process(target=deaf, daemon=True)
q.start()
r = subprocess.Popen(['sleep', NAP], start_new_session=True)
time.sleep(600)"""


def test_children_of_an_interrupted_cell_are_gone_and_others_are_not(running: Kernel) -> None:
    assert running.run(f"%%spmd -q{CHILDREN}") == "ok", running.errors()
    pressed: list[None] = []

    def press() -> None:
        if not pressed and "0.0-0.1" in running.text() and sleeping() == 6:
            pressed.append(None)
            running.interrupt()

    assert running.run(f"%%spmd -q{MORE}", during=press) == "error"
    assert running.errors()[0]["ename"] == "KeyboardInterrupt"
    state = "[older.poll(), r.poll(), p.wait(5), q.join(5), q.exitcode]"
    assert running.run(f"%%spmd -q\n{state}") == "ok", running.errors()
    assert running.displays()[-1]["text/plain"] == "ranks 0, 1: [None, None, -2, None, -9]"
    assert running.run("%%spmd -q\nolder.kill(), r.kill()\nolder.wait(), r.wait();") == "ok", running.errors()
    check_whole(running)


def test_what_an_interrupted_cell_held_is_freed(running: Kernel) -> None:
    body = """%%spmd -q
import weakref
def work():
    large = torch.ones(1000)
    global gone
    gone = weakref.ref(large)
    print('waiting', flush=True)
    while True: large.sum()
work()"""
    pressed: list[None] = []

    def press() -> None:
        if not pressed and "waiting" in running.text():
            pressed.append(running.interrupt())

    assert running.run(body, during=press) == "error" and running.errors()[0]["ename"] == "KeyboardInterrupt"
    assert running.run("%%spmd -q\ngone() is None") == "ok", running.errors()
    assert running.displays()[-1]["text/plain"] == "ranks 0, 1: True"


# A lock taken twice: no signal ends the wait. PyDLL: with Python's own lock held, so that no thread there answers.
DEAF = {"c": "CDLL", "locked": "PyDLL"}


def stick(kernel: Kernel, dll: str, presses: int, apart_s: float = 1.0) -> None:
    """Rank 1 waits in C; Ctrl-C as often as that."""
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
        if seen and len(at) < presses and now - (at or seen)[-1] > (apart_s if at else 0.4):
            at.append(now)
            kernel.interrupt()

    assert kernel.run(f"%%spmd -q{body}", during=press) == "error"
    assert kernel.errors()[0]["ename"] == "KeyboardInterrupt"


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


@repeated(few=1, many=10)
@pytest.mark.parametrize("kind", DEAF)
def test_a_second_press_ends_and_restarts_the_rank_that_hears_none(running: Kernel, kind: str, turn: int) -> None:
    prepare(running)
    presses, apart_s = (2, 1.0) if turn % 2 == 0 else (12, 0.15)  # the impatient change nothing
    stick(running, DEAF[kind], presses, apart_s)
    assert ("c.pthread_mutex_lock(lock))" in running.text()) == (kind == "c")  # a locked one cannot say where it is
    check_replaced(running)


def test_a_rank_that_does_not_hear_is_told_with_its_line_and_restarted(running: Kernel) -> None:
    """The prompt is back and says what to do; one press in a cell that waits for that rank does it."""
    prepare(running)
    stick(running, "CDLL", presses=1)
    told = "rank 1 did not stop, in line 8 (c.pthread_mutex_lock(lock)): what runs there goes on"
    assert told in running.text() and "%mesh restart --ranks 1" in running.text()
    pressed: list[None] = []

    def press() -> None:
        if not pressed:
            time.sleep(0.2)
            pressed.append(running.interrupt())

    assert running.run("%%mesh -q\ntorch.ones(1)", during=press) == "error"
    assert running.errors()[0]["ename"] == "KeyboardInterrupt"
    check_replaced(running)
