"""IPython in a terminal, through a pty: cases 6 and 56, and what a terminal shows in place of displays."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pexpect
import pytest

from monarch_lab.transport import platform

ROOT = str(Path(__file__).parents[2])
PROMPT = r"In \[\d+\]: "
SCRIPT = """
with open({told!r}, 'a') as file: file.write('ran\\n')
import torch, monarch_lab as ml
get_ipython().run_line_magic('load_ext', 'monarch_lab')
get_ipython().run_line_magic('mesh', 'start --cpu')
"""


class Terminal:
    def __init__(self, script: Path) -> None:
        words = ["-m", "IPython", "--simple-prompt", "--colors=nocolor", "--no-banner", "-i", str(script)]
        env = {**os.environ, "PYTHONPATH": ROOT, "TERM": "dumb", "IPYTHONDIR": str(script.parent)}
        self.child = pexpect.spawn(sys.executable, words, env=env, encoding="utf-8", timeout=60, dimensions=(50, 250))
        self.child.delaybeforesend = None
        self.child.expect(PROMPT)

    def run(self, cell: str) -> str:
        """What it shows, up to the next prompt."""
        self.type(cell)
        self.child.expect(PROMPT)
        return str(self.child.before)

    def type(self, cell: str) -> None:
        for line in cell.split("\n"):
            self.child.sendline(line)
        if "\n" in cell:
            self.child.send("\n\n")  # what ends a cell of several lines


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("terminal") / "told"


@pytest.fixture(scope="module")
def terminal(told: Path) -> Iterator[Terminal]:
    script = told.parent / "script.py"
    script.write_text(SCRIPT.format(told=str(told)))
    terminal = Terminal(script)
    yield terminal
    terminal.child.close(force=True)


def pids(terminal: Terminal) -> list[int]:
    shown = terminal.run("print('pids', *[p.pid for p in ml.meshes()['mesh'].status().processes])")
    return [int(word) for word in shown.split("pids ")[-1].split()]


def test_a_script_of_the_users_runs_once_whatever_processes_it_starts(terminal: Terminal, told: Path) -> None:
    assert told.read_text() == "ran\n"


def test_cells_show_their_lines_and_values(terminal: Terminal) -> None:
    shown = terminal.run("%%spmd\nprint('from', rank)\nrank + 40")
    assert (
        "[0.0] from 0" in shown and "[0.1] from 1" in shown and "rank 1: 41" in shown and 'spmd · mesh "mesh"' in shown
    )
    assert "tensor(2.)" in terminal.run("%%mesh\ntorch.ones(2).sum()")
    assert "ZeroDivisionError" in terminal.run("%%spmd\n1 / 0") and "2 workers" in terminal.run("%mesh")


def test_input_on_a_worker_asks_in_the_terminal(terminal: Terminal) -> None:
    terminal.type("%%spmd[1]\nline = input('name? ')\nline.upper()")
    terminal.child.expect_exact("[0.1] name? ")
    terminal.child.sendline("ada")
    terminal.child.expect_exact("rank 1: 'ADA'")
    terminal.child.expect(PROMPT)


def test_ctrl_c_ends_a_cell_or_a_line_and_no_worker(terminal: Terminal) -> None:
    before = pids(terminal)
    terminal.run("%%spmd\nkept = rank")
    for body in ("import time; time.sleep(600)", "if rank: dist.barrier()"):
        terminal.type(f"%%spmd\nprint('waiting')\n{body}")
        terminal.child.expect(r"\[0\.\d\] waiting(?s:.*)\[0\.\d\] waiting")  # lines stay as they came
        terminal.child.sendintr()
        terminal.child.expect_exact("KeyboardInterrupt")
        terminal.child.expect(PROMPT)
    terminal.child.sendintr()  # at the prompt
    terminal.child.expect(PROMPT)
    assert "rank 1: 1" in terminal.run("%%spmd\nkept") and pids(terminal) == before


def test_its_end_leaves_no_process(terminal: Terminal) -> None:
    left = [*pids(terminal), *platform.descendants(terminal.child.pid)]
    terminal.child.sendline("exit")
    terminal.child.expect(pexpect.EOF)
    deadline = time.monotonic() + 10
    while any(platform.is_alive(pid) for pid in left) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not [pid for pid in left if platform.is_alive(pid)]
