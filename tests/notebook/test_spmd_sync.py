"""``%mesh sync``: the user's modules on real workers, before and after their files change."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.kernel import Kernel


@pytest.fixture
def folder(meshed: Kernel, tmp_path: Path) -> Path:
    assert meshed.run("%mesh restart") == "ok"  # without modules of other tests
    (tmp_path / "labbase.py").write_text("scale = 2\ndef grow(x):\n    return x * scale\n")
    (tmp_path / "labuser.py").write_text("from labbase import grow\ndef twice(x):\n    return grow(grow(x))\n")
    (tmp_path / "labalone.py").write_text("import itertools\nmade = 'once'\n")
    return tmp_path


def edit(path: Path, old: str, new: str) -> None:
    """Of the same size and, to the second, the same time: what a compiled file takes for no change."""
    before = path.stat()
    path.write_text(path.read_text().replace(old, new))
    assert path.stat().st_size == before.st_size
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 1000))


def value(kernel: Kernel, body: str) -> str:
    assert kernel.run(f"%%spmd -q\n{body}") == "ok", "\n".join(kernel.errors()[0]["traceback"])
    return str(kernel.displays()[-1]["text/plain"])


def test_modules_become_importable_and_then_current_in_the_order_of_use(meshed: Kernel, folder: Path) -> None:
    assert meshed.run("%%spmd -q\nimport labuser") == "error"
    assert meshed.run(f"%mesh sync {folder}") == "ok", meshed.errors()
    assert meshed.text() == f"Ranks 0, 1: {folder} can be imported from.\n"
    body = "import labuser, labalone\nfrom labuser import twice\nlabalone.made = 'kept'\ntwice(3)"
    assert value(meshed, body) == "ranks 0, 1: 12"
    assert meshed.run("%mesh sync") == "ok" and meshed.text() == "Ranks 0, 1: all modules are current.\n"
    edit(folder / "labbase.py", "scale = 2", "scale = 3")
    assert meshed.run("%mesh sync") == "ok", meshed.errors()
    assert meshed.text() == "Ranks 0, 1: reloaded labbase, labuser.\n"
    assert value(meshed, "twice(3), labuser.twice(3), labalone.made") == "ranks 0, 1: (27, 27, 'kept')"
    assert meshed.run("%mesh sync") == "ok" and meshed.text() == "Ranks 0, 1: all modules are current.\n"


def test_a_module_that_fails_is_told_and_stays_due_with_those_that_use_it(meshed: Kernel, folder: Path) -> None:
    assert meshed.run(f"%mesh sync {folder}") == "ok"
    assert value(meshed, "import labuser\nlabuser.twice(1)") == "ranks 0, 1: 4"
    edit(folder / "labbase.py", "scale = 2", "scale = a")
    assert meshed.run("%mesh sync") == "error"
    text = "\n".join(meshed.errors()[0]["traceback"])
    assert "NameError: name 'a' is not defined" in text and "labbase.py" in text
    edit(folder / "labbase.py", "scale = a", "scale = 5")
    assert meshed.run("%mesh sync") == "ok" and meshed.text() == "Ranks 0, 1: reloaded labbase, labuser.\n"
    assert value(meshed, "labuser.twice(1)") == "ranks 0, 1: 25"


def test_a_path_that_is_not_there_is_said(meshed: Kernel) -> None:
    assert meshed.run("%mesh sync nowhere.py") == "error"
    assert meshed.errors()[0]["evalue"] == "%mesh sync: there is no nowhere.py"


def test_classes_and_functions_of_cells_travel_by_value_both_ways(meshed: Kernel) -> None:
    assert (
        meshed.run("class Here:\n    def __init__(self, x): self.x = x\n    def plus(self): return self.x + 1") == "ok"
    )
    assert meshed.run("here = Here(4)\n%mesh push here Here") == "ok"
    assert value(meshed, "here.plus(), type(here) is Here, Here(rank).plus()") == "\n".join(
        f"rank {rank}: (5, True, {rank + 1})" for rank in (0, 1)
    )
    body = "class There:\n    def __init__(self): self.rank = rank\ndef make(): return There().rank\nthere = There()\n1"
    assert value(meshed, body) == "ranks 0, 1: 1"
    assert meshed.run("%mesh pull there make --from 1") == "ok", meshed.errors()
    assert meshed.run("print(there.rank, type(there).__name__, make())") == "ok", meshed.errors()
    assert meshed.text().endswith("1 There 1\n")
