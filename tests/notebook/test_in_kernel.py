"""The notebook in a real kernel, on made-up meshes: what only a kernel's threads, messages and signals can show."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from tests.kernel import Kernel, Message

ROOT = str(Path(__file__).parents[2])
SETUP = """
import sys, threading, time
from tests.fakes import engine
engine.install()
%load_ext monarch_lab
%colors nocolor
%mesh start
client = engine.meshes()["mesh"].client
"""
# Longer than any test may take: a test that needs it to end fails by its own limit.
LONG = 600


@pytest.fixture(scope="module")
def running() -> Iterator[Kernel]:
    with Kernel(cwd=ROOT) as kernel:
        yield kernel


@pytest.fixture
def kernel(running: Kernel) -> Iterator[Kernel]:
    assert running.run(SETUP) == "ok", running.errors()
    yield running
    assert running.run("%unload_ext monarch_lab\nengine.uninstall()") == "ok", running.errors()


class Once:
    """Acts when a condition holds, once; for ``during``."""

    def __init__(self, kernel: Kernel, when: str, act: object) -> None:
        self.kernel, self.when, self.act, self.done = kernel, when, act, False

    def __call__(self) -> None:
        if not self.done and self.when in self.kernel.text():
            self.done = True
            self.act()  # type: ignore[operator]


def traceback(kernel: Kernel) -> str:
    [error] = kernel.errors()
    return "\n".join(error["traceback"])


def test_the_start_is_one_display_that_becomes_the_card(kernel: Kernel) -> None:
    kernel.run("%mesh stop")
    kernel.run("%mesh start")
    shown = kernel.displays(updates=True)
    ids = {
        m["content"]["transient"]["display_id"]
        for m in kernel.mine()
        if m["msg_type"] in ("display_data", "update_display_data")
    }
    assert len(ids) == 1
    assert "starting the agent" in shown[0]["text/plain"]
    assert shown[-1]["text/plain"].startswith('mesh "mesh" · live')
    assert "<table" in shown[-1]["text/html"]
    assert kernel.text() == ""


def test_output_from_another_thread_lands_in_its_cell(kernel: Kernel) -> None:
    kernel.run("""
def print_elsewhere(client):
    thread = threading.Thread(target=client.front.output, args=(client.cells, 1, "0.1", "stdout", "from a worker\\n"))
    thread.start(); thread.join()
client.during_sync = print_elsewhere
""")
    kernel.run("%%mesh\nx = 1")
    assert kernel.text() == "[0.1] from a worker\n"


def test_output_after_the_cell_ended_still_lands_in_it(kernel: Kernel) -> None:
    kernel.run("go = threading.Event()")
    first = kernel.start("""%%mesh
def later(front=client.front, cell=client.cells):
    go.wait()
    front.output(cell, 0, "0.0", "stdout", "late\\n")
thread = threading.Thread(target=later)
thread.start()
""")
    kernel.wait()
    kernel.run("%%mesh\ngo.set(); thread.join(); print('second')")

    def late() -> list[Message]:
        return [m for m in kernel.seen if "late" in m["content"].get("data", {}).get("text/plain", "")]

    kernel.wait_for(late)
    assert [m["parent_header"]["msg_id"] for m in late()] == [first]
    assert kernel.text() == "second\n"


def test_stderr_is_marked(kernel: Kernel) -> None:
    kernel.run("client.prints = [(0, 'stdout', 'fine\\n'), (0, 'stderr', 'care<ful\\n')]")
    kernel.run("%%mesh\nx = 1")
    [*_, last] = kernel.blocks()
    assert last["text/plain"] == "[0.0] fine\n[0.0] care<ful"
    assert "</span> fine\n" in last["text/html"] and "background: " in last["text/html"].split("fine")[1]
    assert "care&lt;ful</span>" in last["text/html"]


PROMPT = """
answers = []
def debug(client, alive=lambda: True):
    prompt = engine.Prompt(1, "0.1", "> cell(3)f()\\n-> x = 1\\n", "(Pdb) ", alive)
    while (line := client.front.ask(prompt)) not in (None, "c"):
        answers.append(line)
    answers.append(line)
client.during_sync = debug
"""


def test_a_debugger_asks_in_the_cell(kernel: Kernel) -> None:
    kernel.run(PROMPT)
    asked: list[str] = []
    lines = iter(["p x", "c"])

    def answer(prompt: str) -> str:
        asked.append(prompt)
        return next(lines)

    assert kernel.run("%%mesh\nx = 1", answer=answer) == "ok"
    assert asked == ["[0.1] (Pdb) "] * 2
    assert kernel.text() == "[0.1] > cell(3)f()\n[0.1] -> x = 1\n" * 2
    kernel.run("print(answers)")
    assert kernel.text() == "['p x', 'c']\n"


def test_end_of_input_is_no_answer(kernel: Kernel) -> None:
    kernel.run(PROMPT)
    assert kernel.run("%%mesh\nx = 1", answer=lambda prompt: "\x04") == "ok"
    kernel.run("print(answers)")
    assert kernel.text() == "[None]\n"


def test_a_front_end_without_input_never_hangs(kernel: Kernel) -> None:
    kernel.run(PROMPT)
    assert kernel.run("%%mesh\nx = 1", allow_stdin=False) == "ok"
    assert kernel.text().endswith("[0.1] debugger declined: this front end cannot ask for input\n")
    kernel.run("print(answers)")
    assert kernel.text() == "[None]\n"


def test_a_worker_that_dies_at_its_prompt_ends_the_prompt(kernel: Kernel) -> None:
    kernel.run(PROMPT)
    kernel.run(
        "looks = []\nclient.during_sync = lambda client: debug(client, lambda: looks.append(1) or len(looks) < 4)"
    )

    def answer_too_late(prompt: str) -> str:
        kernel.wait_for(lambda: "the worker is gone" in kernel.text())
        return "stale"

    assert kernel.run("%%mesh\nx = 1", answer=answer_too_late) == "ok"
    kernel.run("client.during_sync = debug")
    assert kernel.run("%%mesh\nx = 1", answer=lambda prompt: "c") == "ok"
    kernel.run("print(answers)")
    assert kernel.text() == "[None, 'c']\n"


def test_an_interrupt_at_a_prompt_ends_the_cell(kernel: Kernel) -> None:
    kernel.run(PROMPT)
    asked: list[str] = []

    def interrupt(prompt: str) -> str:
        asked.append(prompt)
        kernel.interrupt()
        return ""

    # The answer is sent after the signal; whichever comes first, the prompt is asked again or the cell ends.
    assert kernel.run("%%mesh\nx = 1", answer=interrupt) == "error"
    assert kernel.errors()[0]["ename"] == "KeyboardInterrupt"
    kernel.run("client.during_sync = None")
    assert kernel.run("%%mesh\n1") == "ok"


def test_an_interrupt_of_the_wait_gives_the_prompt_back(kernel: Kernel) -> None:
    kernel.run(f"def wait(client):\n    print('waiting')\n    time.sleep({LONG})\nclient.during_sync = wait")
    assert kernel.run("%%mesh\nx = 1", during=Once(kernel, "waiting", kernel.interrupt)) == "error"
    assert kernel.errors()[0]["ename"] == "KeyboardInterrupt"
    assert "notebook/cell.py" not in traceback(kernel)
    kernel.run("client.during_sync = None; client.log.clear()")
    assert kernel.run("%%mesh\n1") == "ok"


@pytest.mark.parametrize(
    "body",
    [
        f"await asyncio.sleep({LONG})",
        f"time.sleep({LONG}); await asyncio.sleep(0)",
        "await asyncio.sleep(0)\nwhile True: pass",
    ],
)
def test_an_interrupt_of_a_cell_that_awaits_is_a_keyboard_interrupt(kernel: Kernel, body: str) -> None:
    kernel.run("client.log.clear()")
    cell = f"%%mesh\nimport asyncio\nprint('waiting')\n{body}"
    assert kernel.run(cell, during=Once(kernel, "waiting", kernel.interrupt)) == "error"
    assert kernel.errors()[0]["ename"] == "KeyboardInterrupt"
    assert f"> {cell.count(chr(10)) + 1} {body.splitlines()[-1]}" in traceback(kernel)
    kernel.run("print(client.log[1:], engine.active)")
    assert kernel.text() == "['interrupt', 'end'] []\n"
    assert kernel.run("%%mesh\nawait asyncio.sleep(0, 3)") == "ok"


def test_an_interrupt_of_the_wait_of_a_cell_that_awaits(kernel: Kernel) -> None:
    kernel.run(f"def wait(client):\n    print('waiting')\n    time.sleep({LONG})\nclient.during_sync = wait")
    cell = "%%mesh\nimport asyncio\nawait asyncio.sleep(0)"
    assert kernel.run(cell, during=Once(kernel, "waiting", kernel.interrupt)) == "error"
    assert kernel.errors()[0]["ename"] == "KeyboardInterrupt"


def test_a_failing_cell_fails_the_request_at_the_users_line(kernel: Kernel) -> None:
    assert kernel.run("%%mesh -q\nx = 1\n\n1/0\ny = 2") == "error"
    assert kernel.errors()[0]["ename"] == "ZeroDivisionError"
    assert "      1 # %%mesh -q\n      2 x = 1\n      3 \n----> 4 1/0\n      5 y = 2" in traceback(kernel)


def test_a_remote_error_fails_the_request(kernel: Kernel) -> None:
    kernel.run("""
from monarch_lab.errors import RankFailure, RemoteException
def fail(client):
    raise RemoteException("ValueError: odd (on rank 1)", {1: RankFailure(1, "ValueError", "odd")})
client.during_sync = fail
""")
    assert kernel.run("%%mesh -q\nx = 1") == "error"
    [error] = kernel.errors()
    assert (error["ename"], error["evalue"]) == ("RemoteException", "ValueError: odd (on rank 1)")
    assert kernel.reply is not None and kernel.reply["content"]["ename"] == "RemoteException"
    assert traceback(kernel).endswith("On rank 1:\nValueError: odd\n\nRemoteException: ValueError: odd (on rank 1)")


def test_a_fault_on_the_line_is_one_line_in_red(kernel: Kernel) -> None:
    assert kernel.run("%mesh start --hots 2") == "error"
    assert traceback(kernel) == "UsageValueError: %mesh start: unknown option '--hots'; did you mean --hosts?"


def test_the_kernels_end_stops_the_meshes(tmp_path: Path) -> None:
    mark = tmp_path / "stopped"
    with Kernel(cwd=ROOT) as kernel:
        assert kernel.run(SETUP) == "ok", kernel.errors()
        kernel.run(f"engine.meshes()['mesh'].on_exit = lambda: open({str(mark)!r}, 'w').close()")
    assert mark.exists()


BARS = """
client.prints = [
    (rank, *text)
    for text in [("stderr", "\\r 50%|█ | 1/2"), ("stderr", "\\r100%|██| 2/2\\n")]
    for rank in (1, 0)
] + [(1, "stdout", "\x1b[1mend\x1b[0m 1\\n"), (0, "stdout", "end 0\\n")]
"""


def test_a_saved_notebook_reads_the_same_each_time() -> None:
    cells = [
        SETUP,
        "%%mesh\nx = 1\nx + 1",
        "%%mesh\nimport asyncio\nawait asyncio.sleep(0, 5)",
        "%%mesh\nx;",
        BARS,
        "%%mesh -q\nx;",
        "%mesh list",
    ]
    outputs = []
    for _ in range(2):
        notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
        NotebookClient(notebook, timeout=60, resources={"metadata": {"path": ROOT}}).execute()
        outputs.append([cell.outputs for cell in notebook.cells])
    assert outputs[0] == outputs[1]
    assert [output["data"]["text/plain"] for output in outputs[0][1]] == ["2", 'controller · mesh "mesh" · 2 workers']
    [bar] = outputs[0][5]
    assert bar["data"]["text/plain"] == "[0.0-0.1] 100%|██| 2/2\n[0.0] end 0\n[0.1] end 1"


def test_in_a_saved_notebook_an_error_stops_the_run() -> None:
    from nbclient.exceptions import CellExecutionError

    notebook = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell(c) for c in ("%load_ext monarch_lab", "%%mesh\n1")]
    )
    with pytest.raises(CellExecutionError, match="No mesh is running: type %mesh start"):
        NotebookClient(notebook, timeout=60, resources={"metadata": {"path": ROOT}}).execute()
