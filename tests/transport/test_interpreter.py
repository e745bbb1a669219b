"""A fresh interpreter runs this package, whatever else of its name is on the path."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import monarch_lab
from monarch_lab.transport.interpreter import code_with_ours


@pytest.mark.parametrize("flags", [[], ["-P"], ["-I", "-S"]])
def test_another_package_of_the_name_is_not_taken(tmp_path: Path, flags: list[str]) -> None:
    other = tmp_path / "monarch_lab"
    other.mkdir()
    (other / "__init__.py").write_text("raise ImportError('the wrong one')")
    code = code_with_ours(
        "import monarch_lab, monarch_lab.errors\nprint(monarch_lab.__file__, monarch_lab.errors.__file__)"
    )
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, *flags, "-c", code], env=env, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    here = Path(monarch_lab.__file__)
    assert done.stdout.split() == [str(here), str(here.parent / "errors.py")]
