"""P11: 100,000 lines printed by each of two ranks, in a real kernel, as a front end sees it.

Reference: the same cell of ipyparallel and nbdistributed where they are installed. Meanwhile the kernel is asked on its
control channel, and must answer; how long one plain cell of it takes for as many lines is among the details.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

from tests.bench._notebook import LIMIT_S, ours, peers, theirs
from tests.bench._report import Line, main, median
from tests.kernel import Kernel

GOAL_S = 1.5  # ipyparallel's, where it is not here to be measured
ASK_S = 0.05


def flood(kernel: Kernel, magic: str, lines: int) -> tuple[float, float]:
    """Seconds from the request until the cell's last message is here, and of the slowest answer meanwhile."""
    answers: list[float] = []
    asked = [time.perf_counter()]

    def ask() -> None:
        now = time.perf_counter()
        if now - asked[0] >= ASK_S:
            kernel.control("kernel_info_request", timeout=LIMIT_S)
            asked[0] = time.perf_counter()
            answers.append(asked[0] - now)

    began = time.perf_counter()
    status = kernel.run(f"{magic}for n in range({lines}): print('line', n)", during=ask, timeout=LIMIT_S)
    seconds = time.perf_counter() - began
    assert status == "ok", kernel.errors()
    return seconds, max(answers, default=0.0)


def whole(kernel: Kernel, lines: int) -> bool:
    """Whether the cell shows its last number, as a stream or in a display."""
    shown = kernel.text() + "".join(str(data.get("text/plain")) for data in kernel.displays(updates=True))
    return str(lines - 1) in shown


def measure(quick: bool) -> Iterator[Line]:
    lines = 20_000 if quick else 100_000
    with ours() as kernel:
        flood(kernel, "%%spmd -q\n", 1000)
        found = [flood(kernel, "%%spmd -q\n", lines) for _ in range(3)]
        shown = kernel.text()
        assert shown.startswith("[0.0-0.1] line 0\n") and whole(kernel, lines), shown[-200:]
        messages = len(kernel.mine())
        plain, _ = flood(kernel, "", lines)
    seconds = median(took for took, _ in found)
    details = {
        "slowest_answer_ms": max(slowest for _, slowest in found) * 1e3,
        "messages": messages,
        "plain_cell_s": plain,
    }
    what = f"{lines:,} lines printed by each of 2 ranks"
    yield Line("P11", what, seconds, "s", goal=GOAL_S, absolute=True, details=details)
    for peer in peers():
        with theirs(peer) as kernel:
            flood(kernel, f"{peer.magic}\n", 1000)
            took, slowest = flood(kernel, f"{peer.magic}\n", lines)
            more = {"all_of_it_was_shown": whole(kernel, lines), "slowest_answer_ms": slowest * 1e3}
        yield Line(
            "P11",
            f"{what}, times faster than {peer.name}",
            seconds,
            "s",
            goal=1,
            at_least=True,
            inverse=True,
            reference=took,
            reference_is=peer.name,
            details=more,
        )


if __name__ == "__main__":
    main("p11_output", measure)
