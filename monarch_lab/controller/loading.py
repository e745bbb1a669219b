"""``load_state_dict`` of local values, as torch.load gives them: put where the module or optimizer is (rule 19).

Only for what is on a mesh; anything else is loaded as always.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from typing import Any

import torch
from torch.utils._pytree import tree_map

from monarch_lab.controller import constants, placing


def _is_mesh(value: Any) -> bool:
    return getattr(value, "is_mesh_tensor", False)


def _is_local(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not _is_mesh(value)


def install() -> None:
    module, optimizer = torch.nn.Module.load_state_dict, torch.optim.Optimizer.load_state_dict

    @functools.wraps(module)
    def load_module(self: Any, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        return module(self, _module_state(self, state_dict), *args, **kwargs)

    @functools.wraps(optimizer)
    def load_optimizer(self: Any, state_dict: Any) -> Any:
        return optimizer(self, _optimizer_state(self, state_dict))

    torch.nn.Module.load_state_dict = load_module
    torch.optim.Optimizer.load_state_dict = load_optimizer


def _module_state(module: Any, state: Any) -> Any:
    own = dict(module.named_parameters(remove_duplicate=False)) | dict(module.named_buffers(remove_duplicate=False))
    meshes = {name: t._ref.mesh for name, t in own.items() if _is_mesh(t)}
    if not meshes or not isinstance(state, dict):
        return state
    found = OrderedDict(
        (name, placing.replicate(meshes[name], v) if name in meshes and _is_local(v) else v)
        for name, v in state.items()
    )
    if hasattr(state, "_metadata"):  # versions of the modules, which torch puts beside the entries
        found._metadata = state._metadata  # type: ignore[attr-defined]  # noqa: SLF001
    return found


def _optimizer_state(optimizer: Any, state: Any) -> Any:
    """Step counters and the like (0-dim) stay known here, as those that the optimizer makes itself."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if not any(_is_mesh(p) for p in parameters):
        return state
    numbers = [n for group in state["param_groups"] for n in group["params"]]
    meshes = {n: p._ref.mesh for n, p in zip(numbers, parameters, strict=False) if _is_mesh(p)}

    def placed(mesh: Any, value: Any) -> Any:
        if not _is_local(value):
            return value
        return constants.make(value.clone(), mesh) if value.dim() == 0 else placing.replicate(mesh, value)

    found = {
        n: tree_map(functools.partial(placed, meshes[n]), kept) if n in meshes else kept
        for n, kept in state["state"].items()
    }
    return {**state, "state": found}
