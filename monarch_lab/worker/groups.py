"""Process groups along mesh dims, formed at first use, at the same place of the op stream on every member.

gloo (and NCCL, devices.py) over the loopback interface, with a rendezvous file in the mesh's own directory: no store
listens anywhere.
"""

from __future__ import annotations

import datetime
import itertools
import math
import os
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from monarch_lab.errors import InternalError
from monarch_lab.wire.engine import MeshDef
from monarch_lab.worker.devices import Backend, are_apart
from monarch_lab.worker.failures import severed_when_it_fails

# In fact none: a rank waits for one that stands in a debugger, and gloo's clock does not stop meanwhile. Who waits in
# vain is told by the kernel (controller/watch.py, stalls.py), whose clocks do, and freed by an interrupt.
_TIMEOUT = datetime.timedelta(days=30)


@dataclass(frozen=True, slots=True)
class Group:
    """The ranks that differ from this one only along the group's dims. ``backend`` is None where it is alone."""

    ranks: tuple[int, ...]
    position: int
    backend: Any

    @property
    def size(self) -> int:
        return len(self.ranks)


def members(mesh: MeshDef, dims: tuple[str, ...], rank: int) -> tuple[tuple[int, ...], int]:
    """(ranks along ``dims`` through ``rank``, in row-major order of ``dims`` as given; this rank's position)."""
    strides = [math.prod(mesh.sizes[k + 1 :]) for k in range(len(mesh.sizes))]
    here = mesh.ranks.index(rank)
    axes = [mesh.names.index(d) for d in dims]
    base = here - sum((here // strides[a] % mesh.sizes[a]) * strides[a] for a in axes)
    places = [
        base + sum(c * strides[a] for c, a in zip(at, axes, strict=True))
        for at in itertools.product(*(range(mesh.sizes[a]) for a in axes))
    ]
    return tuple(mesh.ranks[p] for p in places), places.index(here)


class Groups:
    """``stream``: a stream has groups of its own, or two would mix what they send."""

    def __init__(self, rank: int, directory: str, meshes: dict[int, MeshDef], gpus: int = 0, stream: int = 0) -> None:
        self._rank = rank
        self._gpus = gpus
        self._directory = directory
        self.meshes = meshes
        self._stream = f"stream{stream}-" if stream else ""
        self._groups: dict[tuple[int, tuple[str, ...]], Group] = {}
        self._backends: dict[tuple[int, ...], Any] = {}
        self._number = 0

    def rejoin(self, number: int, ranks: Iterable[int]) -> None:
        """Other processes have taken these ranks: groups with them are formed anew at their next use.

        ``number`` is the same on every rank, and new: a rendezvous file serves one group, once.
        """
        gone = set(ranks)
        self._number = number
        self._groups = {key: g for key, g in self._groups.items() if gone.isdisjoint(g.ranks)}
        self._backends = {members: b for members, b in self._backends.items() if gone.isdisjoint(members)}

    def along(self, mesh: int, dims: tuple[str, ...]) -> Group:
        found = self._groups.get((mesh, dims))
        if found is None:
            ranks, position = members(self.meshes[mesh], dims, self._rank)
            found = Group(ranks, position, self._backend(ranks, position))
            self._groups[mesh, dims] = found
        return found

    def among(self, ranks: Iterable[int]) -> Group:
        """The group of these ranks, in the order of their numbers; this one is one of them."""
        members = tuple(sorted(set(ranks)))
        position = members.index(self._rank)
        return Group(members, position, self._backend(members, position))

    def place(self, mesh: int) -> tuple[dict[str, int], dict[str, int]]:
        """(this rank's coordinate along each dim of a mesh, the dims' sizes)."""
        known = self.meshes[mesh]
        at = {name: members(known, (name,), self._rank)[1] for name in known.names}
        return at, dict(zip(known.names, known.sizes, strict=True))

    def _backend(self, ranks: tuple[int, ...], position: int) -> Any:
        if len(ranks) == 1:
            return None
        if ranks not in self._backends:
            import torch.distributed as dist

            # torch's own sockets, and NCCL's, have no encryption: they never leave the host.
            os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = "lo"
            path = os.path.join(self._directory, f"group{self._stream}{self._number}-" + "-".join(map(str, ranks)))
            file = dist.FileStore(path, len(ranks))
            with severed_when_it_fails():
                gloo = dist.ProcessGroupGloo(dist.PrefixStore("gloo", file), position, len(ranks), _TIMEOUT)
            if not self._gpus:
                self._backends[ranks] = gloo
                return gloo

            def make_nccl() -> Any:
                with severed_when_it_fails():
                    return dist.ProcessGroupNCCL(dist.PrefixStore("nccl", file), position, len(ranks), _TIMEOUT)

            self._backends[ranks] = Backend(gloo, make_nccl if are_apart(ranks, self._gpus) else None)
        return self._backends[ranks]


_current: Groups | None = None
_of_thread = threading.local()


def install(groups: Groups) -> None:
    global _current
    _current = groups


def use_on_this_thread(groups: Groups) -> None:
    _of_thread.groups = groups


def current() -> Groups:
    own: Groups | None = getattr(_of_thread, "groups", None)
    if own is not None:
        return own
    if _current is None:
        raise InternalError("a collective outside a worker")
    return _current
