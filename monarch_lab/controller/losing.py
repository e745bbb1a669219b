"""What the notebook's variables lose with the processes of some ranks, by name. Any thread."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from monarch_lab.controller.lending import behind
from monarch_lab.controller.spmd import worker_names

_SHOWN = 8
_SHELLS = {"In", "Out"}
_LONG = 10_000  # of a list: it is data, and looking through it would take time


def told(client: Any, ranks: Sequence[int]) -> str:
    """As in "gone there: x, model (of the notebook), step (of %%spmd cells); the other ranks keep their values"."""
    gone = frozenset(ranks)
    names = vars(sys.modules["__main__"]).copy()
    shown = {name: value for name, value in names.items() if name not in _SHELLS and not name.startswith("_")}
    ours = [name for name, value in shown.items() if _hangs_on(client, gone, value)]
    kinds = [(ours, "of the notebook"), (sorted(worker_names(client)), "of %%spmd cells")]
    parts = [f"{_few(found)} ({whose})" for found, whose in kinds if found]
    kept = "the other ranks keep their values" if len(gone) < client.world else "nothing is kept"
    return f"gone there: {', '.join(parts) or 'no variable'}; {kept}"


def _hangs_on(client: Any, gone: frozenset[int], value: Any) -> bool:
    for tensor in _tensors(value):
        if getattr(type(tensor), "is_mesh_tensor", False) and not hasattr(tensor, "_value"):  # that is kept here
            mesh = behind(tensor._ref.mesh)
            if mesh.client is client and gone.intersection(mesh.ranks_key) - mesh.lost_ranks:
                return True
    return False


def _tensors(value: Any) -> Iterator[Any]:
    if isinstance(value, torch.nn.Module):
        yield from value.parameters()
        yield from value.buffers()
    elif isinstance(value, list | tuple | dict) and len(value) < _LONG:
        yield from torch.utils._pytree.tree_leaves(value)
    else:
        yield value


def _few(names: list[str]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
