"""P13: a breakpoint reached in a worker until the prompt is there, and one command there and back.

Measured where the user sits: a client of a real kernel, which answers the prompts. Reference: the kernel's own
``input()``, from an answer to the next question.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.bench._report import Line, main, median, percentile
from tests.kernel import Kernel

ROOT = str(Path(__file__).parents[2])
SETUP = """
%load_ext monarch_lab
%mesh start --cpu -n 1
import monarch_lab as ml, torch
"""
LOOP = """%%spmd -q
import time
for _ in range({count}):
    began = time.monotonic()
    breakpoint()
    ended = 1
"""


def answered(kernel: Kernel, code: str, answer: Callable[[str], str]) -> tuple[list[float], list[float]]:
    """When each question of a cell came, and when it was answered."""
    asked: list[float] = []
    told: list[float] = []
    kernel.start(code)
    while True:
        try:
            prompt = kernel.client.get_stdin_msg(timeout=1)["content"]["prompt"]
        except Exception:  # no more of them
            break
        asked.append(time.monotonic())
        line = answer(prompt)
        told.append(time.monotonic())
        kernel.client.input(line)
    kernel.wait()
    return asked, told


def measure(quick: bool) -> Iterator[Line]:
    count = 20 if quick else 200
    with Kernel(cwd=ROOT) as kernel:
        assert kernel.run(SETUP) == "ok", kernel.errors()
        assert kernel.run("%%spmd -q\n1") == "ok", kernel.errors()
        asked, told = answered(kernel, f"for _ in range({count}): input()", lambda _: "x")
        own = [1e3 * (after - before) for after, before in zip(asked[1:], told, strict=False)]

        steps = iter(["p 1"] * count + ["c"])
        asked, told = answered(kernel, LOOP.format(count=1), lambda _: next(steps))
        commands = [1e3 * (after - before) for after, before in zip(asked[1:], told, strict=False)]

        # "p began" tells when the worker reached its breakpoint; the clock is that of one machine.
        typed = iter(["p began", "c"] * count)
        asked, _ = answered(kernel, LOOP.format(count=count), lambda _: next(typed))
        began = [float(line.split("] ")[1]) for line in kernel.text().splitlines() if _is_time(line)]
        reached = [1e3 * (at - was) for at, was in zip(asked[::2], began, strict=False)]
    details = {"count": count, "input_p99_ms": percentile(own, 0.99)}
    for what, times in (("a command there and back", commands), ("breakpoint reached to prompt", reached)):
        yield Line(
            "P13",
            what,
            median(times),
            "ms",
            goal=3,
            reference=median(own),
            reference_is="input()",
            details={**details, "p99_ms": percentile(times, 0.99)},
        )


def _is_time(line: str) -> bool:
    words = line.split("] ")
    return len(words) == 2 and words[1].replace(".", "").isdecimal()


if __name__ == "__main__":
    main("p13_debugger", measure)
