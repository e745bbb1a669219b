"""A result as plain data, so that controller and worker take it apart alike."""

from __future__ import annotations

from typing import Any

import torch

from monarch_lab.tensors.opaque import OpaqueRef


def tensors_of(result: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    structure(result, found, [])
    return found


def structure(result: Any, tensors: list[torch.Tensor], values: list[Any]) -> list:
    """The result as plain data: ["t", i] a tensor, ["o", i] an OpaqueRef by its key, ["n"] None, ["s", kind, children]
    a sequence, ["d", keys, children] a dict, ["c", i, children] an instance of class i of the values, ["p", i] any
    other Python value."""
    if isinstance(result, torch.Tensor):
        tensors.append(result)
        return ["t", len(tensors) - 1]
    if isinstance(result, OpaqueRef):
        tensors.append(result.key)
        return ["o", len(tensors) - 1]
    if result is None:
        return ["n"]
    kind = type(result)
    if isinstance(result, (list, tuple)):
        if kind in (list, tuple, torch.Size):
            name = kind.__name__
        elif kind.__module__ == "torch.return_types":
            name = "torch.return_types." + kind.__name__
        else:
            name = ""
        if name and name != "Size":
            return ["s", name, [structure(x, tensors, values) for x in result]]
        if hasattr(kind, "_fields"):  # a named tuple, rebuilt from its class
            values.append(kind)
            return ["c", len(values) - 1, [structure(x, tensors, values) for x in result]]
    if kind is dict and all(type(k) is str for k in result):
        return ["d", list(result), [structure(v, tensors, values) for v in result.values()]]
    values.append(result)
    return ["p", len(values) - 1]
