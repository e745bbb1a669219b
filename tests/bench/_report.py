"""What every benchmark shares: medians, the verdict on a goal, and the two lines printed for each claim.

A time is never asserted here or anywhere: a missed goal is a line, not an error.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Line:
    """One claim: ours against a reference of the same run.

    ``goal`` bounds the ratio, or ``ours`` itself where there is no reference to divide by (``absolute``).
    """

    claim: str
    what: str
    ours: float
    unit: str
    goal: float
    reference: float | None = None
    reference_is: str = ""
    at_least: bool = False
    absolute: bool = False
    inverse: bool = False  # ratio = reference / ours: how many times faster
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def ratio(self) -> float | None:
        if self.reference is None:
            return None
        return self.reference / self.ours if self.inverse else self.ours / self.reference

    @property
    def verdict(self) -> str:
        judged = self.ours if self.absolute else self.ratio
        assert judged is not None, "a goal in multiples needs a reference"
        met = judged >= self.goal if self.at_least else judged <= self.goal
        return "met" if met else "missed"

    @property
    def goal_text(self) -> str:
        unit = f" {self.unit}" if self.absolute else " x"
        return f"{'at least' if self.at_least else 'at most'} {self.goal:g}{unit}"

    def as_json(self, command: str) -> str:
        return json.dumps(
            {
                "claim": self.claim,
                "what": self.what,
                "goal": self.goal_text,
                "ours": self.ours,
                "unit": self.unit,
                "reference": self.reference,
                "reference_is": self.reference_is,
                "ratio": self.ratio,
                "verdict": self.verdict,
                "command": command,
                "details": self.details,
            }
        )

    def as_text(self, command: str) -> str:
        parts = [f"{self.claim:<4}{self.what}: {_number(self.ours)} {self.unit}"]
        if self.reference is not None:
            parts.append(f"{self.reference_is} {_number(self.reference)}")
            parts.append(f"ratio {_number(self.ratio)}")
        parts += [f"goal {self.goal_text}", self.verdict.upper() if self.verdict == "missed" else "met", command]
        return " | ".join(parts)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def median(values: Iterable[float]) -> float:
    return statistics.median(values)


def percentile(values: Sequence[float], q: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * q))]


def seconds(fn: Callable[[], object]) -> float:
    began = time.perf_counter()
    fn()
    return time.perf_counter() - began


def interleaved(turns: int, *fns: Callable[[], float]) -> list[list[float]]:
    """Each of ``fns`` once a turn: whatever else the machine does then, it does to all. Their answers, by function."""
    answers: list[list[float]] = [[] for _ in fns]
    for _ in range(turns):
        for fn, found in zip(fns, answers, strict=True):
            found.append(fn())
    return answers


def main(name: str, measure: Callable[[bool], Iterator[Line]]) -> None:
    """The command line of one benchmark: a JSON line and one to read for each claim."""
    parser = argparse.ArgumentParser(prog=f"python -m tests.bench.{name}", description=sys.modules["__main__"].__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer runs: does it work, not how fast is it")
    options = parser.parse_args()
    command = f"python -m tests.bench.{name}" + (" --quick" if options.quick else "")
    for line in measure(options.quick):
        print(line.as_json(command))
        print(line.as_text(command), flush=True)
