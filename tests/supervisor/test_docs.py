"""What docs/supervisor.md shows, runs and prints what it says; the diagrams of docs/lifecycle.md are the tables."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.supervisor.recorder import ROOT


def test_the_example_prints_what_the_page_says(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "supervisor.md").read_text()
    found = re.search(r"```python\n(.*?)```\n\n```\n(.*?)```", page, re.DOTALL)
    assert found is not None
    code, printed = found.groups()
    (tmp_path / "example.py").write_text(code)
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "example.py"], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60
    )
    assert (done.stdout, done.stderr) == (printed, "")
