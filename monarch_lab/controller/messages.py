"""The sentences of usage errors about ops: what was wrong, in which call, and what to do."""

from __future__ import annotations

from typing import Any

import torch

from monarch_lab.errors import UsageError, UsageTypeError, UsageValueError
from monarch_lab.tensors.naming import shown


def local_value(func: Any, value: Any) -> UsageError:
    if torch.nn.parameter.is_lazy(value):
        return UsageValueError(
            f"{shown(func)} was given a parameter or buffer of a lazy module, which has no shape yet: run the module "
            "once on a batch first"
        )
    what = f"a local tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else "a numpy array"
    return UsageTypeError(
        f"LOCAL_TENSOR: {shown(func)} was given {what} beside a mesh tensor: put it on the mesh first, with "
        'mesh.shard(batch, "gpu") to cut it along a mesh dim or mesh.replicate(x) to copy it whole'
    )


def wrong_mesh(func: Any, tensors: list[Any]) -> UsageError:
    for t in tensors:
        t._ref.mesh.check_alive()
    mesh = tensors[0]._ref.mesh
    other = next(t._ref.mesh for t in tensors if t._ref.mesh is not mesh)
    if other.stream is not mesh.stream and other.on(mesh.stream) is mesh:
        return wrong_stream(func, other.stream, mesh.stream)
    how = "fetch one of them (ml.inspect) and mesh.replicate it on the other"
    if other.client is mesh.client:
        how = "move one of them with t.to_mesh(other.mesh), or take its part with t.slice_mesh(host=0)"
    return UsageTypeError(
        f"WRONG_MESH: {shown(func)} was given tensors of two meshes, {mesh} and {other}: an op runs on one mesh; {how}"
    )


def wrong_stream(func: Any, found: Any, wanted: Any) -> UsageError:
    found, wanted = found or "the default stream", wanted or "the default stream"
    what = func if isinstance(func, str) else shown(func)
    return UsageTypeError(
        f"WRONG_STREAM: {what} on {wanted} was given a tensor of {found}: lend it with "
        "`t, loan = stream.borrow(t)`, or activate the stream it is on"
    )


def no_mesh(func: Any) -> UsageError:
    return UsageError(f"{shown(func)} needs a mesh and none is active: use a %%mesh cell or `with mesh.activate():`")


def generator(func: Any) -> UsageError:
    return UsageTypeError(
        f"{shown(func)} was given a torch.Generator of this process, which the workers do not have: "
        "seed them with torch.manual_seed(n) in a %%mesh cell"
    )


def needs_remote(what: str, kind: type[UsageError] = UsageTypeError) -> UsageError:
    return kind(
        f"{what} does not work on mesh tensors from the notebook: write it in a function and call it with ml.remote(fn)"
    )


def not_one_value(what: str, mesh: Any, dims: list[str]) -> UsageError:
    names = " and ".join(f'"{d}"' for d in dims)
    dim = dims[0] if dims else "gpu"
    return UsageTypeError(
        f"{what} needs one value, and the processes of mesh dim {names} may hold different ones: choose one with "
        f"ml.inspect(t, {dim}=0), see all with ml.fetch_all(t), or make them equal with "
        f't.reduce("{dim}", "sum")'
    )


def differ_by_rank(func: Any, texts: dict[int, str]) -> UsageError:
    listed = "; ".join(f"rank {r}: {t}" for r, t in sorted(texts.items()))
    if len(set(texts.values())) == 1:
        same = next(iter(texts.values()))
        listed = f"{same} everywhere, but other strides, or other tensors that share memory or were written"
    return UsageValueError(
        f"{shown(func)} gave different results on the ranks ({listed}), and a mesh tensor has one shape and dtype "
        "everywhere: pad or reduce it inside a function called with ml.remote, or look at them with ml.fetch_all"
    )


def wide_state_beside_streams() -> UsageError:
    return UsageError(
        "the default dtype, deterministic algorithms, anomaly mode and switches of torch.backends are kept for the "
        "whole process, and another stream would see them: wait for the streams first, with mesh.sync(), and use them "
        "on the default stream"
    )


def stream_beside_wide_state() -> UsageError:
    return UsageError(
        "ops with a default dtype, deterministic algorithms, anomaly mode or switches of torch.backends of their own "
        "may still run on the default stream, and torch keeps these for the whole process: wait for them with "
        "mesh.sync() first"
    )
