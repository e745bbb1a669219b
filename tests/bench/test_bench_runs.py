"""The benchmarks run and say what they should; how fast anything is, no test asks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.bench._report import Line

ROOT = Path(__file__).parents[2]


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.bench", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110)


@pytest.mark.slow
def test_a_benchmark_prints_a_json_line_and_one_to_read_for_each_claim(tmp_path: Path) -> None:
    done = bench("p1_small_ops", "--quick", "--json", str(tmp_path))
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    found = [json.loads(line) for line in lines if line.startswith("{")]
    assert found and len(lines) == 2 * len(found)
    for line in found:
        assert line["claim"] == "P1"
        assert line["verdict"] in ("met", "missed")
        assert line["ours"] > 0
        assert line["command"] == "python -m tests.bench.p1_small_ops --quick"
    assert json.loads((tmp_path / "p1_small_ops.json").read_text()) == found


def test_an_unknown_claim_is_refused_with_those_there_are() -> None:
    done = bench("p99")
    assert done.returncode != 0
    assert "p1_small_ops" in done.stderr


@pytest.mark.parametrize(
    ("goal", "verdict"),
    [
        (dict(ours=5.0, reference=2.0, goal=2.5), "met"),
        (dict(ours=5.1, reference=2.0, goal=2.5), "missed"),
        (dict(ours=2.0, reference=8.0, goal=4, at_least=True, inverse=True), "met"),
        (dict(ours=2.0, reference=7.9, goal=4, at_least=True, inverse=True), "missed"),
        (dict(ours=99.9, goal=99.9, at_least=True, absolute=True), "met"),
        (dict(ours=46.0, goal=45, absolute=True), "missed"),
    ],
)
def test_a_verdict_follows_from_the_goal(goal: dict[str, object], verdict: str) -> None:
    assert Line("P0", "a claim", unit="ms", **goal).verdict == verdict  # type: ignore[arg-type]
