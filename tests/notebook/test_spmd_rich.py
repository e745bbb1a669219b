"""Rich display, magics and ``!`` of ``%%spmd`` cells, in a real kernel on real workers."""

from __future__ import annotations

import base64
from typing import Any

import pytest

from tests.kernel import Kernel, _block_id

PAGE = """
class Page:
    def __init__(self, text): self.text = text
    def __repr__(self): return f"Page({self.text!r})"
    def _repr_html_(self): return f"<b>{self.text}</b>"
"""


@pytest.fixture
def kernel(meshed: Kernel) -> Kernel:
    assert meshed.run(f"%%spmd\n{PAGE}") == "ok", meshed.errors()
    return meshed


def ran(kernel: Kernel, body: str, options: str = "-q") -> None:
    status = kernel.run(f"%%spmd {options}\n{body}")
    assert status == "ok", "\n".join("\n".join(e["traceback"]) for e in kernel.errors())


def left(kernel: Kernel, kind: str = "text/plain") -> list[Any]:
    """What the cell's displays show in the end, as a front end would have it."""
    shown: dict[str, dict[str, Any]] = {}
    for number, message in enumerate(kernel.mine()):
        if "display_data" not in message["msg_type"] or _block_id(message) is not None:
            continue
        content = message["content"]
        name = content.get("transient", {}).get("display_id") or str(number)
        if message["msg_type"] == "display_data" or name in shown:
            shown[name] = content["data"]
    return [data[kind] for data in shown.values() if data.get(kind)]


def test_the_last_expression_is_shown_in_its_rich_form_and_equal_ones_once(kernel: Kernel) -> None:
    ran(kernel, "Page('same')")
    assert left(kernel) == ["ranks 0, 1:", "Page('same')"] and left(kernel, "text/html")[1] == "<b>same</b>"
    ran(kernel, "Page(rank) if rank else 3")
    assert left(kernel) == ["rank 0: 3", "rank 1:", "Page(1)"] and left(kernel, "text/html")[-1] == "<b>1</b>"
    ran(kernel, "Page(1);")
    assert left(kernel) == []


def test_displays_come_live_under_their_ranks_and_equal_ones_once(kernel: Kernel) -> None:
    ran(kernel, "from IPython.display import HTML\ndisplay(HTML('<i>a</i>'))\ndist.barrier()\ndisplay(Page(rank))")
    html = left(kernel, "text/html")
    assert left(kernel)[:2] == ["ranks 0, 1:", "<IPython.core.display.HTML object>"]
    assert "<i>a</i>" in html and "<b>0</b>" in html and "<b>1</b>" in html
    assert sorted(left(kernel)[2:]) == ["Page(0)", "Page(1)", "rank 0:", "rank 1:"]


def test_in_the_end_displays_are_in_the_order_of_ranks(kernel: Kernel) -> None:
    body = "if rank == 0: dist.barrier()\ndisplay(Page(rank))\nif rank == 1: dist.barrier()\ndisplay(Page(rank + 5))"
    ran(kernel, body)
    shown = ["rank 0:", "Page(0)", "rank 1:", "Page(1)", "rank 0:", "Page(5)", "rank 1:", "Page(6)"]
    assert left(kernel) == shown


def test_a_handle_updates_its_own_ranks_display(kernel: Kernel) -> None:
    ran(
        kernel, "h = display(Page(10 * rank), display_id=True)\nh.update(Page(10 * rank + 1))\nh.display_id is not None"
    )
    assert sorted(v for v in left(kernel, "text/html") if "<b>" in v) == ["<b>11</b>", "<b>1</b>"]
    ran(kernel, "h.update(Page('later'))")
    updates = [m["content"] for m in kernel.mine() if m["msg_type"] == "update_display_data"]
    assert [u["data"]["text/html"] for u in updates] == ["<b>later</b>"] * 2
    assert len({u["transient"]["display_id"] for u in updates}) == 2


def test_clear_output_lets_the_next_display_take_the_place(kernel: Kernel) -> None:
    ran(kernel, "from IPython.display import clear_output")
    ran(kernel, "for k in range(4):\n    clear_output(wait=True)\n    display(Page(k))", "--ranks 1 -q")
    assert left(kernel) == ["rank 1:", "Page(3)"]
    ran(kernel, "display(Page(1))\nclear_output()")
    assert left(kernel) == []


def test_figures_that_are_open_are_shown_at_the_cells_end(kernel: Kernel) -> None:
    ran(kernel, "import matplotlib.pyplot as plt\nplt.figure(figsize=(1, 1))\nplt.plot([0, 1 + rank]);")
    images = left(kernel, "image/png")
    assert len(images) == 2 and all(base64.b64decode(i).startswith(b"\x89PNG") for i in images)
    ran(kernel, "plt.get_fignums()")
    assert left(kernel) == ["ranks 0, 1: []"]
    ran(
        kernel,
        "plt.plot([1, 2])\nplt.show()\nf, a = plt.subplots()\na.plot([3, rank])\nf.savefig('/dev/null', format='png');",
    )
    assert len(left(kernel, "image/png")) == 3
    assert kernel.run("%%spmd -q\nplt.plot([1, 2])\n1 / 0") == "error" and len(left(kernel, "image/png")) == 1


def test_capture_and_time_above_the_cell_work_on_displays(kernel: Kernel) -> None:
    assert kernel.run("%%capture kept\n%%spmd\ndisplay(Page('hidden'))\nprint('words')") == "ok"
    assert left(kernel) == [] and kernel.text() == ""
    assert kernel.run("print(kept.stdout.count('words'), sorted(o.data['text/plain'] for o in kept.outputs))") == "ok"
    assert kernel.text().startswith("1 [\"Page('hidden')\", \"Page('hidden')\", 'rank 0:', 'rank 1:'")
    assert kernel.run("%%time\n%%spmd -q\nt = 3\nPage('timed')") == "ok" and "Wall time" in kernel.text()
    assert left(kernel)[-1] == "Page('timed')"


def test_line_and_cell_magics_run_on_each_rank(kernel: Kernel) -> None:
    ran(
        kernel,
        "x = rank\n%timeit -n 2 -r 1 x + 1\n%matplotlib inline\nhere = %pwd\nhere == get_ipython().getoutput('pwd')[0]",
    )
    assert "per loop" in kernel.text() and left(kernel) == ["ranks 0, 1: True"]
    ran(kernel, "\n\n%%time\nmade = rank + 5\nmade")
    assert "Wall time" in kernel.text() and left(kernel) == ["rank 0: 5\nrank 1: 6"]
    ran(kernel, "import os\nbefore = os.getcwd()\n%cd -q /\nmoved = %pwd\n%cd -q -\nmoved, os.getcwd() == before")
    assert left(kernel) == ["ranks 0, 1: ('/', True)"]
    ran(kernel, "made")
    assert left(kernel) == ["rank 0: 5\nrank 1: 6"]
    assert kernel.run("w = ml.meshes()['mesh'].replicate(torch.ones(2))") == "ok"
    ran(kernel, "%%time\ns = w.sum().item()\ns")  # named in the text of a magic
    assert left(kernel) == ["ranks 0, 1: 2.0"]


def test_commands_run_on_each_rank(kernel: Kernel) -> None:
    ran(kernel, "name = f'r{rank}'\n!echo on {name}; echo err >&2\nlisted = !printf 'a\\nb'\nlisted, _exit_code")
    assert sorted(kernel.text().splitlines()) == ["[0.0-0.1] err", "[0.0] on r0", "[0.1] on r1"]
    assert left(kernel) == ["ranks 0, 1: (['a', 'b'], 0)"]
    interrupted: list[int] = []

    def interrupt() -> None:
        if not interrupted and "begun" in kernel.text():
            interrupted.append(1)
            kernel.interrupt()

    assert kernel.run("%%spmd\n!echo begun; sleep 600\nprint('went on')", during=interrupt) == "error"
    assert kernel.errors()[0]["ename"] == "KeyboardInterrupt" and "went on" not in kernel.text()


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ("%pip list", "%pip is a magic of the notebook, whose packages are the workers' too"),
        ("%mesh status", "%mesh is a magic of the notebook: put it into a cell of its own"),
        ("%%spmd\nrank", "%%spmd is a magic of the notebook: it is the first line of a cell, once"),
        ("%debug", "%debug looks at no worker: %mesh pm, in a cell of its own, opens the last failure"),
        ("%no_such_magic", "Line magic function `%no_such_magic` not found"),
    ],
)
def test_a_magic_that_cannot_run_there_says_what_to_do(kernel: Kernel, body: str, text: str) -> None:
    assert kernel.run(f"%%spmd\n{body}") == "error"
    assert text in kernel.errors()[0]["evalue"]


def test_lines_keep_their_numbers_and_sources_beside_magics(kernel: Kernel) -> None:
    assert kernel.run("%%spmd -q\n\n%pwd\n!true\n1 / 0") == "error"
    text = "\n".join(kernel.errors()[0]["traceback"])
    assert "----> 5 1 / 0" in text and "get_ipython" not in text
    assert kernel.run("%%spmd\n%pwd\nx = = 1") == "error" and kernel.errors()[0]["ename"] == "SyntaxError"


def test_the_shell_leaves_the_namespace_and_the_notebooks_names_alone(kernel: Kernel) -> None:
    ran(
        kernel,
        "get_ipython(); sorted(n for n in globals() if n in ('In', 'Out', 'exit', 'quit', 'open', '_ih', 'display'))",
    )
    assert left(kernel) == ["ranks 0, 1: []"]
    ran(kernel, "import __main__, sys\n__main__ is sys.modules['__main__'] and __main__.rank == rank")
    assert left(kernel) == ["ranks 0, 1: True"]


NET = """
class Odd:
    touched = 0
    @property
    def risky(self):
        Odd.touched += 1
        dist.barrier()
    def act(self, times, *, why="no reason"):
        '''Act some times.'''
net = torch.nn.Sequential(torch.nn.Linear(3, 2))
odd = Odd()
wanted_far = [rank] * 3
"""


def _asked(kernel: Kernel, kind: str, code: str) -> dict[str, Any]:
    content = {"code": code, "cursor_pos": len(code)} | ({"detail_level": 0} if kind == "inspect_request" else {})
    ident = kernel.send(kind, content)
    while (reply := kernel.client.get_shell_msg(timeout=10))["parent_header"]["msg_id"] != ident:
        pass
    return dict(reply["content"])


def _completed(kernel: Kernel, body: str) -> list[str]:
    return list(_asked(kernel, "complete_request", f"%%spmd\n{body}")["matches"])


def _described(kernel: Kernel, body: str) -> str:
    return str(_asked(kernel, "inspect_request", f"%%spmd\n{body}")["data"].get("text/plain"))


@pytest.mark.parametrize("is_busy", [False, True])
def test_names_of_the_workers_are_completed_and_described_even_while_they_are_busy(
    kernel: Kernel, is_busy: bool
) -> None:
    ran(kernel, NET)
    assert kernel.run("wanted_here = ml.meshes()['mesh'].replicate(torch.ones(2)); wanted_local = 4") == "ok"
    if is_busy:
        ran(kernel, "import time\nwhile True: time.sleep(0.01)", "-q --async -o handle")
    assert _completed(kernel, "wanted_own = 1\nwanted_") == ["wanted_far", "wanted_here", "wanted_own"]
    assert _completed(kernel, "odd.a") == ["act"] and "risky" in _completed(kernel, "odd.")
    assert "all_reduce" in _completed(kernel, "x = dist.all_r")
    assert _completed(kernel, "net.") and "weight" in _completed(kernel, "net.nowhere if 0 else torch.nn.Linear.")[
        :0
    ] + ["weight"]
    assert "Signature:   act(self, times, *, why='no reason')" in _described(kernel, "odd.act")
    assert "Act some times." in _described(kernel, "odd.act")
    assert "String form: [0, 0, 0]" in _described(kernel, "wanted_far")
    assert _described(kernel, "odd.risky") == "None" and _described(kernel, "wanted_local") == "None"
    assert "Shape" not in _described(kernel, "net") and "Type:        Sequential" in _described(kernel, "net")
    # The notebook's own cells complete as they did.
    assert "wanted_local" in _asked(kernel, "complete_request", "wanted_lo")["matches"]
    assert _asked(kernel, "inspect_request", "wanted_local")["found"]
    if is_busy:
        assert kernel.run("ml.meshes()['mesh'].interrupt()\nhandle.exception().type_name if 0 else 1") == "ok"
        assert kernel.run("try: handle.result()\nexcept BaseException as e: print(type(e).__name__)") == "ok"
    ran(kernel, "Odd.touched")
    assert left(kernel) == ["ranks 0, 1: 0"]


def test_a_stopped_worker_does_not_hold_up_completion(kernel: Kernel) -> None:
    import os
    import signal

    ran(kernel, "import os\nfrozen_name = os.getpid()\nprint(frozen_name)", "-q --ranks 0")
    pid = int(kernel.text().split()[-1])
    os.kill(pid, signal.SIGSTOP)
    try:
        assert "frozen_name" not in _completed(kernel, "frozen_na")
    finally:
        os.kill(pid, signal.SIGCONT)
    assert _completed(kernel, "frozen_na") == ["frozen_name"]


def test_help_on_a_name_describes_the_workers(kernel: Kernel) -> None:
    ran(kernel, NET)
    ran(kernel, "odd.act?")
    assert "Act some times." in left(kernel)[-1] and left(kernel)[0] == "ranks 0, 1:"
