"""Process groups for users' functions: torch's own ProcessGroup over the group along mesh dims.

torch.distributed looks a group's ranks up in tables of its own; a group made here is entered there, so that
``dist.broadcast(t, src=..., group=g)`` and the like translate ranks as they do for ``dist.new_group``.
"""

# ruff: noqa: SLF001  torch has no public way to make a group out of a backend that is there.

from __future__ import annotations

from typing import Any

import torch

from monarch_lab.worker.devices import Backend
from monarch_lab.worker.groups import Group, current

_made: dict[Any, Any] = {}  # backend -> ProcessGroup


def of(mesh: int, dims: tuple[str, ...]) -> Any:
    """The ProcessGroup of this rank along ``dims`` of a mesh."""
    group = current().along(mesh, tuple(dims))
    key = group.ranks if group.backend is None else group.backend
    if key not in _made:
        _made[key] = _wrap(group)
    return _made[key]


def _wrap(group: Group) -> Any:
    import torch.distributed as dist
    from torch.distributed import distributed_c10d as c10d

    store = dist.HashStore()
    backend = group.backend or dist.ProcessGroupGloo(store, 0, 1)
    gloo, nccl = (backend.gloo, backend.nccl) if isinstance(backend, Backend) else (backend, None)
    wrapped = dist.ProcessGroup(store, group.position, group.size)
    kinds = dist.ProcessGroup.BackendType
    wrapped._register_backend(torch.device("cpu"), kinds.GLOO, gloo)
    wrapped._register_backend(torch.device("cuda"), kinds.GLOO if nccl is None else kinds.NCCL, nccl or gloo)
    wrapped._set_default_backend(kinds.GLOO)
    name = f"monarch_lab_{len(_made)}"
    wrapped._set_group_name(name)
    world = c10d._world
    world.pg_map[wrapped] = ("gloo", store)
    world.pg_names[wrapped] = name
    world.pg_group_ranks[wrapped] = {rank: k for k, rank in enumerate(group.ranks)}
    world.pg_backend_config[wrapped] = "cpu:gloo,cuda:gloo" if nccl is None else "cpu:gloo,cuda:nccl"
    c10d._register_process_group(name, wrapped)
    return wrapped
