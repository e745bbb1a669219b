"""Breakpoints of the notebook on real workers: where they stop beside a worker's main thread."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import monarch_lab as ml
from monarch_lab.controller.spmd import SpmdCell, run_spmd
from tests.fakes.typist import Typist, typing


@pytest.fixture
def typist(cell: Any) -> Iterator[Typist]:
    with typing(cell, "c") as front:
        yield front


def run(cell: Any, source: str, filename: str = "cell.py") -> dict[int, str]:
    return run_spmd(cell, SpmdCell(source, filename, (0,))).shown


THREADS = """
import threading, sys
from concurrent.futures import ThreadPoolExecutor
def beside(n):
    found = n + 1
    return found
def started(fn, *args):
    thread = threading.Thread(target=fn, args=args)
    thread.start()
    thread.join()
"""


def test_a_thread_that_the_users_code_starts_stops_at_them(cell: Any, typist: Typist) -> None:
    run(cell, THREADS, "threads.py")
    cell.client.breakpoints.add("beside", [], "beside", "n > 1", [0])
    seen: list[str] = []

    def answer(prompt: Any) -> str:
        seen.append(prompt.label)
        return "p n" if len(seen) % 2 else "c"

    typist.line = answer
    pool = "with ThreadPoolExecutor(1) as pool:\n    r = pool.submit(beside, 3).result()"
    source = f"started(beside, 1)\nstarted(beside, 2)\n{pool}\nr"
    assert run(cell, source) == {0: "4"}
    assert seen == ["0.0#2"] * 4 and "\n2\n" in f"\n{typist.text}" and "\n3\n" in f"\n{typist.text}"
    assert "rank 0#2 stopped at threads.py:5 in beside: found = n + 1 (breakpoint" in "".join(typist.told)


def test_after_they_are_cleared_no_thread_is_traced_any_more(cell: Any, typist: Typist) -> None:
    traced = "seen = []\nstarted(lambda: (beside(1), seen.append(sys.gettrace())))\nseen.append(sys.gettrace())\nseen"
    run(cell, THREADS, "threads.py")
    cell.client.breakpoints.add("nowhere", [], "nowhere", "", [0])
    assert run(cell, traced)[0].count("trace_dispatch") == 2
    cell.client.breakpoints.clear()
    assert run(cell, traced) == {0: "[None, None]"}
    assert not typist.asked


def test_a_function_of_a_library_is_named_with_its_module(cell: Any, typist: Typist) -> None:
    for name in ("loads", "json.loads", "torch.nn.functional.relu"):
        cell.client.breakpoints.add(name, [], name, "", [0])
    source = "import json\nn = json.loads('[3]')\ntorch.nn.functional.relu(torch.ones(n[0])).tolist()"
    assert run(cell, source) == {0: "[1.0, 1.0, 1.0]"}
    told = " ".join(typist.told)
    assert len(typist.asked) == 2 and "in loads: " in told and "in relu: " in told


def test_q_in_a_thread_is_one_line(cell: Any, typist: Typist) -> None:
    typist.line = "q"
    assert run(cell, f"{THREADS}\nstarted(lambda: breakpoint())\n1") == {0: "1"}
    cell.sync()
    assert "has ended: the debugger was left with q" in "".join(typist.printed)
    assert "Traceback" not in "".join(typist.printed)


LOADER = """
class Data(torch.utils.data.Dataset):
    def __len__(self): return 2
    def __getitem__(self, k):
        breakpoint()
        return beside(k)
[batch.tolist() for batch in torch.utils.data.DataLoader(Data(), num_workers=1)]
"""


def test_a_process_that_the_users_code_forks_prints_where_it_is_and_goes_on(cell: Any, typist: Typist) -> None:
    run(cell, THREADS, "threads.py")
    cell.client.breakpoints.add("beside", [], "beside", "", [0])
    assert run(cell, LOADER) == {0: "[[1], [2]]"}
    assert not typist.asked
    cell.sync()
    printed = "".join(typist.printed)
    assert printed.count("runs beside its worker, so no debugger can ask for it") == 2, printed
    assert 'File "cell.py", line 5, in __getitem__' in printed


def _stopping(count: int) -> Iterator[Any]:
    for k in range(count):
        if k == 1:
            breakpoint()
        yield torch.tensor([float(k)])


def test_a_breakpoint_beside_a_worker_prints_where_it_is_and_goes_on(cell: Any, typist: Typist) -> None:
    @ml.remote_generator(_stopping)
    def load(count: int) -> Iterator[Any]:
        for _ in range(3):
            yield torch.empty(1)

    assert [ml.inspect(v).tolist() for v in load(3)] == [[0.0], [1.0], [2.0]]
    deadline = time.monotonic() + 10  # what a process writes to its descriptors comes a moment later
    while "in _stopping" not in "".join(typist.printed) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert "no debugger can ask for it" in "".join(typist.printed) and "in _stopping" in "".join(typist.printed)
    assert not typist.asked
