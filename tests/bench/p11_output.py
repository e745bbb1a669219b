"""P11: 100,000 lines printed by each of two ranks, in a real kernel, as a front end sees it.

Reference: ipyparallel's 1.5 s for the same, measured once on another machine; it is not installed here, so no figure of
the same run is taken; how long one plain cell of the kernel takes for as many lines is among the details. Meanwhile the
kernel is asked on its control channel, and must answer.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

from tests.bench._peers import ROOT
from tests.bench._report import Line, main, median
from tests.kernel import Kernel

GOAL_S = 1.5
ASK_S = 0.05


def flood(kernel: Kernel, lines: int) -> tuple[float, float]:
    """Seconds from the request until the cell's last message is here, and of the slowest answer meanwhile."""
    answers: list[float] = []
    asked = [time.perf_counter()]

    def ask() -> None:
        now = time.perf_counter()
        if now - asked[0] >= ASK_S:
            kernel.control("kernel_info_request")
            asked[0] = time.perf_counter()
            answers.append(asked[0] - now)

    began = time.perf_counter()
    status = kernel.run(f"%%spmd -q\nfor n in range({lines}): print('line', n)", during=ask)
    seconds = time.perf_counter() - began
    assert status == "ok", kernel.errors()
    shown = kernel.text()
    assert shown.startswith("[0.0-0.1] line 0\n") and shown.rstrip().endswith(f"line {lines - 1}"), shown[-200:]
    return seconds, max(answers, default=0.0)


def measure(quick: bool) -> Iterator[Line]:
    lines = 20_000 if quick else 100_000
    with Kernel(cwd=str(ROOT)) as kernel:
        assert kernel.run("import torch\n%load_ext monarch_lab\n%mesh start --cpu") == "ok", kernel.errors()
        flood(kernel, 1000)
        found = [flood(kernel, lines) for _ in range(3)]
        messages = len(kernel.mine())
        began = time.perf_counter()
        assert kernel.run(f"for n in range({lines}): print('line', n)") == "ok"
        plain = time.perf_counter() - began
        assert kernel.run("%mesh stop") == "ok", kernel.errors()
    yield Line(
        "P11",
        f"{lines:,} lines printed by each of 2 ranks",
        median(seconds for seconds, _ in found),
        "s",
        goal=GOAL_S,
        absolute=True,
        details={
            "slowest_answer_ms": max(slowest for _, slowest in found) * 1e3,
            "messages": messages,
            "plain_cell_s": plain,
        },
    )


if __name__ == "__main__":
    main("p11_output", measure)
