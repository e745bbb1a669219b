"""Random numbers of the workers. All processes start from one seed and draw equal numbers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from monarch_lab.controller.mesh import get_active_mesh
from monarch_lab.wire import engine as wire


def kernel_seed() -> int:
    """This process's own seed: what the workers of a new mesh start from."""
    return torch.initial_seed() % (1 << 63)


def seed_active(seed: int) -> None:
    """Seed the processes of the active mesh as torch.manual_seed does: all equally."""
    mesh = get_active_mesh()
    mesh.client.order(wire.Seed(int(seed) % (1 << 64) if seed >= 0 else int(seed)), mesh.ranks_key)


@contextmanager
def vary(*dims: str, seed: int | None = None) -> Iterator[None]:
    """Inside, processes at different places along ``dims`` (all dims where none is named) of the active mesh draw
    numbers of their own; afterwards all go on with the common ones, as if nothing had been drawn.

    ``seed``: what the places are mixed into; the kernel's torch.initial_seed() by default.
    Raises KeyError for an unknown dim, ValueError where no mesh is active.
    """
    mesh = get_active_mesh()
    chosen = dims or mesh.names
    axes = [mesh.axis(d) for d in chosen]
    client = mesh.client
    base = kernel_seed() if seed is None else int(seed) % (1 << 63)
    level = client.vary_level
    before = client.varied
    for rank in mesh.ranks_key:
        at, position = mesh.slice_.coordinates(rank), 0
        for axis in axes:
            position = position * mesh.slice_.sizes[axis] + at[axis]
        client.order(wire.Vary(level, base, position), [rank])
    client.vary_level = level + 1
    other = client.varied_mesh
    client.varied = before | sum(1 << a for a in axes) if other in (None, mesh) else (1 << 16) - 1
    client.varied_mesh = mesh
    try:
        yield
    finally:
        client.varied = before
        client.varied_mesh = other
        client.vary_level = level
        if client.state == "live":
            client.order(wire.Vary(level, 0, -1), mesh.ranks_key)
