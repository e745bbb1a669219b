"""What workers do, asked while they do it: in Python, in C code, in a collective; and an interrupt of some alone."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from monarch_lab.controller.looking import Stacks
from monarch_lab.controller.spmd import SpmdCell, run_spmd
from monarch_lab.errors import RemoteException

_numbers = itertools.count()


def run(mesh: Any, source: str) -> list[str]:
    cell = SpmdCell(source, f"<looked at {next(_numbers)}>", mesh.ranks_key)
    return list(run_spmd(mesh, cell).shown.values())


class Beside:
    """Runs ``act`` on a thread of its own once the stacks are as ``when`` says, while the test waits for a cell."""

    def __init__(self, mesh: Any, when: Callable[[Stacks], bool], act: Callable[[], object]) -> None:
        self.found = Stacks()
        self._mesh, self._when, self._act = mesh, when, act
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            self.found = self._mesh.stacks()
            if self._when(self.found):
                break
            threading.Event().wait(0.05)
        self._act()

    def __enter__(self) -> Beside:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._thread.join()


def line(stacks: Stacks, rank: int) -> str:
    frames = stacks[rank].threads[0].frames if stacks[rank].threads else ()
    return next((f.source for f in reversed(frames) if f.filename.startswith("<looked")), "")


@pytest.mark.parametrize(
    ("body", "last"),
    [
        ("import time\nif rank:\n    time.sleep(600)", "time.sleep(600)"),
        ("if rank:\n    while True: pass", "while True: pass"),
        # The matrices are small enough for one op to end within the second before the hard step.
        ("a = torch.rand(300, 300)\nif rank:\n    while True:\n        a @ a", "a @ a"),
    ],
)
def test_one_rank_is_seen_and_interrupted_while_the_other_has_ended(mesh: Any, body: str, last: str) -> None:
    stuck: list[Any] = []

    def interrupt() -> None:
        stuck.append(mesh.interrupt(1))

    with Beside(mesh, lambda s: line(s, 1) in (last, "while True:") and not s[0].is_busy, interrupt) as beside:
        with pytest.raises(RemoteException) as e:
            run(mesh, body)
    assert e.value.ranks == (1,) and e.value.first.type_name == "KeyboardInterrupt" and stuck == [()]
    text = str(beside.found)
    assert "On rank 0:\nMainThread: waits for work" in text and "On rank 1:\nMainThread:\n" in text
    assert "monarch_lab/" not in text.replace("/monarch_lab/.venv", "")
    assert run(mesh, "t = torch.ones(1)\ndist.all_reduce(t)\nt.item()") == ["2.0", "2.0"]


def test_a_wait_in_a_collective_is_seen_with_its_group_and_interrupted(mesh: Any) -> None:
    """Rank 1 sleeps for long and would be waited for; an interrupt of rank 0 alone ends its wait."""
    body = "import time\nif rank:\n    time.sleep(1.5)\n    raise ValueError('own')\ndist.barrier()"
    with Beside(mesh, lambda s: bool(s[0].waits), lambda: mesh.interrupt("0")) as beside:
        with pytest.raises(RemoteException) as e:
            run(mesh, body)
    assert beside.found[0].waits == ("barrier of ranks 0, 1",) and line(beside.found, 0) == "dist.barrier()"
    assert "own" in str(e.value)
    assert run(mesh, "t = torch.ones(1)\ndist.all_reduce(t)\nt.item()") == ["2.0", "2.0"]


def test_threads_of_users_are_told_and_equal_stacks_are_one_group(mesh: Any) -> None:
    body = (
        "import threading\ngate = threading.Event()\ndef stand(): gate.wait()\n"
        "thread = threading.Thread(target=stand, name='mine')\nthread.start()"
    )
    run(mesh, body)
    until = time.monotonic() + 10
    while len((found := mesh.stacks()).groups) > 1 and time.monotonic() < until:
        pass  # a rank that is still at the end of its cell stands elsewhere
    [(ranks, told)] = found.groups
    assert ranks == (0, 1) and [t.thread for t in told.threads] == ["MainThread", "mine"]
    assert [f.function for f in told.threads[1].frames] == ["stand"]
    run(mesh, "gate.set()\nthread.join()")
    assert [t.thread for t in mesh.stacks(1)[1].threads] == ["MainThread"]


def test_memory_counts_each_storage_once(mesh: Any) -> None:
    before = mesh.memory()
    kept = mesh.replicate(torch.zeros(1 << 20))
    view = kept[: 1 << 10]
    run(mesh, "large = torch.ones(1 << 18)\npart = large[:5]\nmodel = torch.nn.Linear(256, 256, bias=False)")
    mesh.sync()
    after = mesh.memory()
    assert set(after) == {0, 1}
    for rank, told in after.items():
        assert (1 << 22) <= told.tensors - before[rank].tensors < (1 << 22) + (1 << 12)
        assert told.tensor_count - before[rank].tensor_count == 2 and 0 < told.pss <= told.rss
        largest = dict(told.largest)
        assert largest["large"] == 1 << 20 and largest["model"] == 1 << 18
    assert mesh.memory(1).keys() == {1}
    del view
    run(mesh, "del large, part, model")
