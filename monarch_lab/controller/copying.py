"""copy.deepcopy of mesh tensors: Parameters stay Parameters, and tensors that shared storage share it again."""

from __future__ import annotations

from typing import Any

import torch

from monarch_lab.controller.calling import Named
from monarch_lab.controller.dispatch import dispatch

_STORAGE_COPY = Named("monarch_lab.worker.show.storage_copy", shown="deepcopy")
_VIEW_LIKE = Named("monarch_lab.worker.show.view_like", shown="deepcopy")
_COPIED = Named("monarch_lab.worker.show.copied", shown="deepcopy")


def deepcopy(tensor: Any, memo: dict[int, Any]) -> Any:
    if id(tensor) in memo:
        return memo[id(tensor)]
    if hasattr(tensor, "_value"):
        from monarch_lab.controller import constants

        copy = constants.make(tensor._value.clone(), tensor._ref.mesh)
        memo[id(tensor)] = copy
        return copy
    if tensor._meta.requires_grad and not tensor._meta.is_leaf:
        raise RuntimeError(
            "Only Tensors created explicitly by the user (graph leaves) support the deepcopy protocol at the moment."
        )
    with torch.no_grad():
        if tensor._meta.layout is not torch.strided or tensor.is_quantized:
            copy = dispatch(_COPIED, (tensor,))
        else:
            store = tensor._store or tensor._ref
            shared = ("monarch_lab storage", id(store))
            if shared not in memo:  # type: ignore[comparison-overlap]
                memo[shared] = dispatch(_STORAGE_COPY, (tensor,))  # type: ignore[index]
            copy = dispatch(_VIEW_LIKE, (memo[shared], tensor))  # type: ignore[index]
    if isinstance(tensor, torch.nn.Parameter):
        copy._is_param = True
    memo[id(tensor)] = copy
    if tensor._grad is not None:
        copy.grad = deepcopy(tensor._grad, memo)
    return copy
