"""The panel's comm in a real kernel, with meshes that are made up."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from IPython.core.interactiveshell import InteractiveShell

from monarch_lab.notebook import comm as panel_comm
from monarch_lab.wire.snapshot import DebuggerSnapshot, KernelSnapshot
from tests.fakes.panel import FakeMeshes
from tests.kernel import Kernel

ROOT = str(Path(__file__).parents[2])
START = """
from tests.fakes.panel import FakeMeshes
meshes = FakeMeshes()
panel = meshes.start(get_ipython())
"""


@pytest.fixture(scope="module")
def running() -> Iterator[Kernel]:
    with Kernel(cwd=ROOT) as kernel:
        yield kernel


@pytest.fixture
def kernel(running: Kernel) -> Iterator[Kernel]:
    assert running.run(START) == "ok", running.errors()
    yield running
    assert running.run("panel.stop()") == "ok", running.errors()


def sent(kernel: Kernel, op: str) -> list[dict[str, Any]]:
    return [m for m in kernel.comm_messages(panel_comm.COMM_ID) if m["op"] == op]


def order(kernel: Kernel, op: str, **data: Any) -> None:
    kernel.send("comm_msg", {"comm_id": panel_comm.COMM_ID, "data": {"op": op, **data}})


def states(kernel: Kernel) -> list[str]:
    pushed = sent(kernel, "snapshot")
    return [p["state"] for p in pushed[-1]["snapshot"]["meshes"][0]["processes"]] if pushed else []


def test_a_start_pushes_a_whole_snapshot(kernel: Kernel) -> None:
    kernel.wait_for(lambda: sent(kernel, "snapshot"))
    snapshot = msgspec.convert(sent(kernel, "snapshot")[0]["snapshot"], KernelSnapshot)
    assert snapshot.current == "mesh0"
    assert [p.label for p in snapshot.meshes[0].processes] == ["0.0", "0.1"]


def test_a_change_is_pushed_without_being_asked_for(kernel: Kernel) -> None:
    assert kernel.run("meshes.set_processes('busy', 'lost')") == "ok"
    kernel.wait_for(lambda: states(kernel) == ["busy", "lost"])


def test_sync_pushes_though_nothing_changed(kernel: Kernel) -> None:
    kernel.wait_for(lambda: sent(kernel, "snapshot"))
    before = len(sent(kernel, "snapshot"))
    order(kernel, "sync")
    kernel.wait_for(lambda: len(sent(kernel, "snapshot")) > before)


def test_a_busy_kernel_answers_on_a_subshell_and_keeps_pushing(kernel: Kernel) -> None:
    done: list[str] = []

    def act() -> None:
        if "running" in kernel.text() and not done:
            order(kernel, "ping")
            order(kernel, "interrupt", mesh="mesh0")
            done.append("sent")

    cell = (
        "print('running', flush=True)\n"
        "while not meshes.commands: pass\n"  # pure Python, as the worst of cells
        "meshes.set_processes('busy', 'busy')\n"
        "input('held until the change was seen')\n"
    )

    def answer(_: str) -> str:
        kernel.wait_for(lambda: states(kernel) == ["busy", "busy"])
        return "on"

    assert kernel.run(cell, answer=answer, during=act) == "ok", kernel.errors()
    assert [m["thread"].startswith("subshell") for m in sent(kernel, "pong")] == [True]
    kernel.run("print(meshes.commands)")
    assert "('interrupt', 'mesh0')" in kernel.text()


def test_output_of_a_cell_does_not_move_the_panel_back_to_the_main_shell(kernel: Kernel) -> None:
    assert kernel.run("panel._comm.send({'op': 'pong', 'thread': 'by hand'})") == "ok"
    order(kernel, "ping")
    kernel.wait_for(lambda: [m for m in sent(kernel, "pong") if m["thread"].startswith("subshell")])


def test_stop_reaches_the_commands_and_the_mesh_disappears(kernel: Kernel) -> None:
    order(kernel, "stop", mesh="mesh0")
    kernel.wait_for(lambda: any(m["snapshot"]["meshes"] == [] for m in sent(kernel, "snapshot")))


def test_a_debugger_is_driven_over_the_comm(kernel: Kernel) -> None:
    order(kernel, "debug_attach", mesh="mesh0", session="1/copy")
    order(kernel, "debug_line", mesh="mesh0", session="1/copy", line="n")
    order(kernel, "debug_detach", mesh="mesh0", session="1/copy")
    order(kernel, "debug_line", mesh="mesh0", session="1/copy", line="ranks")  # the last one is answered
    kernel.wait_for(lambda: len(sent(kernel, "debug_text")) == 2)
    told = {"op": "debug_text", "mesh": "mesh0", "session": "1/copy", "prompt": "(Pdb) "}
    texts = ["> cell.py(4)f()\n", "there is nobody else\n"]
    assert sent(kernel, "debug_text") == [{**told, "text": text} for text in texts]
    kernel.run("print(meshes.commands)")
    assert "('attach', '1/copy'), ('n', '1/copy'), ('detach', '1/copy'), ('ranks', '1/copy')" in kernel.text()


@pytest.mark.parametrize(
    ("op", "data", "text"),
    [
        ("stop", {"mesh": "nope"}, "no mesh is named nope"),
        ("stop", {}, "names no mesh"),
        ("debug_attach", {"mesh": "mesh0"}, "names no session"),
        ("debug_line", {"mesh": "mesh0", "session": "1"}, "names no line"),
        ("__init__", {}, "knows no command '__init__'"),
    ],
)
def test_a_command_that_fails_says_so_in_the_panel(kernel: Kernel, op: str, data: dict[str, str], text: str) -> None:
    order(kernel, op, **data)
    kernel.wait_for(lambda: any(text in m["text"] for m in sent(kernel, "failed")))


def test_a_stopped_panel_leaves_no_comm_thread_or_subshell(running: Kernel) -> None:
    cell = (
        "import threading, comm\n"
        "before = set(threading.enumerate())\n"
        f"{START}\n"
        "panel.stop(); panel.stop()\n"
        "[t.join(10) for t in threading.enumerate() if t not in before]\n"
        "print(set(threading.enumerate()) - before, 'monarch_lab.panel' in comm.get_comm_manager().comms)"
    )
    assert running.run(cell) == "ok", running.errors()
    assert running.text().strip() == "set() False"


def test_a_panel_starts_again_after_a_stop(kernel: Kernel) -> None:
    assert kernel.run("panel.stop(); panel.start(get_ipython())") == "ok", kernel.errors()
    kernel.wait_for(lambda: sent(kernel, "snapshot"))
    order(kernel, "ping")
    kernel.wait_for(lambda: sent(kernel, "pong"))


def test_without_a_kernel_nothing_happens() -> None:
    meshes = FakeMeshes()
    panel = meshes.start(InteractiveShell())
    panel.stop()
    assert meshes.seq == 0


def test_times_that_always_run_are_no_reason_to_push() -> None:
    meshes = FakeMeshes()
    before = panel_comm.what_shows(meshes.snapshot())
    aged = [msgspec.structs.replace(m, age_s=9.0) for m in meshes.snapshot().meshes]
    assert panel_comm.what_shows(KernelSnapshot(99, "mesh0", aged)) == before
    stopped = DebuggerSnapshot("1", 1, "0.1", "paused", "cell.py", 4, "f", "x = 1")
    debugged = [msgspec.structs.replace(m, debuggers=[stopped]) for m in meshes.snapshot().meshes]
    assert panel_comm.what_shows(KernelSnapshot(99, "mesh0", debugged)) != before
    meshes.set_processes("idle", "busy")
    assert panel_comm.what_shows(meshes.snapshot()) != before
