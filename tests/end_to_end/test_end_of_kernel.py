"""Whatever ends a notebook's kernel, no process of its mesh is left."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from tests.kernel import Kernel

START = "import torch\n%load_ext monarch_lab\n%mesh start --per-host 2 --cpu"
MARK = """
import os, monarch_lab as ml
def where():
    import os, subprocess
    subprocess.Popen(["sleep", "600"], start_new_session=True)
    return os.environ["MONARCH_LAB_MARK"]
with ml.meshes()["mesh"].activate():
    print("MARK", ml.call_on_shard_and_fetch(where, shard={"gpu": 1}).result())
"""
BUSY = "%%mesh\nx = torch.rand(300, 300)\nfor _ in range(10**7):\n    x = (x @ x).clamp(0, 1)"


def _with_mark(mark: str) -> list[int]:
    """Processes that carry the mesh's mark in their environment or, the guard, in their arguments."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
            if (
                state not in "ZX"
                and mark.encode() in (entry / "environ").read_bytes() + (entry / "cmdline").read_bytes()
            ):
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def _wait_gone(mark: str, timeout_s: float = 20) -> list[int]:
    deadline = time.monotonic() + timeout_s
    while (left := _with_mark(mark)) and time.monotonic() < deadline:
        pass
    return left


def _started(kernel: Kernel) -> str:
    assert kernel.run(START, timeout=120) == "ok", kernel.errors()
    assert kernel.run(MARK) == "ok", kernel.errors()
    mark = kernel.text().split()[-1]
    assert len(_with_mark(mark)) >= 5  # agent, guard, zygote, two workers, and the sleeping grandchild
    return mark


@pytest.mark.timeout(180)
@pytest.mark.parametrize("busy", [False, True], ids=["idle", "busy"])
def test_kill_9_of_the_kernel_leaves_no_process(busy: bool) -> None:
    kernel = Kernel()
    with kernel:
        mark = _started(kernel)
        if busy:
            kernel.start(BUSY)
            kernel.wait_for(lambda: any(m["msg_type"] == "execute_input" for m in kernel.mine()))
        kernel.kill()
        assert _wait_gone(mark) == []


@pytest.mark.timeout(180)
def test_a_restart_of_the_kernel_in_the_middle_of_a_cell_leaves_no_process() -> None:
    with Kernel() as kernel:
        mark = _started(kernel)
        kernel.start(BUSY)
        kernel.wait_for(lambda: any(m["msg_type"] == "execute_input" for m in kernel.mine()))
        kernel.restart()
        assert _wait_gone(mark) == []


@pytest.mark.timeout(180)
@pytest.mark.slow
def test_a_shutdown_of_the_kernel_leaves_no_process() -> None:
    with Kernel() as kernel:
        mark = _started(kernel)
    assert _wait_gone(mark) == []


@pytest.mark.soak
@pytest.mark.parametrize("turn", range(20))
def test_kill_9_leaves_no_process_twenty_times(turn: int) -> None:
    with Kernel() as kernel:
        mark = _started(kernel)
        kernel.start(BUSY if turn % 2 else "1")
        kernel.kill()
        assert _wait_gone(mark) == []
