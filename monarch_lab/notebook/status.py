"""How a mesh looks at rest: the card of one mesh and the list of all, as text and HTML of the same facts.

A card renders a snapshot (wire/snapshot.py) and asks nothing else. The HTML has no colours of its own but for the
states: it inherits, so that it reads in light and dark themes and in a saved notebook.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING

from monarch_lab.wire.record import age_text, labels_text
from monarch_lab.wire.snapshot import KernelSnapshot, MeshSnapshot, ProcessSnapshot

if TYPE_CHECKING:
    from monarch_lab.session.found import FoundMesh

COLUMNS = ("rank", "worker", "pid", "state", "memory", "pending", "current op")
# Middle tones: readable on white and on black.
COLOURS = {
    "starting": "#8a8a8a",
    "idle": "#2e9e5b",
    "live": "#2e9e5b",
    "busy": "#3b82d6",
    "debugging": "#b5651d",
    "lost": "#d64545",
    "exited": "#d64545",
    "dead": "#d64545",
    "closed": "#8a8a8a",
}
_QUIET = "opacity: 0.65;"
_CELL = "text-align: left; padding: 1px 12px 1px 0; background: transparent; white-space: nowrap;"
_TABLE = "margin: 4px 0 0 0; border-collapse: collapse; color: inherit; font: inherit;"

Bundle = dict[str, str]


def card(mesh: MeshSnapshot) -> Bundle:
    """The mime bundle of one mesh."""
    return {"text/plain": card_text(mesh), "text/html": card_html(mesh)}


def card_text(mesh: MeshSnapshot) -> str:
    lines = [title(mesh)]
    if mesh.note:
        lines.append(mesh.note)
    return "\n".join([*lines, *table([COLUMNS, *map(row, mesh.processes)])])


def card_html(mesh: MeshSnapshot, with_processes: bool = True) -> str:
    facts = " · ".join([_dims(mesh), escape(mesh.device), count(mesh)])
    parts = [
        f"<div><b>{escape(mesh.name)}</b> {_state(mesh.state)} <span style='{_QUIET}'>{facts}</span></div>",
        f"<div>{escape(mesh.note)}</div>" if mesh.note else "",
    ]
    if with_processes and mesh.processes:
        head = "".join(f"<th style='{_CELL} {_QUIET} font-weight: normal;'>{name}</th>" for name in COLUMNS)
        body = "".join(f"<tr style='background: transparent;'>{_html_cells(p)}</tr>" for p in mesh.processes)
        parts.append(f"<table style='{_TABLE}'><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>")
    style = f"color: inherit; border-left: 3px solid {COLOURS[mesh.state]}; padding: 2px 0 2px 10px;"
    return f"<div style='{style}'>{''.join(parts)}</div>"


def title(mesh: MeshSnapshot) -> str:
    """``mesh "a" · live · host=1 × gpu=2 · cpu · 2 workers``"""
    return " · ".join([f'mesh "{mesh.name}"', mesh.state, _dims(mesh), mesh.device, count(mesh)])


def list_text(kernel: KernelSnapshot, found: Sequence[FoundMesh] = ()) -> str:
    """One line a mesh; a star marks the one that cells run on. Those of other kernels among ``found`` come last."""
    labels = {mesh.record.name: labels_text(mesh.record.labels) for mesh in found if mesh.is_ours}
    lines = []
    for mesh in kernel.meshes:
        star = "*" if mesh.name == kernel.current else " "
        lines.append(" · ".join(filter(None, [f"{star} {title(mesh)}", labels.get(mesh.name)])))
    others = [mesh for mesh in found if not mesh.is_ours]
    if not lines:
        lines.append("No mesh of this notebook is running: type %mesh start")
    if others:
        lines += ["Of other kernels (they cannot be used here; monarch-lab stop NAME in a shell ends one):"]
        lines += [f"  {_other_title(mesh)}" for mesh in others]
    return "\n".join(lines)


def _other_title(mesh: FoundMesh) -> str:
    record = mesh.record
    workers = record.hosts * record.per_host
    facts = [
        f'mesh "{record.name}"',
        f"{mesh.state} ({mesh.note})" if mesh.note else mesh.state,
        f"host={record.hosts} × gpu={record.per_host}",
        record.device,
        f"{workers} worker{'s' if workers != 1 else ''}",
        f"kernel {record.kernel.pid}",
        age_text(mesh.age_s),
        labels_text(record.labels),
    ]
    return " · ".join(filter(None, facts))


def count(mesh: MeshSnapshot) -> str:
    number = len(mesh.processes)
    return f"{number} worker{'s' if number != 1 else ''}"


def row(process: ProcessSnapshot) -> tuple[str, ...]:
    memory = size(process.rss_bytes)
    if process.device_bytes:
        memory = f"{size(process.device_bytes)} + {memory} host"
    op = f"{process.op} ({process.op_age_s:.1f} s)" if process.op else ""
    return (
        str(process.rank),
        process.label,
        str(process.pid) if process.pid else "",
        f"{process.state}: {process.exit}" if process.exit else process.state,
        memory if process.rss_bytes or process.device_bytes else "",
        str(process.pending_ops),
        op,
    )


def size(number: float) -> str:
    """``3.2 GiB``; of bytes."""
    for unit in ("B", "KiB", "MiB"):
        if number < 1024:
            return f"{number:.0f} {unit}"
        number /= 1024
    return f"{number:.1f} GiB"


def table(rows: list[tuple[str, ...]]) -> list[str]:
    """Rows as lines of aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(f"{text:<{width}}" for text, width in zip(r, widths, strict=True)).rstrip() for r in rows]


def _dims(mesh: MeshSnapshot) -> str:
    return " × ".join(f"{name}={size}" for name, size in mesh.dims)


def _state(state: str, text: str | None = None) -> str:
    return f"<span style='color: {COLOURS[state]};'>●</span> {escape(text or state)}"


def _html_cells(process: ProcessSnapshot) -> str:
    texts = [escape(text) for text in row(process)]
    texts[3] = _state(process.state, row(process)[3])
    return "".join(f"<td style='{_CELL}'>{text}</td>" for text in texts)
