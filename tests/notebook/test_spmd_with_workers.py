"""``%%spmd`` in a real kernel on real workers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.kernel import Kernel

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
        yield kernel


@pytest.fixture
def kernel(running: Kernel) -> Kernel:
    """A kernel with a live mesh of two."""
    if running.run("ml.meshes()['mesh'].check_alive()") != "ok":
        assert running.run(SETUP) == "ok", running.errors()
    return running


def lines(kernel: Kernel) -> list[str]:
    return sorted(kernel.text().splitlines())


def shown(kernel: Kernel) -> list[str]:
    return [display["text/plain"] for display in kernel.displays()]


def traceback(kernel: Kernel) -> str:
    [error] = kernel.errors()
    return "\n".join(error["traceback"])


def value(kernel: Kernel, expression: str) -> str:
    """The last expression of a quiet cell on every rank."""
    assert kernel.run(f"%%spmd -q\n{expression}") == "ok", traceback(kernel)
    return "\n".join(shown(kernel))


def when(kernel: Kernel, text: str, act: Callable[[], object]) -> Callable[[], None]:
    """For ``during``: acts once, when the cell printed the text."""
    acted: list[bool] = []

    def look() -> None:
        if not acted and text in kernel.text():
            acted.append(True)
            act()

    return look


def test_a_cell_runs_on_each_rank_in_a_namespace_that_lasts(kernel: Kernel) -> None:
    body = "mine = rank * 10\nprint('on', rank, local_rank, world_size, device, mesh_coordinates)\nmine"
    assert kernel.run(f"%%spmd\n{body}") == "ok", traceback(kernel)
    assert lines(kernel) == [
        "[0.0] on 0 0 2 cpu {'host': 0, 'gpu': 0}",
        "[0.1] on 1 1 2 cpu {'host': 0, 'gpu': 1}",
    ]
    header, values = shown(kernel)
    assert header == 'spmd · mesh "mesh" · 2 workers'
    assert values == "rank 0: 0\nrank 1: 10"
    assert value(kernel, "mine + 1") == "rank 0: 1\nrank 1: 11"
    assert value(kernel, "'same'") == "ranks 0, 1: 'same'"
    assert value(kernel, "mine;") == ""


def test_the_group_is_there_and_ddp_trains_equally_on_all_ranks(kernel: Kernel) -> None:
    assert (
        kernel.run("""%%spmd
from torch.nn.parallel import DistributedDataParallel as DDP
dist.init_process_group("gloo")   # as a script has it: kept as it is
torch.manual_seed(0)
model = DDP(torch.nn.Linear(4, 1))
torch.manual_seed(rank)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
first = [p.detach().clone() for p in model.parameters()]
for step in range(5):
    optimizer.zero_grad()
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
total = torch.stack([p.detach().sum() for p in model.parameters()])
both = [torch.zeros_like(total) for _ in range(world_size)]
dist.all_gather(both, total)
equal = torch.equal(both[0], both[1]) and not torch.equal(first[0], model.module.weight.detach())
""")
        == "ok"
    ), traceback(kernel)
    assert value(kernel, "equal") == "ranks 0, 1: True"
    body = (
        "for step in range(3):\n    optimizer.zero_grad(); model(torch.randn(8, 4)).sum().backward(); optimizer.step()"
    )
    assert kernel.run(f"%%spmd\n{body}") == "ok", traceback(kernel)


def test_ranks_draw_numbers_of_their_own_and_the_meshs_stay_in_step(kernel: Kernel) -> None:
    assert value(kernel, "torch.rand(())").count("tensor") == 2
    assert kernel.run("%%mesh\nassert len({float(v) for v in ml.fetch_all(torch.rand(())).flatten()}) == 1") == "ok"


def test_await_works_at_the_top_of_a_cell(kernel: Kernel) -> None:
    assert (
        value(kernel, "import asyncio\nawait asyncio.sleep(0)\nawait asyncio.sleep(0, rank)") == "rank 0: 0\nrank 1: 1"
    )
    body = "async def later(n):\n    await asyncio.sleep(0)\n    return n\n"
    body += "task = asyncio.create_task(later(7))\nawait task"
    assert value(kernel, body) == "ranks 0, 1: 7"  # one loop runs all of a cell
    assert value(kernel, "asyncio.run(later(8))") == "ranks 0, 1: 8"


def test_a_cell_runs_on_chosen_ranks(kernel: Kernel) -> None:
    assert kernel.run("%%spmd[1] --time\nrank") == "ok", traceback(kernel)
    header, values = shown(kernel)
    assert header.startswith('spmd · mesh "mesh" · 2 workers · rank 1 · ') and header.endswith(" s")
    assert values == "rank 1: 1"
    for options in ("[0, 1]", " --ranks ::1", " --dim gpu=all", " -r 0,1"):
        assert kernel.run(f"%%spmd{options}\nrank") == "ok", traceback(kernel)
        assert shown(kernel)[-1] == "rank 0: 0\nrank 1: 1"
    assert kernel.run("%%spmd[7]\nrank") == "error"
    assert "there is no rank 7; ranks are 0 to 1" in traceback(kernel)


def test_an_error_shows_the_cells_lines_and_no_frame_of_ours(kernel: Kernel) -> None:
    assert kernel.run("%%spmd -q\ndef divide(a):\n    return 1 / a\ndivide(0)") == "error"
    text = traceback(kernel)
    assert "On ranks 0, 1:\n" in text and "ZeroDivisionError: division by zero" in text
    assert "return 1 / a" in text and "divide(0)" in text and ", line 4" in text and ", line 3, in divide" in text
    assert "monarch_lab/" not in text and "asyncio" not in text and "Cell In[" in text
    assert kernel.errors()[0]["ename"] == "RemoteException"
    assert kernel.run("%%spmd -q\n\nif rank == 1: raise KeyError('one')\nraise ValueError('zero')") == "error"
    text = traceback(kernel)
    assert "On rank 0:\n" in text and "On rank 1:\n" in text and "KeyError: 'one'" in text
    assert (
        kernel.run("import sys\ne = sys.last_value\nprint(sorted(e.by_rank), e.by_rank[1].type_name, e.line)") == "ok"
    )
    assert kernel.text() in ("[0, 1] KeyError 3\n", "[0, 1] KeyError 4\n")  # of whichever was heard of first


def test_what_is_no_python_on_the_workers_is_shown_as_any_error(kernel: Kernel) -> None:
    assert kernel.run("%%spmd -q\nexec('x = = 1')") == "error"
    text = traceback(kernel)
    assert "On ranks 0, 1:\n" in text and "exec('x = = 1')" in text and "monarch_lab/" not in text
    assert text.endswith("RemoteException: SyntaxError: invalid syntax (<string>, line 1) (on ranks 0, 1)")
    assert kernel.run("%%spmd -q\nassert rank > 1") == "error"
    assert kernel.errors()[0]["evalue"] == "AssertionError (on ranks 0, 1)"


def test_a_function_of_an_earlier_cell_shows_its_own_lines_after_it_was_edited(kernel: Kernel) -> None:
    assert kernel.run("%%spmd -q\ndef ratio():\n    return 1 / 0") == "ok"
    assert kernel.run("%%spmd -q\ndef ratio():\n\n    return 2 / 0") == "ok"
    assert kernel.run("%%spmd -q\nratio()") == "error"
    text = traceback(kernel)
    assert "----> 4 return 2 / 0" in text and "----> 2 ratio()" in text and "1 / 0" not in text


def test_magics_above_a_cell_work_on_it(kernel: Kernel) -> None:
    assert kernel.run("%%time\n%%spmd\ntimed = 3\ntimed") == "ok" and "Wall time" in kernel.text()
    assert shown(kernel)[-1] == "ranks 0, 1: 3"
    assert kernel.run("%%capture kept\n%%spmd\nprint('quiet')") == "ok" and kernel.text() == ""
    assert kernel.run("print(kept.stdout, end='')") == "ok" and kernel.text() == "[0.0-0.1] quiet\n"


def test_what_is_no_python_is_told_before_anything_runs(kernel: Kernel) -> None:
    assert kernel.run("%%spmd\nprint('ran')\nx = = 1") == "error"
    assert kernel.errors()[0]["ename"] == "SyntaxError" and kernel.text() == ""
    assert kernel.run("%%spmd\nprint('ran')\nreturn 1") == "error"
    assert kernel.errors()[0]["evalue"].startswith("'return' outside function") and kernel.text() == ""
    assert kernel.run("%%spmd\n!echo ran\nx = = 1") == "error"
    assert "line 3" in traceback(kernel) and kernel.text() == ""


@pytest.mark.parametrize("collective", ["dist.all_reduce(torch.ones(2))", "dist.barrier()", "dist.recv(t, 1)"])
def test_a_rank_that_raises_frees_those_that_wait_for_it(kernel: Kernel, collective: str) -> None:
    assert value(kernel, "kept = rank + 5\nt = torch.ones(2)\nkept") == "rank 0: 5\nrank 1: 6"
    assert kernel.run(f"%%spmd\nif rank == 1:\n    raise ValueError('the cause')\n{collective}") == "error"
    text = traceback(kernel)
    assert "On rank 1:\n" in text and "On rank 0" not in text and "ValueError: the cause" in text
    assert f"rank 0 waited in line 4 ({collective})" in text
    assert (
        value(kernel, "s = torch.ones(2)\ndist.all_reduce(s)\nkept, s[0].item()")
        == "rank 0: (5, 2.0)\nrank 1: (6, 2.0)"
    )


def test_ranks_out_of_step_after_a_failure_have_a_new_group(kernel: Kernel) -> None:
    body = (
        "if rank == 1: raise ValueError('before it took part')\nwork = dist.broadcast(torch.ones(2), 0, async_op=True)"
    )
    assert kernel.run(f"%%spmd\n{body}") == "error"
    assert "new default process group" in traceback(kernel)
    body = "s = torch.full((2,), 7.0 + rank)\ndist.broadcast(s, 0)\ns.tolist()"
    assert value(kernel, body) == "ranks 0, 1: [7.0, 7.0]"


@pytest.mark.parametrize(
    "body",
    [
        "import time\ntime.sleep(600)",
        "while True: pass",
        "if rank == 0: dist.barrier()",
        "import asyncio\nawait asyncio.sleep(600)",
        "while True:\n    try:\n        while True: pass\n    except KeyboardInterrupt: print('heard')",
    ],
)
def test_an_interrupt_ends_the_cell_on_all_ranks_and_keeps_variables(kernel: Kernel, body: str) -> None:
    assert value(kernel, "kept = rank\nkept") == "rank 0: 0\nrank 1: 1"
    act = when(kernel, "[0.0-0.1] waiting", kernel.interrupt)
    assert kernel.run(f"%%spmd\nprint('waiting')\n{body}", during=act) == "error"
    assert kernel.errors()[0]["ename"] == "KeyboardInterrupt", traceback(kernel)
    assert "monarch_lab/" not in traceback(kernel)
    if "barrier" in body:
        assert kernel.errors()[0]["evalue"] == "rank 0 was in line 3 (if rank == 0: dist.barrier())"
    if "except" in body:  # only a process's end ends that
        kernel.run("%mesh stop")
        return
    assert (
        value(kernel, "s = torch.ones(2)\ndist.all_reduce(s)\nkept, s[0].item()")
        == "rank 0: (0, 2.0)\nrank 1: (1, 2.0)"
    )


def test_an_interrupt_ends_a_loaders_processes_too(kernel: Kernel) -> None:
    body = """%%spmd
import time
class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, k):
        print("waiting")
        time.sleep(600)
loader = torch.utils.data.DataLoader(Slow(), num_workers=2)
for step in range(2):
    print("waiting")
    for batch in loader: pass
"""
    assert kernel.run(body, during=when(kernel, "waiting", kernel.interrupt)) == "error"
    assert kernel.errors()[0]["ename"] == "KeyboardInterrupt"
    assert value(kernel, "import multiprocessing\nmultiprocessing.active_children()") == "ranks 0, 1: []"


def test_a_cell_that_takes_too_long_is_ended(kernel: Kernel) -> None:
    assert kernel.run("%%spmd --timeout 0.5\nimport time\nif rank: time.sleep(600)") == "error"
    text = traceback(kernel)
    assert (
        "TimeoutError: %%spmd: rank 1 had not ended after 0.5 s: rank 1 was in line 3 (if rank: time.sleep(600))"
        in text
    )
    assert value(kernel, "rank") == "rank 0: 0\nrank 1: 1"


def test_a_tensor_of_the_notebook_is_the_ranks_shard(kernel: Kernel) -> None:
    assert kernel.run("w = ml.meshes()['mesh'].shard(torch.arange(4.0), 'gpu')") == "ok", traceback(kernel)
    assert value(kernel, "w.tolist()") == "rank 0: [0.0, 1.0]\nrank 1: [2.0, 3.0]"
    assert value(kernel, "w = w.sum()\nw.item()") == "rank 0: 1.0\nrank 1: 5.0"
    assert value(kernel, "w.item()") == "rank 0: 1.0\nrank 1: 5.0"  # assigned since: the cell's own
    assert kernel.run("w = ml.meshes()['mesh'].replicate(torch.zeros(2))") == "ok"
    assert value(kernel, "w.add_(rank)\nw.tolist()") == "rank 0: [0.0, 0.0]\nrank 1: [1.0, 1.0]"
    assert kernel.run("%%mesh\nw.sum().item()") == "error"  # written: no longer known equal
    assert "TypeError" in traceback(kernel) or "RemoteException" not in kernel.errors()[0]["ename"]
    assert kernel.run("%%mesh\nprint(ml.fetch_all(w).tolist())") == "ok"
    assert kernel.text() == "[[[0.0, 0.0], [1.0, 1.0]]]\n"


def test_out_makes_mesh_tensors_and_ragged_ones_are_listed(kernel: Kernel) -> None:
    assert (
        kernel.run("%%spmd --out a b\na = torch.full((2,), float(rank))\nb = torch.ones(3, dtype=torch.int64)") == "ok"
    )
    assert kernel.run("%%mesh\nc = a.reduce('gpu')\nprint(ml.inspect(c).tolist(), b.dtype)") == "ok", traceback(kernel)
    assert kernel.text() == "[1.0, 1.0] torch.int64\n"
    assert kernel.run("%%spmd --out a\na = torch.ones(rank + 1)") == "error"
    assert "a is rank 0: (1,) float32; rank 1: (2,) float32" in traceback(kernel)
    assert kernel.run("%%spmd --out nothing\n1") == "error"
    assert "--out nothing: no rank has a variable of that name" in traceback(kernel)


def test_push_and_pull_carry_values_between_the_namespaces(kernel: Kernel) -> None:
    assert kernel.run("factor = 3\ndef times(x):\n    return x * factor") == "ok"
    assert kernel.run("%%spmd -q\ntimes(rank)") == "error"
    assert "times is a variable of the notebook: %mesh push times sends it" in traceback(kernel)
    assert kernel.run("%mesh push times factor") == "ok", traceback(kernel)
    assert kernel.text() == "Pushed times, factor to ranks 0, 1.\n"
    assert (
        value(kernel, "far = torch.full((2,), times(rank) + 0.5)\nfar.tolist()")
        == "rank 0: [0.5, 0.5]\nrank 1: [3.5, 3.5]"
    )
    assert kernel.run("far") == "error"
    assert "%mesh pull far brings it" in kernel.text()
    assert kernel.run("%mesh pull far --from 1") == "ok", traceback(kernel)
    assert kernel.text() == "Pulled far from rank 1.\n"
    assert kernel.run("print(far.tolist())") == "ok" and kernel.text() == "[3.5, 3.5]\n"
    assert kernel.run("%mesh pull far --from all\nprint({r: v.tolist() for r, v in far.items()})") == "ok"
    assert kernel.text().endswith("{0: [0.5, 0.5], 1: [3.5, 3.5]}\n")
    assert kernel.run("%mesh pull nowhere") == "error"
    assert "name 'nowhere' is not defined on rank 0" in traceback(kernel)
    assert kernel.run("%mesh push nowhere") == "error"
    assert "nowhere" in traceback(kernel)


def test_a_rank_that_died_leaves_the_others_and_a_restarted_one_joins(kernel: Kernel) -> None:
    assert value(kernel, "kept = rank\nkept") == "rank 0: 0\nrank 1: 1"
    assert (
        kernel.run("%%spmd\nimport os, signal\nif rank: os.kill(os.getpid(), signal.SIGSEGV)\ndist.barrier()")
        == "error"
    )
    assert kernel.errors()[0]["ename"] == "DeviceException" and "SIGSEGV" in kernel.errors()[0]["evalue"]
    assert "it had not reported In[" in kernel.text() and "line 2: import os, signal" in kernel.text()
    assert kernel.run("%%spmd[0] -q\nkept") == "ok", traceback(kernel)
    assert shown(kernel) == ["rank 0: 0"]
    assert kernel.run("%mesh restart --ranks 1") == "ok"
    assert value(kernel, "s = torch.ones(2)\ndist.all_reduce(s)\ns[0].item()") == "ranks 0, 1: 2.0"


def test_a_breakpoint_asks_with_its_rank_and_nobody_is_freed_meanwhile(kernel: Kernel) -> None:
    asked: list[str] = []

    def answer(prompt: str) -> str:
        asked.append(prompt)
        if len(asked) == 1:
            time.sleep(2.5)
            return "p inside"
        return "c"

    body = "inside = 41\nif rank == 1: breakpoint()\ndist.barrier()\nrank"
    assert kernel.run(f"%%spmd -q\n{body}", answer=answer) == "ok", traceback(kernel)
    assert asked == ["[0.1] (Pdb) "] * 2 and "[0.1] 41" in lines(kernel)
    assert shown(kernel) == ["rank 0: 0\nrank 1: 1"]
