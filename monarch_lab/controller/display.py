"""A mesh tensor as text and HTML: what it is, and what each process holds, equal values once. Never raises."""

from __future__ import annotations

import html
from typing import Any

from monarch_lab.controller.calling import send_call
from monarch_lab.controller.lending import behind
from monarch_lab.errors import MeshError

_TEXT = "monarch_lab.worker.show.text"
_FORMATTED = "monarch_lab.worker.show.formatted"
_MAX_SHOWN_RANKS = 8


def head(tensor: Any) -> str:
    meta, mesh = tensor._meta, tensor._ref.mesh
    size = "×".join(map(str, meta.shape)) or "scalar"
    grad = ", requires_grad" if meta.requires_grad else ""
    kind = "Parameter" if getattr(tensor, "_is_param", False) else "mesh tensor"
    return f"{kind} {size} {str(meta.dtype).removeprefix('torch.')}{grad} on {mesh.describe()}"


def values(tensor: Any) -> list[tuple[list[int], str]]:
    """(ranks, text) for each different value, lowest rank first."""
    if hasattr(tensor, "_value"):
        return [(list(tensor._ref.mesh.ranks_key), repr(tensor._value))]
    mesh = tensor._ref.mesh
    equal = not any(not (tensor._store or tensor._ref).equal >> k & 1 for k in range(len(mesh.names)))
    equal = equal and not mesh.lost_ranks
    ranks = mesh.ranks_key[:1] if equal else mesh.ranks_key[:_MAX_SHOWN_RANKS]
    there = [rank for rank in ranks if rank not in mesh.lost_ranks]
    try:
        futures = {rank: send_call(mesh, rank, _TEXT, (tensor,), for_display=True) for rank in there}
    except (MeshError, RuntimeError, ValueError, TypeError, LookupError) as e:
        return [(list(mesh.ranks_key), f"<no value: {e}>")]
    gone = [rank for rank in ranks if rank in mesh.lost_ranks]
    found: dict[str, list[int]] = {"<gone: made before it was restarted>": gone} if gone else {}
    for rank, future in futures.items():
        try:
            text = future.result()
        except Exception as e:
            text = f"<no value: {e}>"
        found.setdefault(text, []).extend(mesh.ranks_key if equal else [rank])
    return sorted(((ranks, text) for text, ranks in found.items()), key=lambda x: x[0])


def _who(tensor: Any, ranks: list[int]) -> str:
    mesh = behind(tensor._ref.mesh)
    if len(ranks) == len(mesh.ranks_key):
        return "all" if len(ranks) > 1 else mesh.client.label(ranks[0])
    return ", ".join(mesh.client.label(r) for r in ranks)


def text(tensor: Any) -> str:
    lines = [head(tensor)]
    for ranks, shown in values(tensor):
        label = f"[{_who(tensor, ranks)}] "
        lines.append(label + shown.replace("\n", "\n" + " " * len(label)))
    left = len(tensor._ref.mesh.ranks_key) - _MAX_SHOWN_RANKS
    if left > 0 and len(lines) > 2:
        lines.append(f"… and {left} more processes: ml.fetch_all(t)")
    return "\n".join(lines)


def bundle(tensor: Any) -> dict[str, str]:
    shown = values(tensor)
    title = html.escape(head(tensor))
    rows = "".join(
        f'<tr><td style="vertical-align:top;opacity:.65;text-align:left">{html.escape(_who(tensor, ranks))}</td>'
        f'<td style="text-align:left"><pre style="margin:0">{html.escape(value)}</pre></td></tr>'
        for ranks, value in shown
    )
    plain = [head(tensor)]
    for ranks, value in shown:
        label = f"[{_who(tensor, ranks)}] "
        plain.append(label + value.replace("\n", "\n" + " " * len(label)))
    return {
        "text/plain": "\n".join(plain),
        "text/html": f'<div><div style="font-weight:600">{title}</div><table>{rows}</table></div>',
    }


def formatted(tensor: Any, spec: str) -> str:
    """As ``format(t, spec)`` of each process's own tensor; differing values are listed by rank."""
    if hasattr(tensor, "_value"):
        return format(tensor._value, spec)
    mesh = tensor._ref.mesh
    equal = not any(not (tensor._store or tensor._ref).equal >> k & 1 for k in range(len(mesh.names)))
    ranks = mesh.ranks_key[:1] if equal else mesh.ranks_key
    found: dict[str, list[int]] = {}
    futures = {rank: send_call(mesh, rank, _FORMATTED, (tensor, spec)) for rank in ranks}
    for rank, future in futures.items():
        found.setdefault(future.result(), []).append(rank)
    if len(found) == 1:
        return next(iter(found))
    return "{" + ", ".join(f"{_who(tensor, ranks)}: {value}" for value, ranks in found.items()) + "}"
