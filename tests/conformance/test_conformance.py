"""PyTorch's own OpInfo samples on a mesh against eager: a part of it here, all of it in ``make bench`` (c1)."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "variant", ["function", *(pytest.param(v, marks=pytest.mark.slow) for v in ("inplace", "out"))]
)
def test_operators_give_what_eager_gives(variant: str) -> None:
    command = [sys.executable, "-W", "ignore", str(HERE / "opinfo.py"), "--adapter", str(HERE / "adapter.py")]
    command += ["--variant", variant, "--per-op", "2", "--repeat", "2", "--shard", "0/10", "--floor", "99"]
    if variant == "function":
        command.append("--backward")
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=380)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    judged = re.search(r"(\d+)/(\d+) samples", done.stdout)
    assert judged is not None and int(judged[2]) > 100
