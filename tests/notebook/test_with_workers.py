"""The notebook in a real kernel on real workers: what a user meets first, each with its way back."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kernel import Kernel

ROOT = str(Path(__file__).parents[2])
SETUP = """
%load_ext monarch_lab
%colors nocolor
%mesh start --cpu
import torch, monarch_lab as ml

@ml.remote
def shout(t, word, end="\\n"):
    print(word, end=end)
    return t + 1

@ml.remote
def fail(t, word):
    raise ValueError(word)

@ml.remote
def stop_here(t):
    inside = 41
    breakpoint()
    return t + 1

@ml.remote
def sleep(t):
    import time
    time.sleep(600)
    return t
"""


@pytest.fixture(scope="module")
def running() -> Iterator[Kernel]:
    with Kernel(cwd=ROOT) as kernel:
        yield kernel


@pytest.fixture
def kernel(running: Kernel) -> Kernel:
    """A kernel with a live mesh; what a test broke is started afresh."""
    if running.run("one") != "ok":
        assert running.run(SETUP) == "ok", running.errors()
    assert running.run("%mesh start --cpu") == "ok", running.errors()
    assert running.run("%%mesh\none = torch.ones(2)\none = shout(one, 'ready') - 1") == "ok", running.errors()
    return running


def lines(kernel: Kernel) -> list[str]:
    return sorted(kernel.text().splitlines())


def traceback(kernel: Kernel) -> str:
    [error] = kernel.errors()
    return "\n".join(error["traceback"])


def when(kernel: Kernel, text: str, act: object) -> object:
    """For ``during``: acts once, when the cell printed the text."""
    acted: list[bool] = []

    def look() -> None:
        if not acted and text in kernel.text():
            acted.append(True)
            act()  # type: ignore[operator]

    return look


def test_the_last_expression_of_a_cell_is_a_value_on_the_workers(kernel: Kernel) -> None:
    assert kernel.run("%%mesh\nx = one * 3\nx.sum()") == "ok", kernel.errors()
    value, header = kernel.displays()
    assert "tensor(6.)" in value["text/plain"]
    assert "text/html" in value
    assert header["text/plain"] == 'controller · mesh "mesh" · 2 workers'


def test_a_coalesced_cell_sends_its_ops_when_it_ends(kernel: Kernel) -> None:
    body = "import time\nsent = one + one\nfor _ in range(300):\n    sent = sent + one\ntime.sleep(0.05)"
    assert kernel.run(f"%%mesh\n{body}") == "ok", kernel.errors()
    cell = f"%%mesh --coalesce\n{body}\nprint(len(ml.get_active_mesh().client.where), 'buffered')"
    assert kernel.run(cell) == "ok", kernel.errors()
    assert "301 buffered" in kernel.text()
    assert kernel.run("%%mesh\nassert ml.inspect(sent)[0] == 302") == "ok", kernel.errors()


def test_a_cell_runs_on_a_stream(kernel: Kernel) -> None:
    assert kernel.run("%%mesh --stream copy\ny = torch.ones(2) + 1\nprint(y.stream, ml.get_active_stream())") == "ok"
    assert 'stream "copy" stream "copy"' in kernel.text() and '· stream "copy"' in str(kernel.displays())
    assert kernel.run("%%mesh\nmine, loan = ml.get_active_stream().borrow(y)\nprint((mine + 1).stream)") == "ok"
    assert 'stream "main"' in kernel.text()


def test_a_mesh_as_a_value_is_its_card(kernel: Kernel) -> None:
    assert kernel.run("ml.meshes()['mesh']") == "ok", kernel.errors()
    [shown] = kernel.displays()
    assert shown["text/plain"] == 'mesh "mesh" (host=1, gpu=2)'
    assert shown["text/html"].count("<tr") == 3


def test_what_workers_print_is_in_the_cell(kernel: Kernel) -> None:
    kernel.run("%%mesh\ny = shout(one, 'hello')")
    assert lines(kernel) == ["[0.0-0.1] hello"]
    kernel.run("%%mesh\ny = shout(one, 'no newline', end='')")
    assert lines(kernel) == ["[0.0-0.1] no newline"]


def test_a_remote_error_shows_the_users_line_and_the_workers(kernel: Kernel) -> None:
    assert kernel.run("%%mesh -q\nx = one + 1\ny = fail(x, 'three')\nz = x + 1") == "error"
    shown = traceback(kernel)
    assert "----> 3 y = fail(x, 'three')" in shown
    assert "On ranks 0, 1:\n" in shown
    assert "raise ValueError(word)\nValueError: three\n" in shown
    assert "monarch_lab/" not in shown
    assert "site-packages" not in shown
    assert kernel.errors()[0]["ename"] == "RemoteException"
    assert kernel.run("%%mesh\none + 1") == "ok"


def test_an_op_that_cannot_be_points_at_its_own_line(kernel: Kernel) -> None:
    assert kernel.run("%%mesh -q\na = torch.ones(3, 4)\nb = a @ a\nc = 1") == "error"
    shown = traceback(kernel)
    assert "----> 3 b = a @ a" in shown
    assert "monarch_lab/" not in shown


def test_a_wrong_call_points_at_the_users_line(kernel: Kernel) -> None:
    assert kernel.run("local = torch.ones(2)") == "ok"
    assert kernel.run("%%mesh -q\nx = 1\none + local") == "error"
    shown = traceback(kernel)
    assert "----> 3 one + local" in shown
    assert "mesh.replicate" in shown
    assert "File " not in shown


def test_a_breakpoint_asks_in_the_cell(kernel: Kernel) -> None:
    asked: list[str] = []
    left = {"[0.0] (Pdb) ": ["p inside + 1", "c"], "[0.1] (Pdb) ": ["c"]}

    def answer(prompt: str) -> str:
        asked.append(prompt)
        return left[prompt].pop(0)

    assert kernel.run("%%mesh\ny = stop_here(one)\ny", answer=answer) == "ok", kernel.errors()
    assert sorted(asked) == ["[0.0] (Pdb) ", "[0.0] (Pdb) ", "[0.1] (Pdb) "]
    assert "[0.0] 42" in lines(kernel)
    assert "return t + 1" in kernel.text()


def test_a_breakpoint_without_an_input_box_is_declined(kernel: Kernel) -> None:
    assert kernel.run("%%mesh\ny = stop_here(one)\ny", allow_stdin=False) == "ok", kernel.errors()
    assert "[0.0] debugger declined: this front end cannot ask for input" in lines(kernel)


def test_an_interrupt_at_a_breakpoint_ends_the_prompt_and_the_ranks_stay(kernel: Kernel) -> None:
    def interrupt(prompt: str) -> str:
        if "ranks 0, 1 " not in kernel.text():  # one of them is on its way
            return "ranks"
        kernel.interrupt()
        return ""

    assert kernel.run("%%mesh -q\ny = stop_here(one)", answer=interrupt) == "error"
    [error] = kernel.errors()
    said = "ranks 0, 1 wait in the debugger at In["
    assert error["ename"] == "KeyboardInterrupt" and error["evalue"].startswith(said)
    assert "%mesh debug goes on there" in error["evalue"] and "prompts.py" not in "".join(error["traceback"])
    assert kernel.run("%%mesh -q\nz = one - 1") == "ok", kernel.errors()
    assert said in kernel.text() and "what this cell sent is waited for there" in kernel.text()
    assert kernel.run("%mesh debug", answer=interrupt) == "error"
    assert kernel.errors()[0]["evalue"].startswith(said) and len(kernel.errors()[0]["traceback"]) < 5
    asked = iter(["p inside", "c all"])
    assert kernel.run("%mesh debug", answer=lambda prompt: next(asked)) == "ok", kernel.errors()
    assert "[0.0] 41" in lines(kernel)
    assert kernel.run("%%mesh -q\nassert ml.inspect(z).tolist() == [0.0, 0.0]") == "ok", kernel.errors()


def test_what_is_typed_in_a_box_that_is_over_answers_no_other_prompt(kernel: Kernel) -> None:
    lines, first = iter(["p inside", "p inside + 1", "c all"]), []

    def answer(prompt: str) -> str:
        first.append(kernel.question)
        if len(first) > 1:
            late = kernel.client.session.msg("input_reply", {"status": "ok", "value": "q"}, parent=first[0])
            kernel.client.stdin_channel.send(late)
        return next(lines)

    assert kernel.run("%%mesh -q\ny = stop_here(one)", answer=answer) == "ok", kernel.errors()
    assert len(first) == 3


@pytest.mark.parametrize(
    "body",
    [
        "y = sleep(one)",
        "import os\ny = ml.remote(lambda t: os.system('sleep 600'))(one)",
        "sleep(one).sum().item()",
        "import asyncio\nawait asyncio.sleep(0)\nsleep(one).sum().item()",
        "while True: y = one + 1",
    ],
)
def test_an_interrupt_stops_the_workers_and_the_mesh_goes_on(kernel: Kernel, body: str) -> None:
    act = when(kernel, "waiting", kernel.interrupt)
    assert kernel.run(f"%%mesh\nz = shout(one, 'waiting')\n{body}", during=act) == "error"  # type: ignore[arg-type]
    assert kernel.errors()[0]["ename"] == "KeyboardInterrupt"
    assert kernel.run("%%mesh\n(one + 1).sum()") == "ok", kernel.errors()
    assert "tensor(4.)" in kernel.displays()[0]["text/plain"]


def test_a_dead_worker_is_one_sentence_and_a_start_begins_afresh(kernel: Kernel) -> None:
    kernel.run("import os, signal\npids = [p.pid for p in ml.meshes()['mesh'].status().processes]")
    assert kernel.run("%%mesh\nos.kill(pids[1], signal.SIGKILL)\ny = shout(one, 'alive')") == "error"
    assert kernel.errors()[0]["ename"] == "DeviceException"
    assert "SIGKILL" in kernel.errors()[0]["evalue"]
    assert kernel.run("%%mesh\n1") == "error"
    assert traceback(kernel).startswith("DeviceException: mesh")
    kernel.run("%mesh start --cpu")
    assert kernel.text().startswith('Mesh "mesh" was dead (')
    assert kernel.run("%%mesh\ntorch.ones(2).sum()") == "ok", kernel.errors()


def test_a_dead_rank_is_told_at_once_and_restarted_beside_the_other(kernel: Kernel) -> None:
    kernel.run("import os, signal\npids = [p.pid for p in ml.meshes()['mesh'].status().processes]")
    kernel.run("%%mesh\nw = torch.full((2,), 5.0)")
    body = "os.kill(pids[1], signal.SIGKILL)\nwhile True: ml.meshes()['mesh'].check_alive()"
    assert kernel.run(f"%%mesh\n{body}") == "error"
    told = kernel.text()
    assert "[0.1] rank 1 (host 0, pid " in told and "was killed by SIGKILL" in told
    assert "%mesh restart --ranks 1 brings it back" in kernel.errors()[0]["evalue"]
    assert kernel.run("%mesh restart --ranks 1") == "ok", kernel.errors()
    assert kernel.text() == 'Restarted rank 1 of mesh "mesh": what it held is gone, the other ranks keep theirs.\n'
    assert kernel.run("%%mesh\nprint(ml.inspect(w, gpu=0).tolist())\ntorch.ones(2).reduce('gpu')") == "ok", (
        kernel.errors()
    )
    assert "[5.0, 5.0]" in kernel.text() and "tensor([2., 2.])" in kernel.displays()[0]["text/plain"]
    assert kernel.run("%%mesh\nw + 1") == "error"
    assert traceback(kernel).splitlines()[0].startswith("DeviceException") or "LOST" in traceback(kernel)


def test_a_stopped_worker_is_told_while_the_cell_waits_and_may_go_on(kernel: Kernel) -> None:
    kernel.run("import os, signal\npids = [p.pid for p in ml.meshes()['mesh'].status().processes]")
    kernel.run("print(pids[1])")
    pid = int(kernel.text())
    act = when(kernel, "is stopped by a signal", lambda: os.kill(pid, signal.SIGCONT))
    body = "os.kill(pids[1], signal.SIGSTOP)\nshout(one, 'after the stop')"
    assert kernel.run(f"%%mesh\n{body}", during=act) == "ok", kernel.errors()  # type: ignore[arg-type]
    assert f"rank 1 (pid {pid}) is stopped by a signal (state T): kill -CONT {pid} lets it go on" in kernel.text()
    assert "[0.0-0.1] after the stop\n" in kernel.text()


WRITE = """
@ml.remote
def write_in_c(t):
    import os
    os.write(1, f"C wrote this in rank {os.environ['RANK']}\\n".encode())
    return t
"""


def test_logs_show_what_c_code_wrote_and_follow_until_an_interrupt(kernel: Kernel) -> None:
    assert kernel.run(WRITE) == "ok"
    assert kernel.run("%%mesh\nwrite_in_c(one).sum()") == "ok", kernel.errors()
    assert kernel.run("%mesh logs --grep wrote") == "ok"
    assert lines(kernel) == ["[0.0] C wrote this in rank 0", "[0.1] C wrote this in rank 1"]
    assert kernel.run("%mesh logs --ranks gpu=1 -g wrote -n 1") == "ok"
    assert lines(kernel) == ["[0.1] C wrote this in rank 1"]
    assert kernel.run("%mesh logs -g nothing") == "ok"
    assert kernel.text().startswith('Nothing of that is in the log files of mesh "mesh"')
    assert kernel.run("%mesh logs --ranks 7") == "error"
    assert "there is no rank 7; ranks are 0 to 1" in traceback(kernel)
    act = when(kernel, "[0.0] C wrote", kernel.interrupt)
    assert kernel.run("%mesh logs --follow --ranks 0", during=act) == "ok", kernel.errors()


def test_requests_that_are_silent_or_leave_no_history_run_as_any_other(kernel: Kernel) -> None:
    """As VS Code and extensions send them."""
    for way in ({"silent": True}, {"store_history": False}, {"silent": True, "store_history": False}):
        kernel.start("%%spmd -q\nseen = rank\nprint('seen', seen)", **way)
        assert kernel.wait() == "ok", kernel.errors()
        assert {"[0.0] seen 0", "[0.1] seen 1"} <= set(lines(kernel))  # a notice of an earlier test may be there too
        kernel.start("%%mesh -q\nkept = one + 1", allow_stdin=False, **way)
        assert kernel.wait() == "ok", kernel.errors()
    for number in (1, 2):  # cells of one name
        kernel.start(f"%%spmd -q\nline = {number}\nline / 0", store_history=False)
        assert kernel.wait() == "error" and "----> 3 line / 0" in traceback(kernel)
        kernel.start(f"%%mesh -q\nfail(one, 'call {number}')\n", store_history=False)
        assert kernel.wait() == "error" and f"fail(one, 'call {number}')" in traceback(kernel)


def test_an_interrupt_sent_as_a_message_ends_a_cell_too(kernel: Kernel) -> None:
    """As by front ends that do not run on the kernel's machine."""
    act = when(kernel, "waiting", lambda: kernel.control("interrupt_request"))
    cell = "%%spmd -q\nimport time\nprint('waiting')\ntime.sleep(600)"
    assert kernel.run(cell, during=act) == "error"  # type: ignore[arg-type]
    assert kernel.errors()[0]["ename"] == "KeyboardInterrupt"
    assert kernel.run("%%spmd -q\nprint('next')") == "ok" and "[0.0-0.1] next" in kernel.text()


def test_a_front_end_that_knows_no_widget_of_ours_is_none_the_worse(kernel: Kernel) -> None:
    hook = "import threading\nraised = []\nthreading.excepthook = raised.append"
    assert kernel.run(f"{hook}\nml.MeshView(ml.meshes()['mesh'])") == "ok", kernel.errors()
    opened = [m["content"]["comm_id"] for m in kernel.seen if m["msg_type"] == "comm_open"]
    for comm in opened:  # what a front end without the comm's target answers
        kernel.send("comm_close", {"comm_id": comm, "data": {}})
    assert opened and kernel.run("%%mesh -q\ntorch.ones(1).sum()") == "ok", kernel.errors()
    assert kernel.run("import time; time.sleep(1.2); print(raised)") == "ok" and kernel.text() == "[]\n"


def test_reloading_stops_the_mesh_and_another_starts(kernel: Kernel) -> None:
    assert kernel.run("%reload_ext monarch_lab") == "ok" and kernel.text() == 'Stopped mesh "mesh" (2 workers).\n'
    assert kernel.run("%mesh start --cpu") == "ok", kernel.errors()
    assert kernel.run("%%spmd -q\nprint('again')") == "ok" and kernel.text() == "[0.0-0.1] again\n"


def test_unloading_ends_the_workers(kernel: Kernel) -> None:
    kernel.run("workers = [p.pid for p in ml.meshes()['mesh'].status().processes]")
    assert kernel.run("%unload_ext monarch_lab") == "ok"
    assert kernel.text() == 'Stopped mesh "mesh" (2 workers).\n'
    kernel.run("import psutil\nprint([pid for pid in workers if psutil.pid_exists(pid)])")
    assert kernel.text() == "[]\n"
