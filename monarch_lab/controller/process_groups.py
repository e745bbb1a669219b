"""A process group as an argument of remote functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from monarch_lab.controller.scanning import Mark, Walk
from monarch_lab.errors import UsageError, UsageTypeError
from monarch_lab.tensors.template import Built

_GROUP = Mark("GROUP")


class RemoteProcessGroup:
    """The processes of a mesh along ``dims`` (all of them where none is named), each with those that differ from it
    only there.

    Given to a remote function it is a torch ``ProcessGroup``, for ``torch.distributed``: ranks in ``src=`` and
    ``dst=`` are the mesh's rank numbers. It is formed at its first use. Raises KeyError for an unknown dim.
    """

    def __init__(self, mesh: Any, dims: str | Sequence[str] = ()) -> None:
        chosen = (dims,) if isinstance(dims, str) else tuple(dims) or tuple(mesh.names)
        for name in chosen:
            mesh.axis(name)
        if len(set(chosen)) != len(chosen):
            raise UsageTypeError(f"a process group over {', '.join(chosen)} names a dim twice")
        self.mesh = mesh
        self.dims = chosen
        self._dropped = False

    def __repr__(self) -> str:
        return f"<process group over {', '.join(self.dims)} of {self.mesh}>"

    def size(self) -> int:
        """Number of processes in each of its groups."""
        return self.mesh.size(self.dims)

    def drop(self) -> None:
        """It cannot be given to functions any more."""
        self._dropped = True

    def for_workers(self, walk: Walk) -> Built:
        if self._dropped:
            raise UsageError(f"DROPPED: {self} was dropped: make another with mesh.process_group")
        number = self.mesh.defined()
        walk.key.append((_GROUP, number, self.dims))
        self.mesh.client.ties.meet(self.mesh.ranks_key)  # what one rank gets hangs on what others did
        return Built("monarch_lab.worker.process_groups.of", (number, self.dims))

    def __reduce__(self) -> Any:
        raise UsageTypeError("a process group is no value: give it to the remote function as an argument of its own")
