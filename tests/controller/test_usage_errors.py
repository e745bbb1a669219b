"""Calls that cannot be carried out: refused at the user's own line, with what to do instead; nothing is half-done."""

from __future__ import annotations

import copy
import inspect
import pickle
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import monarch_lab as ml
from tests.controller.compare import is_mesh


def local(*shape: int) -> torch.Tensor:
    with ml.no_mesh.activate():
        return torch.ones(*shape)


_MIXES: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "operator": lambda x, y: x + y,
    "reflected": lambda x, y: y + x,
    "function": lambda x, y: torch.matmul(x, y),
    "in place": lambda x, y: x.add_(y),
    "local in place": lambda x, y: y.add_(x),
    "list": lambda x, y: torch.cat([x, y]),
    "keyword": lambda x, y: torch.add(input=x, other=y),
    "index": lambda x, y: x[y.long()],
    "local index": lambda x, y: y[x.long()],
    "setitem": lambda x, y: x.__setitem__(0, y[0]),
    "out": lambda x, y: torch.add(x, x, out=y),
    "module": lambda x, y: nn.functional.linear(x, y),
    "where": lambda x, y: torch.where(x > 0, x, y),
    "array": lambda x, y: x + y.numpy(),
    "comparison": lambda x, y: x == y,
    "data": lambda x, y: setattr(x, "data", y),
    "foreach": lambda x, y: torch._foreach_add([x], [y]),
}


@pytest.mark.parametrize("name", list(_MIXES))
@pytest.mark.parametrize("active", [True, False])
def test_a_local_tensor_beside_a_mesh_tensor_is_refused_with_what_to_do(mesh: Any, name: str, active: bool) -> None:
    with mesh.activate():
        x = torch.ones(2, 2)
    y = local(2, 2)
    with mesh.activate() if active else ml.no_mesh.activate():
        for _ in range(2):
            with pytest.raises(TypeError, match="LOCAL_TENSOR.*mesh.replicate"):
                _MIXES[name](x, y)
    assert ml.inspect(x).tolist() == [[1, 1], [1, 1]] and y.tolist() == [[1, 1], [1, 1]]


def test_tensors_of_two_meshes_are_refused(mesh: Any) -> None:
    part = mesh.slice(gpu=0)
    x, y = mesh.replicate(torch.ones(2)), part.replicate(torch.ones(2))
    for _ in range(2):
        for call in (lambda: x + y, lambda: torch.cat([y, x]), lambda: x.add_(y), lambda: ml.fetch_all([x, y])):
            with pytest.raises(TypeError, match="WRONG_MESH"):
                call()


def test_a_seen_call_with_tensors_of_two_meshes_is_refused_too(mesh: Any) -> None:
    part = mesh.slice(gpu=0)
    x, y = mesh.replicate(torch.ones(2)), part.replicate(torch.ones(2))
    for _ in range(2):
        x + x  # noqa: B018
        y + y  # noqa: B018
    with pytest.raises(TypeError, match="WRONG_MESH"):
        x + y  # noqa: B018
    with pytest.raises(TypeError, match="WRONG_MESH"):
        torch.autograd.backward([(x * 2).requires_grad_().sum()], [part.replicate(torch.tensor(1.0))])


def test_a_wrong_shape_is_raised_at_the_users_own_line(cell: Any) -> None:
    x, y = torch.ones(2, 3), torch.ones(4, 5)
    line = 0
    with pytest.raises(RuntimeError, match="cannot be multiplied") as raised:
        line = inspect.currentframe().f_lineno + 1  # type: ignore[union-attr]
        x @ y  # noqa: B018
    mine = [f for f in traceback.extract_tb(raised.value.__traceback__) if f.filename == __file__]
    assert mine[-1].lineno == line
    assert isinstance(raised.value, ml.RemoteException) and raised.value.ranks == (0, 1)
    assert x.sum().item() == 6


_WRONG: dict[str, tuple[type[Exception], Callable[[], Any]]] = {
    "shape": (RuntimeError, lambda: torch.ones(2) + torch.ones(3)),
    "view": (RuntimeError, lambda: torch.ones(4).view(3)),
    "dim": (IndexError, lambda: torch.ones(2).sum(5)),
    "index": (IndexError, lambda: torch.ones(2)[7]),
    "dtype": (RuntimeError, lambda: torch.ones(2).to(torch.int64).softmax(0)),
    "argument": (TypeError, lambda: torch.ones(2).sum("rows", 3)),
    "keyword": (TypeError, lambda: torch.relu(torch.ones(2), colour="red")),
    "singular": (torch.linalg.LinAlgError, lambda: torch.linalg.inv(torch.zeros(2, 2))),
    "loss": (ValueError, lambda: nn.functional.cross_entropy(torch.ones(2, 3), torch.ones(3, dtype=torch.int64))),
    "attribute": (AttributeError, lambda: torch.ones(2).no_such_thing),
    "scalar": (RuntimeError, lambda: torch.ones(2).item()),
    "bool": (RuntimeError, lambda: bool(torch.ones(2))),
    "len": (TypeError, lambda: len(torch.ones(()))),
    "iter": (TypeError, lambda: list(torch.ones(()))),
    "unpack": (ValueError, lambda: _unpack(torch.ones(3))),
    "numpy of a leaf": (RuntimeError, lambda: torch.ones(2).requires_grad_().numpy()),
    "deepcopy of a result": (RuntimeError, lambda: copy.deepcopy(torch.ones(2).requires_grad_() * 2)),
}


def _unpack(x: Any) -> Any:
    a, b = x
    return a, b


@pytest.mark.parametrize("name", list(_WRONG))
def test_what_fails_in_plain_torch_fails_with_the_same_type(mesh: Any, name: str) -> None:
    kind, call = _WRONG[name]
    with ml.no_mesh.activate(), pytest.raises(kind):
        call()
    with mesh.activate():
        for _ in range(2):
            with pytest.raises(kind):
                call()
                mesh.sync()  # where the same call has been seen to succeed, nobody waits for it


def test_an_op_that_can_fail_on_values_is_caught_by_the_users_own_try(cell: Any) -> None:
    good, bad = torch.eye(2), torch.zeros(2, 2)
    for _ in range(2):
        torch.linalg.cholesky(good)
    caught = None
    try:
        torch.linalg.cholesky(bad - good)
        cell.sync()
    except torch.linalg.LinAlgError as e:
        caught = e
    assert isinstance(caught, ml.RemoteException)


def test_a_generator_of_the_kernel_is_refused(cell: Any) -> None:
    generator = torch.Generator()
    for call in (
        lambda: torch.rand(2, generator=generator),
        lambda: torch.ones(2).normal_(generator=generator),
        lambda: torch.randperm(4, generator=generator),
    ):
        with pytest.raises(TypeError, match="Generator.*manual_seed"):
            call()


@pytest.mark.parametrize("protocol", [2, 5])
def test_a_mesh_tensor_is_not_pickled(cell: Any, protocol: int) -> None:
    for value in (torch.ones(2), torch.nn.Parameter(torch.ones(2)), torch.tensor(1.0), {"a": torch.ones(2)}):
        with pytest.raises(TypeError, match="ml.inspect.*ml.fetch_all"):
            pickle.dumps(value, protocol)


def test_a_mesh_tensor_is_not_saved_by_torch_without_being_fetched(cell: Any, tmp_path: Any) -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(TypeError, match="ml.fetch_all|ml.inspect"):
        torch.save(model.state_dict(), tmp_path / "model.pt")
    torch.save(ml.inspect(model.state_dict()), tmp_path / "model.pt")
    with ml.no_mesh.activate():
        loaded = torch.load(tmp_path / "model.pt")
    model.load_state_dict(cell.replicate(loaded))


def test_the_memory_of_a_mesh_tensor_is_not_to_be_had(cell: Any) -> None:
    x = torch.ones(2)
    for name in ("data_ptr", "storage", "untyped_storage", "share_memory_", "pin_memory", "__dlpack__"):
        with pytest.raises(TypeError, match="ml.remote"):
            getattr(x, name)()


_LEVELS: dict[str, Callable[[Any], Any]] = {
    "vmap": lambda x: torch.func.vmap(lambda v: v * 2)(x),
    "grad": lambda x: torch.func.grad(lambda v: (v * v).sum())(x),
    "jvp": lambda x: torch.func.jvp(lambda v: v * 2, (x,), (x,)),
    "jacrev": lambda x: torch.func.jacrev(lambda v: v * 2)(x),
    "compile": lambda x: torch.compile(lambda v: v * 2 + 1, backend="eager")(x),
    "trace": lambda x: torch.jit.trace(lambda v: v * 2, (x,))(x),
}


def _scripted(v: torch.Tensor) -> torch.Tensor:
    return v * 2


_SLOW = {"compile": [pytest.mark.slow]}  # loads the compiler


@pytest.mark.parametrize("name", [pytest.param(n, marks=_SLOW.get(n, [])) for n in _LEVELS])
def test_a_level_of_torch_func_or_a_compiler_is_right_or_refused(cell: Any, name: str) -> None:
    x = torch.arange(3.0)
    with ml.no_mesh.activate():
        want = _LEVELS[name](torch.arange(3.0))
    try:
        got = _LEVELS[name](x)
    except (TypeError, RuntimeError, NotImplementedError, ml.MeshError) as e:
        assert "ml.remote" in str(e), f"refused without what to do: {e}"
        return
    got, want = (got, want) if not isinstance(got, tuple) else (got[1], want[1])
    assert is_mesh(got)
    assert got.tolist() == want.tolist()


def test_a_list_of_mesh_tensors_is_not_made_a_tensor_silently(cell: Any) -> None:
    x = torch.ones(3)
    for make in (torch.tensor, torch.as_tensor):
        try:
            got = make([x[0], 5.0])
        except (TypeError, ValueError, RuntimeError):
            continue
        assert is_mesh(got) and got.tolist() == [1, 5]


def test_an_array_of_numpy_beside_a_mesh_tensor_is_refused(cell: Any) -> None:
    x = torch.ones(2)
    with pytest.raises(TypeError, match="numpy array"):
        x * np.ones(2)
    with pytest.raises(TypeError, match="numpy array"):
        x[np.array([0, 1])]


def test_the_class_of_mesh_tensors_is_not_constructed() -> None:
    from monarch_lab.controller import MeshTensor

    with pytest.raises(TypeError, match="mesh.replicate"):
        MeshTensor([1.0])


def test_a_hook_for_saved_tensors_is_not_silently_passed_by(cell: Any) -> None:
    packed: list[Any] = []

    def pack(t: Any) -> Any:
        packed.append(t)
        return t

    w = torch.ones(2).requires_grad_()
    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            (w * w).sum().backward()
    except (TypeError, RuntimeError):
        return
    assert packed, "the hooks were neither called nor refused"
