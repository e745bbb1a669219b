"""User functions on the workers."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import monarch_lab as ml
from tests.controller.compare import assert_metadata_is_true, is_mesh, own_number, rank_values

_SCALE = 2


def test_a_function_runs_on_every_process_on_real_tensors(cell: Any) -> None:
    @ml.remote
    def shown(x: Any) -> Any:
        assert type(x) is torch.Tensor
        return x + x.sum().item()

    for _ in range(3):
        assert rank_values(shown(torch.ones(2) + own_number(cell))) == [[3, 3], [6, 6]]


def test_results_come_in_the_form_the_function_gave(cell: Any) -> None:
    @ml.remote
    def many(x: Any) -> Any:
        return {"a": [x, x + 1], "b": (None, x * 2), "n": 3, "s": "text", "none": None}

    for _ in range(2):
        x = torch.ones(2)
        out = many(x)
        assert out["a"][0] is x and out["a"][1].reduce("gpu", "avg").tolist() == [2, 2]
        assert out["b"][0] is None and out["n"] == 3 and out["s"] == "text" and out["none"] is None
    nothing = ml.remote(lambda x: None)
    for _ in range(2):
        assert nothing(x) is None


def test_python_values_are_those_of_each_call(cell: Any) -> None:
    @ml.remote
    def count(x: Any) -> int:
        return int(x.sum().item())

    for k in range(4):
        assert count(torch.full((2,), k)) == 2 * k


def test_python_values_that_differ_by_rank_are_an_error_that_lists_them(cell: Any) -> None:
    @ml.remote
    def mine(r: Any) -> int:
        return r.item() + 40

    with pytest.raises(ValueError, match="rank 0: 40.*rank 1: 41"):
        mine(cell.rank("gpu"))


class _Pair(NamedTuple):
    first: Any
    second: Any


def test_a_named_tuple_of_tensors_holds_mesh_tensors(cell: Any) -> None:
    pair = ml.remote(lambda x: _Pair(x + 1, x + 2))
    for _ in range(2):
        out = pair(torch.zeros(2))
        assert is_mesh(out[0]) and is_mesh(out[1])
        assert isinstance(out, tuple)


def test_a_redefined_function_is_used_afresh(cell: Any) -> None:
    x = torch.ones(2)
    for k in (1, 2, 3):
        source = f"def f(x):\n    return x + {k}"
        space: dict[str, Any] = {}
        exec(source, space)
        assert rank_values(ml.remote(space["f"])(x)) == [[1 + k] * 2] * 2


def test_changed_closures_and_globals_are_seen(cell: Any) -> None:
    global _SCALE
    scale = 10

    def scaled(x: Any) -> Any:
        return x * scale * _SCALE

    far = ml.remote(scaled)
    x = torch.ones(1)
    _SCALE = 2
    for _ in range(2):
        assert rank_values(far(x)) == [[20], [20]]
    scale = 100
    assert rank_values(far(x)) == [[200], [200]]
    _SCALE = 3
    assert rank_values(far(x)) == [[300], [300]]


def test_a_mesh_tensor_captured_by_value_is_refused(cell: Any) -> None:
    x = torch.ones(1)
    with pytest.raises(TypeError, match="pass it as an argument"):
        ml.remote(lambda y: y + x)(torch.ones(1))


def test_a_function_is_found_by_its_path(cell: Any) -> None:
    assert rank_values(ml.remote("torch.nn.functional.relu")(-torch.ones(1))) == [[0], [0]]
    with pytest.raises(TypeError, match="dotted path"):
        ml.remote("relu")
    with pytest.raises(TypeError, match="function"):
        ml.remote(3)  # type: ignore[arg-type]
    with pytest.raises(ml.MeshError, match="no_such"):
        ml.remote("torch.no_such_function")(torch.ones(1))
    assert rank_values(torch.ones(1)) == [[1], [1]], "the mesh goes on"


def test_a_function_without_tensors_needs_an_active_mesh(mesh: Any) -> None:
    made = ml.remote(lambda n: torch.zeros(n))
    with pytest.raises(ml.UsageError, match="mesh"):
        made(3)
    with mesh.activate():
        assert made(3).shape == (3,) and made(4).shape == (4,)
        assert_metadata_is_true(made(3))


def test_keyword_arguments_and_nested_tensors_arrive(cell: Any) -> None:
    @ml.remote
    def combine(a: Any, *rest: Any, parts: Any, scale: float = 1.0) -> Any:
        return (a + sum(rest) + sum(p["x"] for p in parts)) * scale

    one = torch.ones(1)
    for scale in (2.0, 3.5):
        out = combine(one, one, one, parts=[{"x": one}, {"x": one * 2}], scale=scale)
        assert rank_values(out) == [[6 * scale]] * 2


def test_a_module_or_another_object_is_an_argument_by_value(cell: Any) -> None:
    with ml.no_mesh.activate():
        layer = nn.Linear(2, 1)
        nn.init.ones_(layer.weight)
        nn.init.zeros_(layer.bias)
    apply = ml.remote(lambda m, x: m(x).detach())
    for k in (1.0, 3.0):
        with torch.no_grad(), ml.no_mesh.activate():
            layer.weight.fill_(k)
        assert rank_values(apply(layer, torch.ones(1, 2))) == [[[2 * k]]] * 2


def test_gradients_flow_through_a_remote_function(cell: Any) -> None:
    @ml.remote
    def cube(x: Any) -> Any:
        return x**3

    for _ in range(3):
        w = torch.full((2,), 2.0).requires_grad_()
        (cube(w) * 2).sum().backward()
        assert rank_values(w.grad) == [[24, 24]] * 2


def test_an_autograd_function_works_inside_a_remote_function(cell: Any) -> None:
    @ml.remote
    def straight_through(x: Any) -> Any:
        class Round(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: Any) -> Any:
                return x.round()

            @staticmethod
            def backward(ctx: Any, *g: Any) -> Any:
                return g[0]

        return Round.apply(x)

    w = torch.full((2,), 1.4).requires_grad_()
    straight_through(w).sum().backward()
    assert rank_values(w.grad) == [[1, 1]] * 2


def test_writes_to_arguments_are_seen(cell: Any) -> None:
    @ml.remote
    def fill(x: Any, y: Any) -> None:
        x.fill_(3)
        y.t_()
        y.resize_(1, 2)

    for _ in range(2):
        x, y = torch.zeros(2), torch.arange(6.0).view(2, 3)
        view = x[:1]
        fill(x, y)
        assert rank_values(x) == [[3, 3]] * 2 and rank_values(view) == [[3]] * 2
        assert y.shape == (1, 2)
        assert_metadata_is_true(x, y)


def test_views_returned_share_the_data(cell: Any) -> None:
    rows = ml.remote(lambda x: [x[0], x.t()])
    for _ in range(2):
        x = torch.zeros(2, 2)
        first, turned = rows(x)
        first.add_(1)
        assert rank_values(x)[0] == [[1, 1], [0, 0]] and rank_values(turned)[1] == [[1, 0], [1, 0]]


def test_prints_of_a_function_come_with_the_rank(cell: Any, capsys: pytest.CaptureFixture[str]) -> None:
    @ml.remote
    def greet(r: Any) -> None:
        print("hello from", r.item())

    greet(cell.rank("gpu"))
    cell.sync()
    for _ in range(100):
        text = capsys.readouterr().out
        if text:
            break
        ml.inspect(torch.ones(1))
    assert "[0.0] hello from 0" in text or "hello from" in text


def test_a_call_on_one_shard_gives_any_value(cell: Any) -> None:
    def describe(x: Any, name: str) -> Any:
        return {name: (x.shape, x.sum().item()), "t": x}

    out = ml.call_on_shard_and_fetch(describe, own_number(cell).expand(2), "own", shard={"host": 0, "gpu": 1}).result()
    assert out["own"] == ((2,), 2.0) and type(out["t"]) is torch.Tensor
    returned = ml.call_on_shard_and_fetch(lambda: ValueError("a value"), shard={"host": 0, "gpu": 0}).result()
    assert isinstance(returned, ValueError)


def test_a_value_that_does_not_pickle_is_an_error_not_a_hang(cell: Any) -> None:
    with pytest.raises(ml.MeshError):
        ml.call_on_shard_and_fetch(lambda: (i for i in range(3)), shard={"host": 0, "gpu": 0}).result(60)
    with pytest.raises((ml.MeshError, TypeError)):
        ml.remote(lambda x: (i for i in range(3)))(torch.ones(1))
    assert rank_values(torch.ones(1)) == [[1], [1]]


def test_an_argument_that_does_not_pickle_is_refused_before_it_is_sent(cell: Any) -> None:
    with pytest.raises(TypeError, match="cannot be sent"):
        ml.remote(lambda x, g: x)(torch.ones(1), (i for i in range(3)))


def test_shapes_that_differ_by_rank_are_an_error_that_lists_them(cell: Any) -> None:
    ragged = ml.remote(lambda r: torch.ones(r.item() + 1))
    with pytest.raises(ValueError, match=r"rank 0: \(1,\).*rank 1: \(2,\)"):
        ragged(cell.rank("gpu"))
    with pytest.raises(ValueError, match="float32 everywhere, but other strides"):
        ml.remote(lambda r: torch.ones(2, 2).t() if r.item() else torch.ones(2, 2))(cell.rank("gpu"))


def test_a_function_that_draws_on_one_rank_alone_is_no_error(cell: Any) -> None:
    @ml.remote
    def sometimes(r: Any) -> Any:
        if r.item() == 1:
            torch.rand(1)
        return r + 1

    for _ in range(2):
        assert rank_values(sometimes(cell.rank("gpu"))) == [1, 2]


def test_the_ambient_state_holds_inside_a_function(cell: Any) -> None:
    state = ml.remote(
        lambda x: (torch.is_grad_enabled(), str(torch.get_default_dtype()), torch.is_autocast_enabled("cpu"))
    )
    x = torch.ones(1)
    assert state(x) == (True, "torch.float32", False)
    with torch.no_grad(), torch.autocast("cpu"):
        assert state(x) == (False, "torch.float32", True)
    torch.set_default_dtype(torch.float64)
    try:
        assert state(x) == (True, "torch.float64", False)
    finally:
        torch.set_default_dtype(torch.float32)


def test_state_a_function_changes_on_the_worker_does_not_stay(cell: Any) -> None:
    @ml.remote
    def meddle(x: Any) -> Any:
        torch.set_grad_enabled(False)
        torch.set_default_dtype(torch.float64)
        return x

    x = torch.ones(2).requires_grad_()
    try:
        meddle(x)
        y = x * 2
        assert y.requires_grad
        assert torch.rand(2).dtype == torch.float32
        assert_metadata_is_true(y, torch.rand(2))
    finally:
        ml.remote(lambda x: (torch.set_grad_enabled(True), torch.set_default_dtype(torch.float32), None)[2])(x)
