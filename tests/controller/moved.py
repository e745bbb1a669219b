"""What the tests of moves share."""

from __future__ import annotations

from typing import Any

import monarch_lab as ml


def numbered(mesh: Any, *, grad: bool = False) -> Any:
    """Each process's global rank, as a float."""
    return mesh.process_idx().float().detach().requires_grad_(grad)


def all_of(tensor: Any) -> Any:
    return ml.fetch_all(tensor).tolist()
