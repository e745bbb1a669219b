"""F4 and F5 in numbers, in a real kernel with two workers, as a front end sees it.

F4: one rank raises while the other waits for it in a collective: until the cell has ended. F5: a Ctrl-C in Python code,
in a sleep, in torch's operations, in a collective, in a child process: until the prompt is back. After each the mesh
must work.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

from tests.bench._notebook import ours
from tests.bench._report import Line, main, median
from tests.kernel import Kernel

STUCK = {
    "Python code": "while True: pass",
    "a sleep": "import time\ntime.sleep(600)",
    "torch's operations": "a = torch.rand(400, 400)\nwhile True: a @ a",
    "a collective": "if rank == 0: dist.barrier()\nelse:\n    while True: pass",
    "a child process": "import subprocess\nsubprocess.run(['sleep', '600'])",
}


def check(kernel: Kernel) -> None:
    body = "s = torch.ones(2)\ndist.all_reduce(s)\nassert s[0] == 2 and kept == rank"
    assert kernel.run(f"%%spmd -q\n{body}") == "ok", kernel.errors()


def raising(kernel: Kernel) -> float:
    began = time.perf_counter()
    assert kernel.run("%%spmd -q\nif rank == 1: raise ValueError\ndist.all_reduce(torch.ones(2))") == "error"
    took = time.perf_counter() - began
    check(kernel)
    return took


def interrupted(kernel: Kernel, body: str) -> float:
    at: list[float] = []

    def press() -> None:
        if not at and "waiting" in kernel.text():
            at.append(time.perf_counter())
            kernel.interrupt()

    assert kernel.run(f"%%spmd -q\nprint('waiting', flush=True)\n{body}", during=press) == "error"
    took = time.perf_counter() - at[0]
    check(kernel)
    return took


def measure(quick: bool) -> Iterator[Line]:
    turns = 2 if quick else 20
    with ours() as kernel:
        assert kernel.run("%%spmd -q\nkept = rank") == "ok", kernel.errors()
        errors = [raising(kernel) for _ in range(turns)]
        presses = {where: [interrupted(kernel, body) for _ in range(turns)] for where, body in STUCK.items()}
    yield _line("F4", "one rank raises beside a collective, until the cell has ended, the worst", errors, 3)
    for where, found in presses.items():
        yield _line("F5", f"Ctrl-C in {where}, until the prompt is back, the worst", found, 5)


def _line(claim: str, what: str, found: list[float], goal: float) -> Line:
    details = {"median_s": median(found), "turns": len(found)}
    return Line(claim, what, max(found), "s", goal=goal, absolute=True, details=details)


if __name__ == "__main__":
    main("f4_interrupts", measure)
