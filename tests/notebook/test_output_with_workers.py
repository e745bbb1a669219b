"""What workers print in cells, in a real kernel on real workers (docs/cells.md)."""

from __future__ import annotations

import re
import stat
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
%%spmd -q
import ctypes, logging, os, subprocess, sys, threading, time, warnings
"""
# What tqdm writes to a stream that is no terminal.
BAR = """
def bar(n, total, name=""):
    done = 10 * n // total
    sys.stderr.write(f"\\r{name}{100 * n // total:3}%|{'█' * done:10}| {n}/{total} [00:0{n % 9}<?, ?it/s]")
    sys.stderr.flush()
"""
SIX = """
print("one")
sys.stderr.write("two\\n")
os.write(1, b"three\\n")
subprocess.run(["sh", "-c", "echo four; echo five >&2"])
logging.warning("six")
warnings.warn("seven")
ctypes.CDLL(None).puts(b"eight")
threading.Thread(target=print, args=("nine",)).start()
"""


@pytest.fixture(scope="module")
def running() -> Iterator[Kernel]:
    with Kernel(cwd=ROOT, env={"LANG": "C", "LC_ALL": "C", "TZ": "Asia/Kathmandu"}) as kernel:
        yield kernel


@pytest.fixture
def kernel(running: Kernel) -> Kernel:
    """A kernel with a live mesh of two."""
    if running.run("ml.meshes()['mesh'].check_alive()") != "ok":
        start, cell = SETUP.split("%%spmd")
        assert running.run(start) == "ok", running.errors()
        assert running.run(f"%%spmd{cell}") == "ok", running.errors()
    return running


def printed(kernel: Kernel, body: str, first: str = "%%spmd -q") -> list[str]:
    assert kernel.run(f"{first}\n{body}") == "ok", kernel.errors()
    return kernel.text().splitlines()


def test_each_way_to_print_is_shown_in_the_cell_that_did(kernel: Kernel) -> None:
    [warning] = [line for line in printed(kernel, SIX) if "UserWarning" in line]
    assert re.fullmatch(r"\[0\.0-0\.1\] .*UserWarning: seven", warning) and "warnings.warn" in kernel.text()
    words = [line.removeprefix("[0.0-0.1] ") for line in kernel.text().splitlines()]
    # puts goes through the C library's buffer, which is emptied at the end of the cell.
    kept = [word for word in words if word.split(":")[-1] in "one two three four five six eight nine".split()]
    assert sorted(kept) == sorted(["one", "two", "three", "four", "five", "WARNING:root:six", "eight", "nine"])
    assert [word for word in kept if word in ("one", "three", "four")] == ["one", "three", "four"]
    assert (
        kernel.run(
            "@ml.remote\ndef six(t):\n    import ctypes, logging, os, subprocess, sys, threading, warnings\n"
            + "".join(f"    {line}\n" for line in SIX.split("\n"))
            + "    return t"
        )
        == "ok"
    )
    assert set(kept) <= {
        line.removeprefix("[0.0-0.1] ") for line in printed(kernel, "t = six(torch.ones(1))", "%%mesh -q")
    }
    assert kernel.run("%mesh logs --lines 3") == "ok" and "[0.1] eight" in kernel.text()  # the file has it too


def test_output_is_live_and_then_in_the_order_of_the_ranks(kernel: Kernel) -> None:
    body = "print('begin', flush=True)\ntime.sleep((2 - rank) / 4)\nprint('rank', rank)\nprint('end', end='')"
    assert printed(kernel, body) == ["[0.0-0.1] begin", "[0.0] rank 0", "[0.1] rank 1", "[0.0-0.1] end"]
    states = [block["text/plain"] for block in kernel.blocks()]
    assert "[0.0-0.1] begin" in states and len(states) < 20
    assert any("rank 1" in state and "rank 0" not in state for state in states)  # it came first


def test_odd_text_arrives_and_no_clock_of_a_zone_is_in_the_times(kernel: Kernel) -> None:
    body = r"""
print("naïve 🦋 e\u0301 \ud800 \x1b[31mred\x1b[0m")
os.write(1, "🦋".encode()[:2]); time.sleep(0.25); os.write(1, "🦋".encode()[2:] + b" \xff\n")
"""
    odd = printed(kernel, body, "%%spmd --time")
    assert odd == ["[0.0-0.1] naïve 🦋 e\u0301 \\ud800 red", "[0.0-0.1] 🦋 \N{REPLACEMENT CHARACTER}"]
    assert '<span style="color: #e75c58">red</span>' in kernel.blocks()[-1]["text/html"]
    assert 0.2 < float(kernel.displays()[0]["text/plain"].split()[-2]) < 30


def test_bars_of_many_ranks_are_one_line_that_moves_in_place(kernel: Kernel) -> None:
    body = (
        BAR
        + """
for n in range(21):
    bar(n if rank else n // 2, 20, "train: ")
    time.sleep(0.02)
for n in range(n // (1 if rank else 2), 21): bar(n, 20, "train: ")
sys.stderr.write("\\n")
print("done")
"""
    )
    assert [line.split("[00")[0] for line in printed(kernel, body)] == [
        "[0.0-0.1] train: 100%|██████████| 20/20 ",
        "[0.0-0.1] done",
    ]
    states = [block["text/plain"] for block in kernel.blocks()]
    assert all(state.count("\n") <= 1 for state in states) and len(states) > 2
    assert any(re.search(r"\(slowest 0\.0; fastest 0\.1: \d+%\)", state) for state in states)
    assert "<details>" in kernel.blocks()[-1]["text/html"]


def test_a_child_process_and_a_fork_print_in_the_cell_and_do_not_hold_it(kernel: Kernel) -> None:
    body = """
child = subprocess.Popen("echo begun; sleep 600", shell=True)
pid = os.fork()
if not pid:
    print("forked")
    os._exit(0)
os.waitpid(pid, 0)
time.sleep(0.2)
"""
    assert sorted(printed(kernel, body)) == ["[0.0-0.1] begun", "[0.0-0.1] forked"]
    assert printed(kernel, "child.kill(); child.wait(); print('again')") == ["[0.0-0.1] again"]


def test_a_flood_is_a_head_a_tail_and_a_file(kernel: Kernel) -> None:
    shown = printed(kernel, "for n in range(20_000): print('line', n)\nprint('end', rank)")
    assert shown[:1000] == [f"[0.0-0.1] line {n}" for n in range(1000)]
    assert shown[-2:] == ["[0.0] end 0", "[0.1] end 1"] or shown[-1] == "[0.1] end 1"
    notes = [line for line in shown if "…" in line]
    assert len(notes) == 2 and "… 18,951 lines are left out; all of them are in /" in notes[0]
    path = Path(notes[1].split(" are in ")[1])
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    text = path.read_text()
    assert text.count("\n") == 20_001 and text.startswith("line 0\nline 1\n") and text.endswith("line 19999\nend 1\n")


def test_captured_text_has_everything(kernel: Kernel) -> None:
    assert kernel.run("%%capture kept\n%%spmd\nprint('a', rank)\nprint('both', file=sys.stderr)") == "ok"
    assert kernel.blocks() == []
    assert kernel.run("print(kept.stdout + kept.stderr, end='')") == "ok"
    assert kernel.text() == "[0.0] a 0\n[0.1] a 1\n[0.0-0.1] both\n"


def test_an_output_widget_takes_lines(kernel: Kernel) -> None:
    assert kernel.run("@ml.remote\ndef say(t, word):\n    print(word)\n    return t\nimport ipywidgets") == "ok"
    cell = "%%mesh -q\nwith ipywidgets.Output() as out:\n    say(torch.ones(1), 'inside'); ml.inspect(torch.ones(1))"
    assert kernel.run(cell) == "ok", kernel.errors()
    assert kernel.blocks() == [] and sorted(kernel.text("stdout").splitlines()) == ["[0.0] inside", "[0.1] inside"]


def test_text_stands_above_a_display_that_came_after_it(kernel: Kernel) -> None:
    printed(kernel, "from IPython.display import HTML, display\nprint('above')\ndisplay(HTML('<b>below</b>'))")
    shown = [m["content"]["data"] for m in kernel.mine() if m["msg_type"] == "display_data"]
    assert "above" in shown[0]["text/plain"] and "<b>below</b>" in str(shown[1:])


def test_an_interrupted_loop_has_lost_no_line(kernel: Kernel) -> None:
    acted: list[None] = []

    def act() -> None:
        if not acted and "[0.0-0.1] 900\n" in kernel.text():
            acted.append(kernel.interrupt())

    assert kernel.run("%%spmd -q\nn = 0\nwhile True:\n    print(n)\n    n += 1", during=act) == "error"
    assert kernel.errors()[0]["ename"] == "KeyboardInterrupt"
    paths = re.findall(r"all of them are in (\S+)", kernel.text())
    assert paths
    for path in paths:
        numbers = Path(path).read_text().split()
        assert len(numbers) > 1000 and numbers == [str(n) for n in range(len(numbers))]
    assert printed(kernel, "print('next')") == ["[0.0-0.1] next"]


def test_what_was_printed_before_an_error_and_before_a_death_is_shown(kernel: Kernel) -> None:
    path = Path(printed(kernel, "for n in range(1100): print(n)")[1000].split(" are in ")[1])
    assert kernel.run("%%spmd -q\nprint('no newline', end='')\nraise ValueError(rank)") == "error"
    assert kernel.text() == "[0.0-0.1] no newline\n"
    cell = "%%spmd -q\nprint('last words')\nos.write(2, b'and in C\\n')\ntime.sleep(0.3)\nif rank: os.abort()"
    assert kernel.run(cell) == "error"
    assert "last words\n" in kernel.text() and "rank 1 " in kernel.text() and "SIGABRT" in kernel.text()
    assert path.exists() and kernel.run("%mesh stop") == "ok" and not path.exists()
