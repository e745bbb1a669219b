"""How errors of real workers read in a cell: folded by ranks, the first cause first, with the cells' own lines."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kernel import Kernel

ROOT = str(Path(__file__).parents[2])
SETUP = """
%load_ext monarch_lab
%colors nocolor
%mesh start --cpu -n 4
import torch, monarch_lab as ml
"""


@pytest.fixture(scope="module")
def running() -> Iterator[Kernel]:
    with Kernel(cwd=ROOT) as kernel:
        yield kernel


@pytest.fixture
def kernel(running: Kernel) -> Kernel:
    """A kernel with a live mesh of four."""
    if running.run("ml.meshes()['mesh'].check_alive()") != "ok":
        assert running.run(SETUP) == "ok", running.errors()
    return running


def failed(kernel: Kernel, cell: str) -> str:
    """The traceback of a cell that fails."""
    assert kernel.run(cell) == "error", kernel.text()
    [error] = kernel.errors()
    return "\n".join(error["traceback"])


def test_four_ranks_of_five_errors_are_two_blocks_and_the_first_cause_is_first(kernel: Kernel) -> None:
    body = "import time\nif rank == 2: raise MemoryError('out of memory')\ntime.sleep(0.5)\nraise ValueError('follows')"
    text = failed(kernel, f"%%spmd -q\n{body}")
    assert text.count("On rank") == 2 and text.index("On rank 2:\n") < text.index("On ranks 0, 1, 3:\n")
    assert text.index("MemoryError: out of memory") < text.index("ValueError: follows")
    assert "----> 3 if rank == 2: raise MemoryError" in text and "----> 5 raise ValueError('follows')" in text
    evalue = kernel.errors()[0]["evalue"]  # on a loaded machine the others were told not to wait before they raised
    assert evalue.startswith("MemoryError: out of memory (on rank 2); ValueError on ranks 0, 1, 3")
    kernel.run("import sys\ne = sys.last_value\nprint(e.ranks, e.first.rank, e.line, isinstance(e, MemoryError))")
    assert kernel.text() == "(0, 1, 2, 3) 2 3 True\n"


def test_chains_groups_and_odd_exceptions_of_workers_are_shown(kernel: Kernel) -> None:
    body = "try:\n    {}['k']\nexcept KeyError as e:\n    raise ValueError('outer') from e"
    text = failed(kernel, f"%%spmd -q\n{body}")
    order = ["On ranks 0, 1, 2, 3:", "{}['k']", "KeyError: 'k'", "direct cause", "from e", "ValueError: outer"]
    places = [text.index(part) for part in order]
    assert places == sorted(places) and "monarch_lab/" not in text
    text = failed(kernel, "%%spmd -q\nraise ExceptionGroup('several', [KeyError('a'), OSError('b')])")
    assert text.count("One of its parts:") == 2 and "OSError: b" in text
    text = failed(kernel, "%%spmd -q\nimport sys\nsys.exit(3)")
    assert "SystemExit: 3" in text and "its process lives on" in text
    text = failed(kernel, "%%spmd -q\nexec('a = = 1')")
    assert "SyntaxError" in text and "a = = 1" in text
    body = "class Odd(Exception):\n    def __str__(self): raise OSError\n    __reduce__ = __str__\nraise Odd"
    text = failed(kernel, f"%%spmd -q\n{body}")
    assert "Odd: <its text cannot be had: __str__ raised OSError>" in text
    text = failed(kernel, "%%spmd -q\nint('a')\n")
    kernel.run("%xmode Verbose")
    assert "run_spmd" not in text and "run_spmd" in failed(kernel, "%%spmd -q\nint('a')\n")
    kernel.run("%xmode Minimal")
    assert failed(kernel, "%%spmd -q\nint('a')\n").startswith("RemoteException: ValueError: invalid literal")
    kernel.run("%xmode Context")


def test_lines_are_those_that_ran_though_their_cell_was_edited_since(kernel: Kernel) -> None:
    """Case 35, with a function of the notebook that the workers were sent."""
    assert kernel.run("@ml.remote(propagate=lambda t: t)\ndef divide(t):\n    return t * (1 // 0)") == "ok"
    assert kernel.run("kept = divide\ndef divide(t):\n    # edited\n    return t * 2") == "ok"
    text = failed(kernel, "%%mesh -q\nkept(torch.ones(2))")
    assert "----> 2 kept(torch.ones(2))" in text and "----> 3 return t * (1 // 0)" in text and "edited" not in text


def test_what_a_failed_cell_held_is_freed(kernel: Kernel) -> None:
    body = """%%spmd -q
import weakref
def fail():
    large = torch.ones(1000)
    global gone
    gone = weakref.ref(large)
    try:
        raise KeyError("inner")
    except KeyError as e:
        kept = e   # a cycle: the frame holds the exception, which holds the frame
        raise ValueError("outer")
fail()"""
    failed(kernel, body)
    failed(kernel, "%%spmd -q\nint('a')")  # %mesh pm keeps the frames of the last failure, and of no other
    assert kernel.run("%%spmd -q\ngone() is None") == "ok"
    assert kernel.displays()[-1]["text/plain"] == "ranks 0, 1, 2, 3: True"
