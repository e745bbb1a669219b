"""P6: a ``%%mesh`` cell that does nothing, in a real kernel, as a front end sees it.

Reference: a plain ``pass`` cell in the same kernel, in turn.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

from tests.bench._peers import ROOT
from tests.bench._report import Line, interleaved, main, median
from tests.kernel import Kernel

LIMIT_S = 60


def cell_ms(kernel: Kernel, code: str) -> float:
    """From the request until its reply and the kernel's "idle" are here."""
    client = kernel.client
    began = time.perf_counter()
    asked = client.execute(code)
    while True:
        reply = client.get_shell_msg(timeout=LIMIT_S)
        if reply["parent_header"].get("msg_id") == asked:
            break
    assert reply["content"]["status"] == "ok", reply["content"]
    while True:
        message = client.get_iopub_msg(timeout=LIMIT_S)
        if message["parent_header"].get("msg_id") == asked and message["content"].get("execution_state") == "idle":
            return (time.perf_counter() - began) * 1e3


def measure(quick: bool) -> Iterator[Line]:
    turns = 20 if quick else 200
    with Kernel(cwd=str(ROOT)) as kernel:
        assert kernel.run("import torch\n%load_ext monarch_lab\n%mesh start --cpu") == "ok", kernel.errors()

        def plain() -> float:
            return cell_ms(kernel, "pass")

        def ours() -> float:
            return cell_ms(kernel, "%%mesh\npass")

        def quiet() -> float:
            return cell_ms(kernel, "%%mesh --quiet\npass")

        interleaved(5, plain, ours, quiet)
        plains, cells, quiets = interleaved(turns, plain, ours, quiet)
        assert kernel.run("%mesh stop") == "ok", kernel.errors()
    yield Line(
        "P6",
        "empty %%mesh cell through jupyter_client",
        median(cells),
        "ms",
        goal=1.3,
        reference=median(plains),
        reference_is="a plain cell",
        details={"cells": turns, "without_its_header_ms": median(quiets)},
    )


if __name__ == "__main__":
    main("p6_empty_cell", measure)
