"""``%mesh stacks``, ``memory``, ``ranks`` and ``config``: look inside, change nothing.

Runs on: the main thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from monarch_lab import config
from monarch_lab.arguments import Parser
from monarch_lab.errors import RemoteFrame
from monarch_lab.notebook.painting import Painter
from monarch_lab.notebook.status import size, table

if TYPE_CHECKING:
    from monarch_lab.controller import DeviceMesh
    from monarch_lab.wire.looking import Memory


def ranks_arguments(parser: Parser) -> None:
    parser.add_argument("name", nargs="?", metavar="NAME", help="the current mesh if not given")
    parser.add_argument("--ranks", "-r", metavar="R", help="as 3, -1, 0,2-5, ::2, gpu=0; all if not given")


def config_arguments(parser: Parser) -> None:
    parser.add_argument("--all", action="store_true", help="also those that are as monarch_lab has them")


def stacks_text(shell: Any, mesh: DeviceMesh, ranks: str | None) -> str:
    """Equal stacks once; cells called as the notebook calls them."""
    paint = Painter(shell)

    def place(frame: RemoteFrame) -> str:
        known = paint.name(frame.filename)
        return f"{' '.join(known)}, line {frame.line}" if known else f"File {frame.filename}:{frame.line}"

    return mesh.stacks(ranks).text(place=place) or "No process lives there."


def memory_text(mesh: DeviceMesh, ranks: str | None) -> str:
    found = mesh.memory(ranks)
    silent = [str(rank) for rank in mesh.chosen(ranks) if rank not in found]
    lines = table([_MEMORY, *(_memory_row(rank, told) for rank, told in sorted(found.items()))]) if found else []
    if silent:
        lines.append(f"No answer from rank {', '.join(silent)}: it has no process, is stopped, or is in C code.")
    return "\n".join(lines)


_MEMORY = ("rank", "process", "share of it", "mesh tensors", "GPU", "largest of %%spmd cells")


def _memory_row(rank: int, told: Memory) -> tuple[str, ...]:
    largest = ", ".join(f"{name} {size(number)}" for name, number in told.largest)
    tensors = f"{size(told.tensors)} in {told.tensor_count}"
    return str(rank), size(told.rss), size(told.pss), tensors, size(told.device) if told.device else "", largest


def ranks_text(mesh: DeviceMesh, ranks: str | None) -> str:
    """One line a rank: where it is and what it is doing."""
    chosen = set(mesh.chosen(ranks))
    snapshot = mesh.status()
    rows = [("rank", *(name for name, _ in snapshot.dims), "host", "pid", "device", "state")]
    for place, process in enumerate(snapshot.processes):
        if process.rank in chosen:
            at = _coordinates(place, [number for _, number in snapshot.dims])
            device = "cpu" if snapshot.device == "cpu" else f"{snapshot.device}:{process.label.rpartition('.')[2]}"
            state = f"{process.state}: {process.exit}" if process.exit else process.state
            pid = str(process.pid) if process.pid else ""
            rows.append((str(process.rank), *map(str, at), process.host, pid, device, state))
    return "\n".join(table(rows))


def _coordinates(place: int, sizes: list[int]) -> list[int]:
    found = []
    for number in reversed(sizes):
        place, at = divmod(place, number)
        found.append(at)
    return found[::-1]


def config_text(is_all: bool) -> str:
    """Settings with their values and where these come from. UsageValueError for one that is not known."""
    rows = config.described()
    shown = rows if is_all else [row for row in rows if row.source != config.DEFAULT]
    lines = table([("setting", "value", "from"), *((r.name, repr(r.value), r.source) for r in shown)]) if shown else []
    if not is_all:
        lines.append(f"{len(rows) - len(shown)} settings are as monarch_lab has them: %mesh config --all lists them.")
    return "\n".join(
        [*lines, f"Set them in {config.file_path() or 'a file of your home'} or as {config.PREFIX}* variables."]
    )
