"""The debugger in a real kernel on real workers: four ranks, one kernel for all tests."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from monarch_lab.notebook.comm import COMM_ID
from tests.fakes.typist import Typed
from tests.kernel import Kernel

ROOT = str(Path(__file__).parents[2])
SETUP = """
%load_ext monarch_lab
%colors nocolor
%mesh start --cpu -n 4
import torch, monarch_lab as ml

@ml.remote
def stop_here(t):
    inside = t + 41
    breakpoint()
    a = inside * 2
    b = a + 1
    return b

def deeper(t, k):
    if k == 0:
        raise ValueError("deep")
    return deeper(t, k - 1)

@ml.remote
def fails(t):
    outer = 7
    return deeper(t, 2)

@ml.remote
def loops(t):
    total = t
    for i in range(4):
        total = total + i
    return total

@ml.remote(propagate=lambda t: t.clone())
def spins(t):
    import time
    t = t.clone()
    while t.sum() > 0:
        time.sleep(0.01)
    return t

@ml.remote(propagate=lambda t: t.clone())
def inner(t):
    here = t * 2
    breakpoint()
    return here

@ml.compile
def step(t):
    return inner(t + 1) + 1

class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, g):
        gradient = g * 2
        breakpoint()
        return gradient
"""


@pytest.fixture(scope="module")
def running() -> Iterator[Kernel]:
    with Kernel(cwd=ROOT) as kernel:
        assert kernel.run(SETUP) == "ok", kernel.errors()
        yield kernel


@pytest.fixture
def kernel(running: Kernel) -> Kernel:
    running.run("%mesh interrupt")  # what a test left in a debugger
    running.run("%mesh break --clear all")
    assert running.run("%%mesh -q\none = torch.ones(2)", answer=lambda prompt: "q") == "ok", running.errors()
    return running


def error(kernel: Kernel) -> str:
    [found] = kernel.errors()
    return f"{found['ename']}: {found['evalue']}"


def test_four_ranks_stop_one_is_stepped_two_are_cast_and_all_go_on(kernel: Kernel) -> None:
    lines = "p inside", "n", "rank 2", "ranks", "cast 1,3 p inside.sum()", "cast 1-3 n", "p b", "c all"
    typed = Typed(*lines, gathered="0-3", kernel=kernel)
    assert kernel.run("%%mesh -q\ny = stop_here(one)", answer=typed) == "ok", kernel.errors()
    assert typed.asked == ["[0.0] (Pdb) "] * 3 + ["[0.2] (Pdb) "] * 5
    text = kernel.text()
    assert " stopped at In[1]:10 in stop_here: a = inside * 2\n" in text
    assert "[0.0] tensor float32 (2,) cpu · min 42, max 42, mean 42\n[0.0] tensor([42., 42.])" in text
    assert "rank 0 at In[1]:11 in stop_here: b = a + 1\n" in text
    assert "ranks 1-3 at In[1]:10 in stop_here: a = inside * 2 (in focus: 2)" in text
    assert "[0.1] tensor(84.)" in text and "[0.3] tensor(84.)" in text and "[0.0] tensor(84.)" not in text
    assert "[0.2] *** NameError: name 'b' is not defined" in text and "[0.1] > In[1](11)stop_here()" in text
    assert kernel.run("%%mesh -q\nassert ml.inspect(y).tolist() == [85.0, 85.0]") == "ok", kernel.errors()


def test_statements_of_several_lines_interact_list_display_and_completion(kernel: Kernel) -> None:
    typed = Typed(
        "ll", "for i in range(2):", "    print(i, 'looped')", "", "interact", "1 + 1", "exit()", "complete ins",
        "!a = 5", "display inside.shape", "n", "until", "p inside.new_tensor([1., float('nan')])", "help", "c all",
        gathered="0-3", kernel=kernel,
    )  # fmt: skip
    assert kernel.run("%%mesh -q\ny = stop_here(one)", answer=typed) == "ok", kernel.errors()
    text = kernel.text()
    for part in (
        "[0.0]  10  ->\t    a = inside * 2", "[0.0] 1 looped", "[0.0] *interactive*: exit()",
        "[0.0] 2\n", "[0.0] inside", "display inside.shape",
        "> In[1](12)stop_here()", "min 1, max 1, mean 1, 1 NaN", "of the mesh: ranks, rank R, cast R CMD",
    ):  # fmt: skip
        assert part in text, part
    assert "[0.0] ...   " in typed.asked and "[0.0] >>> " in typed.asked


FROM_ONE = "!__import__('bdb').Breakpoint.clearBreakpoints()"
STEPPED = """%%spmd -q --ranks 0
def helper(v):
    w = v + 1
    return w * 2
x = 3
breakpoint()
y = helper(x)
z = helper(y)
for i in range(4):
    z += i
z"""


def test_every_command_of_pdb_works_in_a_cell(kernel: Kernel) -> None:
    typed = Typed(
        "ll", "s", "s", "a", "whatis v", "n", "r", "retval", "u", "d", "n", "p y",
        FROM_ONE, "tbreak helper", "c", "up", "p x", "down", "source helper", "c all", kernel=kernel,
    )  # fmt: skip
    assert kernel.run(STEPPED, answer=typed) == "ok", kernel.errors()
    text = kernel.text()
    assert kernel.reply is not None
    here = f"In[{kernel.reply['content']['execution_count']}]"  # as it stands beside the cell
    assert f"> {here}(7)<module>()\n" in text
    for part in (
        "[0.0]  11  \tz\n", f"--Call--\n[0.0] > {here}(2)helper()", "[0.0] v = 3\n", "[0.0] <class 'int'>\n",
        f"--Return--\n[0.0] > {here}(4)helper()->8\n", "[0.0] 8\n", f"Breakpoint 1 at {here}:2\n",
        f"Deleted breakpoint 1 at {here}:2\n", f"> {here}(3)helper()\n", "[0.0]   4  \t    return w * 2\n",
    ):  # fmt: skip
        assert part in text, part
    assert "pdb.py" not in text and "rank 0: 24" in kernel.displays()[-1]["text/plain"]


def test_breakpoints_of_pdb_have_conditions_counts_and_commands(kernel: Kernel) -> None:
    typed = Typed(
        FROM_ONE, "b 10, i > 0", "ignore 1 1", "commands 1", "p i * 100", "end", "c", "condition 1 i == 3", "c", "cl 1",
        "j 7", "alias px p x", "px", "debug helper(1)", "c", "__return__", "c", kernel=kernel,
    )  # fmt: skip
    assert kernel.run(STEPPED, answer=typed) == "ok", kernel.errors()
    text = kernel.text()
    for part in (
        "Breakpoint 1 at In[", "Will ignore next 1 crossing of breakpoint 1.", "[0.0] 200\n", "[0.0] 300\n",
        "New condition set for breakpoint 1.", "Deleted breakpoint 1 at In[", "(7)<module>()\n", "[0.0] 3\n",
        "LEAVING RECURSIVE DEBUGGER", "NameError: name '__return__' is not defined",
    ):  # fmt: skip
        assert part in text, part
    assert "[0.0] (com) " in typed.asked and "rank 0: 24" in kernel.displays()[-1]["text/plain"]
    # A breakpoint() while the thread is traced for others that are left stops at its own line.
    body = "import pdb\ndef f():\n    return 1\nlast = 2\npdb.set_trace()"
    assert kernel.run(f"%%spmd -q --ranks 0\n{body}", answer=Typed(FROM_ONE, "b f", "p last", "c")) == "ok", (
        kernel.errors()
    )
    assert kernel.run(f"%%spmd -q --ranks 0\n{body}", answer=Typed("p last", "cl 1", "c")) == "ok", kernel.errors()
    assert "pdb.py" not in kernel.text() and "[0.0] 2\n" in kernel.text()
    assert kernel.run("%%spmd -q --ranks 0\n[n for n in locals() if n in ('__return__', '__exception__')]") == "ok"
    assert "rank 0: []" in kernel.displays()[-1]["text/plain"]


def test_all_ranks_are_stepped_together(kernel: Kernel) -> None:
    typed = Typed("n all", "ranks", "n all", "ranks", "c all", gathered="0-3", kernel=kernel)
    assert kernel.run("%%spmd -q\nv = rank\nbreakpoint()\nv += 1\nv += 1\nv *= 2\nv", answer=typed) == "ok"
    text = kernel.text()
    assert re.search(r"ranks 0-3 at In\[\d+\]:5: v \+= 1 ", text) and re.search(r"ranks 0-3 at In\[\d+\]:6: v", text)
    assert "rank 3: 10" in kernel.displays()[-1]["text/plain"]


def test_q_ends_the_op_and_not_the_mesh(kernel: Kernel) -> None:
    typed = Typed("q", "c all", gathered="0-3", kernel=kernel)
    assert kernel.run("%%mesh -q\ny = stop_here(one)", answer=typed) == "error"
    assert error(kernel) == (
        "RemoteException: DebuggerQuit: the debugger was left with q, so this call has no result (on rank 0)"
    )
    assert kernel.run("%%mesh -q\n(one + 1).sum()") == "ok", kernel.errors()


def test_detached_ranks_are_kept_until_mesh_debug_and_the_cell_can_be_run_again(kernel: Kernel) -> None:
    kernel.run("%%mesh -q\none + 1")  # known, so that the one below waits for nothing
    kernel.run("%%spmd -q --ranks 1\nkept = 1\nbreakpoint()\nkept += 1\nkept", answer=Typed("n", "detach"))
    waits = "rank 1 waits in the debugger at In["
    assert waits in kernel.text() and "what this cell shows comes when it goes on" in kernel.text()
    assert kernel.run("%%mesh -q\nz = one + 1") == "ok", kernel.errors()
    assert waits in kernel.text() and "%mesh debug goes on there; what this cell sent is waited for" in kernel.text()
    assert kernel.run("%%mesh -q\nml.inspect(z, gpu=1)") == "error"
    assert error(kernel).startswith(f"DetachedError: {waits}")
    assert kernel.run("%mesh") == "ok" and "debugging" in kernel.displays()[0]["text/plain"]
    assert kernel.run("%mesh debug", answer=Typed("p kept", "c")) == "ok", kernel.errors()
    assert "[0.1] 2\n" in kernel.text()
    assert kernel.run("%%mesh -q\nassert ml.inspect(z).tolist() == [2.0, 2.0]") == "ok", kernel.errors()
    assert kernel.run("%mesh debug") == "error" and "no rank waits in a debugger" in error(kernel)


def test_a_cell_is_run_again_while_its_rank_is_paused(kernel: Kernel) -> None:
    cell = "%%spmd -q --ranks 1\nagain = globals().get('again', 0)\nbreakpoint()\nagain += 1\nagain"
    assert kernel.run(cell, answer=Typed("detach")) == "ok", kernel.errors()
    assert kernel.run("%mesh stacks --ranks 1") == "ok" and "pdb" not in kernel.text()
    assert "line 4" in kernel.text() and "again += 1" in kernel.text()
    assert kernel.run(cell) == "ok", kernel.errors()  # asks nothing, and does not wait
    assert "rank 1 waits in the debugger at In[" in kernel.text()
    typed = Typed("p again", "c", "p again", "c")  # the second run stops once the first has ended
    assert kernel.run("%mesh debug", answer=typed) == "ok", kernel.errors()
    text = kernel.text()
    assert text.startswith("rank 1 stopped at In[") and text.index("[0.1] 0\n") < text.index("[0.1] 1\n")
    assert typed.lines == [] and kernel.run("%%spmd -q --ranks 1\nagain") == "ok"
    assert kernel.displays()[-1]["text/plain"] == "rank 1: 2"


def test_breakpoints_hold_in_files_and_in_new_processes(kernel: Kernel, tmp_path: Path) -> None:
    (tmp_path / "broken_into.py").write_text("def work(n):\n    inner = n * 2\n    return inner + 1\n")
    body = f"import sys\nsys.path.insert(0, {str(tmp_path)!r})\nimport broken_into\nbroken_into.work(4)"
    assert kernel.run(f"%mesh break {tmp_path / 'broken_into.py'}:3 if inner==8 --ranks 1") == "ok", kernel.errors()
    for _ in range(2):
        typed = Typed("p inner", "ll", "c")
        assert kernel.run(f"%%spmd -q\n{body}", answer=typed) == "ok", kernel.errors()
        assert typed.lines == [] and "[0.1] 8\n" in kernel.text() and "  3  ->\t    return inner" in kernel.text()
        assert kernel.run("%mesh restart --ranks 1") == "ok", kernel.errors()


def test_a_post_mortem_goes_two_frames_up(kernel: Kernel) -> None:
    assert kernel.run("%%mesh -q\nw = fails(one)") == "error"
    assert kernel.run("%mesh pm 2", answer=Typed("p k", "up", "up", "up", "p outer", "q")) == "ok", kernel.errors()
    text = kernel.text()
    assert 'rank 2/pm stopped at In[1]:16 in deeper: raise ValueError("deep") (after ValueError: deep)' in text
    assert "[0.2/pm] 0\n" in text and "> In[1](22)fails()" in text and "[0.2/pm] 7\n" in text
    assert kernel.run("%mesh pm", allow_stdin=False) == "ok" and "[0.0/pm]   In[1](22)fails()" in kernel.text()
    assert kernel.run("%mesh pm --forget") == "ok"
    assert kernel.run("%mesh pm") == "error" and "no failure is kept" in error(kernel)
    assert kernel.run("%%mesh -q\nw = one.nonzero_static(size=1) @ one") == "error"


def test_breakpoints_are_set_from_the_notebook_listed_and_cleared(kernel: Kernel) -> None:
    assert kernel.run("%mesh break In[1]:28 if 'i == 2' --ranks 0") == "ok", kernel.errors()
    assert kernel.run("%mesh break loops --ranks 1") == "ok", kernel.errors()
    kernel.run("%mesh break")
    listed = kernel.text()
    assert "at In[1]:28 if i == 2 on rank 0\n" in listed and "at loops on rank 1\n" in listed
    left = {"[0.0] (Pdb) ": ["p i", "c"], "[0.1] (Pdb) ": ["n", "c"]}  # which of them is first, is not told
    assert kernel.run("%%mesh -q\nw = loops(one)", answer=lambda prompt: left[prompt].pop(0)) == "ok", kernel.errors()
    assert left == {"[0.0] (Pdb) ": [], "[0.1] (Pdb) ": []}
    assert (
        "[0.0] 2\n" in kernel.text()
        and "i == 2)" in kernel.text()
        and "in loops: total = t (breakpoint" in kernel.text()
    )
    assert kernel.run("%mesh break --clear all") == "ok" and kernel.text().startswith("Cleared breakpoint")
    assert kernel.run("%%mesh -q\nw = loops(one)") == "ok", kernel.errors()
    for wrong, said in (
        ("In[1]:5", "has no code that could stop"), ("In[99]:1", "no cell of this session"), ("a b", "if CONDITION"),
        ("loops if 'i ='", "no Python expression"), ("--clear 77", "no breakpoint has the number 77"), ("x:y", "line"),
    ):  # fmt: skip
        assert kernel.run(f"%mesh break {wrong}") == "error" and said in error(kernel), wrong


def test_running_code_is_broken_into(kernel: Kernel) -> None:
    assert kernel.run("%%mesh -q\nw = spins(one * 0)") == "ok", kernel.errors()
    assert kernel.run("%%mesh -q --async\nw = spins(one)") == "ok", kernel.errors()
    assert kernel.run("%mesh debug 1-3", answer=Typed("p t", "cast all t.zero_()", "c all")) == "ok", kernel.errors()
    assert "stopped at In[1]:3" in kernel.text() and "in spins" in kernel.text()
    assert kernel.run("%mesh debug 0", answer=Typed("t.zero_()", "c")) == "ok", kernel.errors()
    assert kernel.run("%%mesh -q\nassert ml.inspect(w).tolist() == [0.0, 0.0]") == "ok", kernel.errors()
    assert kernel.run("%mesh debug 0") == "error" and "rank 0 runs no Python code of yours" in error(kernel)


def test_an_spmd_cell_is_stepped_from_its_first_line_and_looked_at_where_it_fails(kernel: Kernel) -> None:
    typed = Typed("n", "c", "p x", "c")
    assert kernel.run("%%spmd -q --debug --ranks 0\nx = 1\ny = x / 0\ny", answer=typed) == "error"
    text = kernel.text()
    assert "stopped at In[" in text and "]:2: x = 1 (--debug)" in text and "]:3: y = x / 0 (after Zero" in text
    assert "[0.0] 1\n" in text and "ZeroDivisionError" in error(kernel)


def test_an_await_is_stepped_over(kernel: Kernel) -> None:
    body = (
        "import asyncio\nasync def co():\n    v = 1\n    breakpoint()\n    await asyncio.sleep(0.01)\n    v += 1\n"
        "    return v\nawait co()"
    )
    typed = Typed("n", "n", "p v * 10", "c")
    assert kernel.run(f"%%spmd -q --ranks 1\n{body}", answer=typed) == "ok", kernel.errors()
    assert "(7)co()\n[0.1] -> v += 1" in kernel.text() and "[0.1] 20\n" in kernel.text()
    assert "rank 1: 2" in kernel.displays()[-1]["text/plain"]


def test_two_threads_of_one_rank_have_names_of_their_own(kernel: Kernel) -> None:
    body = (
        "import threading\ndef f():\n    inner = 5\n    breakpoint()\n    return inner\n"
        "t = threading.Thread(target=f)\nt.start()\nhere = 1\nbreakpoint()\nt.join()"
    )
    assert kernel.run(f"%%spmd -q --ranks 1\n{body}", answer=Typed("rank 1#2", "p inner", "c", "p here", "c")) == "ok"
    assert "[0.1#2] 5\n" in kernel.text() and "[0.1] 1\n" in kernel.text()


def test_who_waits_in_a_collective_for_a_stop_is_not_timed_out(kernel: Kernel) -> None:
    body = (
        "mine = dist.new_group()\nif rank == 2: breakpoint()\n"
        "total = torch.ones(1)\ndist.all_reduce(total, group=mine)\n"
        "total.item(), mine._get_backend(torch.device('cpu')).options._timeout.days"
    )
    assert kernel.run(f"%%spmd -q\n{body}", answer=Typed("p rank", "c")) == "ok", kernel.errors()
    assert "(4.0, 30)" in str(kernel.displays()[-1])


def test_the_backward_of_a_function_of_the_users_stops_too(kernel: Kernel) -> None:
    assert kernel.run("%mesh push Doubled") == "ok"
    cell = "%%spmd -q\nx = torch.ones(2, requires_grad=True)\nDoubled.apply(x).sum().backward()\nx.grad"
    assert kernel.run(cell, answer=Typed("p gradient", "c all", gathered="0-3", kernel=kernel)) == "ok", kernel.errors()
    assert "stopped at In[1]:58 in backward: return gradient" in kernel.text()
    assert "tensor([2., 2.])" in kernel.displays()[0]["text/plain"]


def test_a_recorded_function_and_a_stream_stop_as_any_other(kernel: Kernel) -> None:
    for seen in ("p here", "cast all p here"):  # recorded, then replayed
        typed = Typed(seen, "c all", gathered="0-3", kernel=kernel)
        assert kernel.run("%%mesh -q\ny = step(one)", answer=typed) == "ok", kernel.errors()
        assert "[0.0] tensor([4., 4.])" in kernel.text() and "in inner: return here" in kernel.text()
    assert "[0.3] tensor([4., 4.])" in kernel.text()
    typed = Typed("p here", "c all", gathered="0/copy, 1/copy, 2/copy, 3/copy", kernel=kernel)
    assert kernel.run("%%mesh -q --stream copy\nz = inner(torch.ones(2))", answer=typed) == "ok", kernel.errors()
    assert "[0.0/copy] tensor([2., 2.])" in kernel.text()


def test_the_panel_drives_a_session_while_the_cell_waits(kernel: Kernel) -> None:
    def order(op: str, **data: str) -> None:
        kernel.send("comm_msg", {"comm_id": COMM_ID, "data": {"op": op, "mesh": "mesh", "session": "1", **data}})

    def texts() -> list[str]:
        return [m["text"] for m in kernel.comm_messages(COMM_ID) if m["op"] == "debug_text"]

    def debuggers() -> list[dict[str, Any]]:
        pushed = [m["snapshot"] for m in kernel.comm_messages(COMM_ID) if m["op"] == "snapshot"]
        return list(pushed[-1]["meshes"][0]["debuggers"]) if pushed else []

    def panel(prompt: str) -> str:
        kernel.wait_for(lambda: [d["state"] for d in debuggers()] in (["paused"], ["attached"]))
        order("debug_attach")
        kernel.wait_for(lambda: [d["state"] for d in debuggers()] == ["held"])
        order("debug_line", line="p kept")
        kernel.wait_for(lambda: "1\n" in texts())
        order("debug_line", line="c")
        return "typed too late"

    cell = "%%spmd -q --ranks 1\nkept = 1\nbreakpoint()\nkept += 1\nkept"
    assert kernel.run(cell, answer=panel) == "ok", kernel.errors()
    assert "In[" in texts()[0] and "-> kept += 1" in texts()[0]
    assert "rank 1: 2" in kernel.displays()[-1]["text/plain"]
    kernel.wait_for(lambda: debuggers() == [])


def test_without_an_input_box_the_stack_is_printed_and_it_goes_on(kernel: Kernel) -> None:
    assert kernel.run("%%mesh -q\ny = stop_here(one)", allow_stdin=False) == "ok", kernel.errors()
    text = kernel.text()
    assert text.count("nobody can be asked for a debugger's command here") == 4
    assert "[0.3] > In[1](10)stop_here()\n[0.3] -> a = inside * 2" in text
