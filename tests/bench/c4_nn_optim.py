"""C4: torch's own samples of every nn module and optimizer, on a mesh against eager (tests/conformance/nn_optim.py)."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.bench._peers import ROOT
from tests.bench._report import Line, main


def measure(quick: bool) -> Iterator[Line]:
    command = [sys.executable, "-W", "ignore", "-m", "tests.conformance.nn_optim"]
    command += ["--only", "Linear"] if quick else []
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "out.json"
        done = subprocess.run([*command, "--json", out], cwd=ROOT, capture_output=True, text=True)
        if not out.exists():
            raise RuntimeError(f"nn_optim gave no result:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
        found = json.loads(out.read_text())
    counts = found["counts"]
    judged = sum(counts.values()) - counts.get("eager", 0)
    yield Line(
        "C4",
        "samples of nn modules and optimizers equal to eager",
        100.0 * counts.get("pass", 0) / judged,
        "%",
        goal=100,
        at_least=True,
        absolute=True,
        details={**counts, "faults": sorted(found["faults"])},
    )


if __name__ == "__main__":
    main("c4_nn_optim", measure)
