"""C1: PyTorch's own sample inputs of every operator, on a mesh against eager torch (tests/conformance/opinfo.py)."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.bench._peers import ROOT
from tests.bench._report import Line, main

CONFORMANCE = ROOT / "tests" / "conformance"
FLOOR = 95.0


def measure(quick: bool) -> Iterator[Line]:
    command = [sys.executable, CONFORMANCE / "opinfo.py", "--adapter", CONFORMANCE / "adapter.py", "--backward"]
    command += ["--per-op", "2", "--shard", "0/6"] if quick else ["--per-op", "10"]
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "out.json"
        done = subprocess.run([*command, "--repeat", "3", "--json", out], cwd=ROOT, capture_output=True, text=True)
        if not out.exists():
            raise RuntimeError(f"opinfo.py gave no result:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
        found = json.loads(out.read_text())
    samples, warm = found["samples"], found["warm"]
    judged = sum(samples.values()) - samples.get("skipped", 0)
    rate = 100.0 * (samples.get("pass", 0) + samples.get("random", 0)) / judged
    faulty = [name for name, verdicts in found["operators"].items() if verdicts.keys() & {"differ", "error"}]
    yield Line(
        "C1",
        f"samples equal to eager, {len(found['operators'])} operators",
        rate,
        "%",
        goal=99.9,
        at_least=True,
        absolute=True,
        details={**samples, "floor": FLOOR, "floor_met": rate >= FLOOR, "operators_with_a_fault": faulty},
    )
    yield Line(
        "C1",
        "calls that waited though their kind was known, but for results that hang on values, second and third turns",
        100.0 * warm["asked"] / (warm["asked"] + warm["went"]),
        "%",
        goal=1.0,
        absolute=True,
        details=warm,
    )


if __name__ == "__main__":
    main("c1_opinfo", measure)
