"""Random numbers of the workers. All processes start from one seed and draw equal numbers.

Each mesh draws from a stream of its own: the whole one from torch's own from the seed, a part from another, so that
neither moves the other.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from monarch_lab.controller.activation import get_active_mesh
from monarch_lab.controller.calling import Named
from monarch_lab.controller.mode import run_on_active
from monarch_lab.controller.refs import GRAPH
from monarch_lab.errors import UsageTypeError
from monarch_lab.wire import engine as wire

_GET = Named("monarch_lab.worker.randomness.get_state", shown="ml.random.get_state")
_SET = Named("monarch_lab.worker.randomness.set_state", shown="ml.random.set_state")
_NEW = Named("monarch_lab.worker.randomness.new_state", shown="ml.random.new_state")
_CHOOSE = Named("monarch_lab.worker.randomness.choose_deterministic_kernels")
_ALL = (1 << GRAPH) - 1
_SEVERAL = object()  # in the place of the one mesh whose ranks draw their own numbers


def kernel_seed() -> int:
    """This process's own seed: what the workers of a new mesh start from."""
    return torch.initial_seed() % (1 << 63)


def seed_active(seed: int) -> None:
    """Seed the processes of the active mesh as torch.manual_seed does: all equally."""
    mesh = get_active_mesh()
    mesh.client.order(wire.Seed(int(seed) % (1 << 64) if seed >= 0 else int(seed), mesh.scope), mesh.ranks_key)
    if mesh.scope == 0 and not mesh.client.vary_level:
        mesh.client.varied, mesh.client.varied_mesh = 0, None
    else:
        _note_drawn_from(mesh, mesh.all_equal)


def manual_seed(seed: int) -> None:
    """``torch.manual_seed(seed)`` on the active mesh alone: every process draws as plain torch would from ``seed``.

    Raises ValueError where no mesh is active.
    """
    seed_active(int(seed))


def get_state() -> tuple[Any, ...]:
    """The state of the active mesh's generators, to be given to ``set_state``: a 1-d uint8 mesh tensor for the CPU, and
    on GPU workers one for the GPU. Raises ValueError where no mesh is active."""
    mesh = get_active_mesh()
    state = run_on_active(_GET)
    client = mesh.client
    if client.varied:
        varied = client.varied if client.varied_mesh is mesh else _ALL
        for part in state:
            part._ref.equal &= ~(varied | varied << GRAPH)
    return tuple(state)


def set_state(state: Any) -> None:
    """Go on from a state that ``get_state`` or ``new_state`` gave (the tuple, or the CPU's tensor alone).

    Where the processes hold different states they draw different numbers, and the results are known as such.
    Raises TypeError for a state that is no mesh tensor, ValueError where no mesh is active.
    """
    parts = (state,) if isinstance(state, torch.Tensor) else tuple(state)
    if not parts or not all(getattr(p, "is_mesh_tensor", False) for p in parts):
        raise UsageTypeError("ml.random.set_state takes what ml.random.get_state or new_state gave in a %%mesh cell")
    mesh = parts[0]._ref.mesh
    equal = mesh.all_equal
    for part in parts:
        equal &= (part._store or part._ref).equal
    token = None if get_active_mesh() is mesh else mesh.activate()
    try:
        # Before the op: a Ctrl-C in between then leaves too little known, not too much.
        if equal != mesh.all_equal:
            _note_drawn_from(mesh, equal)
        run_on_active(_SET, *parts)
        if equal == mesh.all_equal:
            _note_drawn_from(mesh, equal)
    finally:
        if token is not None:
            token.deactivate()


def new_state(seed: int | Any = 0) -> tuple[Any, ...]:
    """The state that ``torch.manual_seed(seed)`` would bring about; what is drawn now does not change.

    ``seed``: an int, or a 0-dim integer mesh tensor, ``mesh.rank("gpu")`` for one: each process then gets its own.
    Raises ValueError where no mesh is active.
    """
    get_active_mesh()
    return tuple(run_on_active(_NEW, seed))


def make_deterministic(seed: int = 0) -> None:
    """Seed this process and the active mesh, and use deterministic algorithms only, here and there, from now on.

    Ops that have none raise (``torch.use_deterministic_algorithms``). Raises ValueError where no mesh is active.
    """
    get_active_mesh()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what torch asks for, in what is started later
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(seed)
    run_on_active(_CHOOSE)


def _note_drawn_from(mesh: Any, equal: int) -> None:
    """The mesh's generators are equal along the dims of ``equal`` from now on."""
    client = mesh.client
    bits = sum(1 << k for k, n in enumerate(mesh.names) if mesh.sizes[n] > 1 and not equal >> k & 1)
    if not bits:
        if client.varied_mesh is mesh and not client.vary_level:
            client.varied, client.varied_mesh = 0, None
    elif client.varied_mesh is None or client.varied_mesh is mesh:
        client.varied, client.varied_mesh = client.varied | bits, mesh
    else:
        client.varied, client.varied_mesh = _ALL, _SEVERAL


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
    client.varied = before | sum(1 << a for a in axes) if other in (None, mesh) else _ALL
    client.varied_mesh = mesh
    try:
        yield
    finally:
        client.varied = before
        client.varied_mesh = other
        client.vary_level = level
        if client.state == "live":
            client.order(wire.Vary(level, 0, -1), mesh.ranks_key)
