"""A mesh as a text table: which process is where."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping

from monarch_lab.wire.shape import Slice


def table(slice_: Slice, sizes: Mapping[str, int], label: Callable[[int], str]) -> str:
    """Rows by all dims but the last, columns by the last; a cell is ``host.gpu[rank]``."""
    names = list(sizes)
    *above, columns = [range(s) for s in slice_.sizes] or [range(1)]
    head = [""] + [f"{names[-1]} {c}" for c in columns] if names else []
    rows = [head] if head else []
    for at in itertools.product(*above):
        title = " ".join(f"{name} {c}" for name, c in zip(names, at, strict=False))
        ranks = [slice_.rank((*at, c)) for c in columns] if names else [slice_.offset]
        cells = [f"{label(rank)}[{rank}]" for rank in ranks]
        rows.append([title, *cells] if names else cells)
    if rows and all(not row[0] for row in rows) and names:
        rows = [row[1:] for row in rows]  # one dim alone has no titles
    widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows)
