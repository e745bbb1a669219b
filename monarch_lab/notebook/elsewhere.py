"""Magics of ipyparallel and nbdistributed, typed here, and those of ours still to come: each answers with the line that
does it.

A name that another extension has registered stays its own. Runs on: the main thread.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from monarch_lab.errors import UsageValueError


def _px(line: str) -> str:
    return f"%%spmd {line}".rstrip()


def _rank(line: str) -> str:
    return f"%%spmd[{line.strip().strip('[]') or '0'}]"


def _init(line: str) -> str:
    words = line.replace("=", " ").split()
    numbers = [b for a, b in zip(words, words[1:], strict=False) if a in ("-n", "--num-processes", "--nproc")]
    return f"%mesh start --per-host {numbers[0]}" if numbers else "%mesh start"


# name -> (kinds, the line to type here)
_TABLE: dict[str, tuple[tuple[str, ...], Callable[[str], str]]] = {
    "px": (("line", "cell"), _px),
    "autopx": (("line",), lambda line: "%%spmd as the first line of each cell"),
    "distributed": (("cell",), lambda line: "%%spmd"),
    "rank": (("cell",), _rank),
    "dist_init": (("line",), _init),
    "dist_status": (("line",), lambda line: "%mesh status"),
    "dist_shutdown": (("line",), lambda line: "%mesh stop"),
}


# Sub-commands of %mesh that are not there yet, and what does it until then.
NOT_YET = {
    "attach": "a mesh ends with the notebook that has started it; %mesh start starts one here",
    "checkpoint": "torch.save in a %%spmd cell writes a rank's values, ml.fetch_shard brings them to the notebook",
    "heal": "%mesh restart --ranks R gives ranks that are dead or stuck other processes",
    "trace": "ml.timer takes times on the workers, %mesh stacks shows what they do now",
}


@contextlib.contextmanager
def advising(shell: Any) -> Iterator[None]:
    """Where such a name is free."""
    tables = shell.magics_manager.magics
    ours: list[tuple[str, str, Any]] = []
    for name, (kinds, make) in _TABLE.items():
        for kind in kinds:
            if name not in tables[kind]:
                magic = _advice(f"{'%%' if kind == 'cell' else '%'}{name}", make)
                tables[kind][name] = magic
                ours.append((kind, name, magic))
    try:
        yield
    finally:
        for kind, name, magic in ours:
            if tables[kind].get(name) is magic:
                del tables[kind][name]


def _advice(typed: str, make: Callable[[str], str]) -> Callable[..., None]:
    def advise(line: str, cell: str | None = None) -> None:
        raise UsageValueError(f"{typed} is no magic of monarch_lab: write {make(line)} here")

    return advise
