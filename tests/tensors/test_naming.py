"""Every function of torch has a name that leads back to it."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch

from monarch_lab.errors import ProtocolError
from monarch_lab.tensors.naming import name_of, resolve, shown


def test_every_overridable_function_of_torch_has_a_name_that_leads_back_to_it() -> None:
    lost = []
    for functions in torch.overrides.get_overridable_functions().values():
        for function in functions:
            if isinstance(getattr(function, "__self__", None), property):
                continue  # written in Python: calls what is named
            name = name_of(function)
            if name is None or resolve(name, {}) != function:
                lost.append(torch.overrides.resolve_name(function) or repr(function))
    assert lost == []


@pytest.mark.parametrize("attribute", ["grad", "data", "shape", "T", "real", "requires_grad", "dtype"])
def test_getters_and_setters_are_named(attribute: str) -> None:
    descriptor = getattr(torch.Tensor, attribute)
    name = name_of(descriptor.__get__)
    assert name is not None and name.startswith("get:") and "." not in name
    assert resolve(name, {}) == descriptor.__get__
    setter = name_of(descriptor.__set__)
    assert setter is not None and resolve(setter, {}) == descriptor.__set__


def test_operators_of_torch_ops_are_named_with_their_overload() -> None:
    assert name_of(torch.ops.aten.add.Tensor) == "op:aten::add.Tensor"
    for op in (torch.ops.aten.add.Tensor, torch.ops.aten.relu.default, torch.ops.aten.mul):
        assert resolve(name_of(op) or "", {}) is op


def test_functions_of_the_notebook_have_no_name() -> None:
    def local(x: Any) -> Any:
        return x

    made = types.FunctionType(local.__code__, {"__name__": "__main__"})
    made.__module__ = "__main__"
    for function in (local, lambda x: x, made, functools_partial()):
        assert name_of(function) is None
    assert shown(local) == "local" and shown(torch.add) == "torch.add"


def functools_partial() -> Any:
    import functools

    return functools.partial(torch.add, 1)


@pytest.mark.parametrize(
    "name",
    ["torch.no_such", "no_module.f", "get:no_such", "op:aten::no_such.Tensor", "payload:9", "weird:x", "payload:x"],
)
def test_a_name_that_leads_nowhere_is_a_protocol_error(name: str) -> None:
    with pytest.raises(ProtocolError, match="names no function"):
        resolve(name, {})


def test_a_payload_is_found_by_its_number() -> None:
    assert resolve("payload:3", {3: print}) is print
