"""What a mesh tensor must be the same as: the plain tensor, on every process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

import monarch_lab as ml


def is_mesh(x: Any) -> bool:
    return getattr(x, "is_mesh_tensor", False)


def by_rank(tensor: Any) -> list[torch.Tensor]:
    """Each process's value."""
    ranks = len(tensor.mesh)
    values = ml.fetch_all(tensor)
    return list(values.reshape(ranks, *values.shape[len(tensor.mesh.names) :]))


def rank_values(tensor: Any) -> list[Any]:
    return [v.tolist() for v in by_rank(tensor)]


def own_number(mesh: Any) -> Any:
    """A 0-dim float that is 0 on rank 0 and 1 on rank 1."""
    return mesh.rank("gpu").float()


def assert_known_or_refused(tensor: Any) -> None:
    """A value is given without a rank only where every process holds it."""
    values = rank_values(tensor)
    if all(v == values[0] for v in values):
        return
    try:
        told = tensor.tolist()
    except TypeError:
        return
    raise AssertionError(f"the processes hold {values} and the mesh tensor says {told}")


def assert_metadata_is_true(*tensors: Any) -> None:
    """What the controller says of them is so on every process."""
    for tensor in tensors:
        for rank in range(len(tensor.mesh)):
            told = ml.call_on_shard_and_fetch(
                "monarch_lab.worker.show.metadata", [tensor], shard={"host": 0, "gpu": rank}
            ).result()
            assert told == [tensor._meta.wire]
        assert tensor.dtype == tensor._meta.dtype and tuple(tensor.shape) == tuple(tensor._meta.shape)


def assert_same(far: Any, local: Any, tolerance: float = 1e-6) -> None:
    """The pytrees are equal: mesh tensors on every process."""
    fars, locals_ = tree_leaves(far), tree_leaves(local)
    assert len(fars) == len(locals_)
    for f, x in zip(fars, locals_, strict=True):
        if not isinstance(x, torch.Tensor):
            assert not isinstance(f, torch.Tensor)
            assert f == x or abs(f - x) <= tolerance * (1 + abs(x))
            continue
        for value in by_rank(f) if is_mesh(f) else [f]:
            torch.testing.assert_close(value, x.detach(), rtol=tolerance, atol=tolerance, equal_nan=True)


def run_on_both(mesh: Any, fn: Callable[[], Any], tolerance: float = 1e-6) -> tuple[Any, Any]:
    """``fn`` in plain torch and on the mesh, from the same seed: equal results. Returns (mesh's, plain)."""
    with ml.no_mesh.activate():
        torch.manual_seed(0)
        local = fn()
    with mesh.activate():
        torch.manual_seed(0)
        far = fn()
        for f, x in zip(tree_leaves(far), tree_leaves(local), strict=True):
            assert is_mesh(f) == isinstance(x, torch.Tensor), "ran in another place than it should"
        assert_same(far, local, tolerance)
    return far, local
