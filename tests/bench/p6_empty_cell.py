"""P6: a ``%%mesh`` and a ``%%spmd`` cell that do nothing, in a real kernel, as a front end sees it.

Reference: a plain ``pass`` cell in the same kernel, in turn; and the cells of other systems where they are installed.
"""

from __future__ import annotations

from collections.abc import Iterator

from tests.bench._notebook import cell, ours, peers, theirs
from tests.bench._report import Line, interleaved, main, median

WARM_UP = 5


def measure(quick: bool) -> Iterator[Line]:
    turns = 20 if quick else 200
    with ours() as kernel:
        # A cell that is waited for may be the first to find the group: that is P4's.
        cells = [cell(kernel, code) for code in ("pass", "%%mesh\npass", "%%mesh --quiet\npass", "%%spmd\npass")]
        interleaved(WARM_UP, *cells)
        plain, mesh, quiet, spmd = (median(found) for found in interleaved(turns, *cells))
    for what, took, more in (
        ("empty %%mesh cell through jupyter_client", mesh, {"without_its_header_ms": quiet}),
        ("empty %%spmd cell on 2 workers", spmd, {}),
    ):
        yield Line(
            "P6", what, took, "ms", goal=1.3, reference=plain, reference_is="a plain cell",
            details={"cells": turns, **more},
        )  # fmt: skip
    for peer in peers():
        with theirs(peer) as kernel:
            cells = [cell(kernel, code) for code in ("pass", f"{peer.magic}\npass")]
            interleaved(WARM_UP, *cells)
            their_plain, their_cell = (median(found) for found in interleaved(max(5, turns // 4), *cells))
        yield Line(
            "P6",
            f"empty %%spmd cell, times faster than {peer.name}'s {peer.magic}",
            spmd,
            "ms",
            goal=1,
            at_least=True,
            inverse=True,
            reference=their_cell,
            reference_is=peer.name,
            details={"their_plain_cell_ms": their_plain},
        )


if __name__ == "__main__":
    main("p6_empty_cell", measure)
