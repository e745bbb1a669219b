"""Objects that live on the workers alone."""

from __future__ import annotations

import gc
import pickle
from typing import Any

import pytest
import torch
from torch import nn

import monarch_lab as ml
from tests.controller.compare import own_number, rank_values


def test_an_object_stays_on_its_process_between_calls(cell: Any) -> None:
    make = ml.remote(lambda r: ml.OpaqueRef([r.item()]))
    append = ml.remote(lambda ref, x: ref.value.append(x.sum().item()))
    total = ml.remote(lambda ref: torch.tensor(float(sum(ref.value))))
    for _ in range(2):
        ref = make(cell.rank("gpu"))
        assert isinstance(ref, ml.OpaqueRef)
        for _ in range(2):
            append(ref, torch.ones(3) * own_number(cell))
        assert rank_values(total(ref)) == [0, 7]


def test_a_reference_travels_in_any_structure_and_comes_back_as_it_went(cell: Any) -> None:
    make = ml.remote(lambda: {"a": ml.OpaqueRef("x"), "b": [ml.OpaqueRef("y")], "t": torch.ones(1)})
    for _ in range(2):
        made = make()
        both = ml.remote(lambda d: (d["a"].value + d["b"][0].value, d["a"]))
        text, again = both(made)
        assert text == "xy"
        assert ml.remote(lambda r: r.value)(again) == "x"


def test_the_value_is_not_in_the_notebook(cell: Any) -> None:
    ref = ml.remote(lambda: ml.OpaqueRef(3))()
    with pytest.raises(RuntimeError, match=r"read \.value there"):
        _ = ref.value
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(ref)
    with pytest.raises(TypeError, match="made in the notebook"):
        ml.remote(lambda r: None)(ml.OpaqueRef(3))
    with pytest.raises(ml.MeshError, match="cannot be pickled or fetched"):
        ml.call_on_shard_and_fetch(lambda r: r, ref).result()
    assert "OpaqueRef on" in repr(ref) and repr(ml.OpaqueRef(3)) == "<OpaqueRef to int>"


def test_an_object_is_let_go_with_its_last_reference(cell: Any) -> None:
    @ml.remote
    def make() -> Any:
        import builtins

        class Counted:
            def __del__(self) -> None:
                builtins.gone = getattr(builtins, "gone", 0) + 1  # type: ignore[attr-defined]

        builtins.gone = 0  # type: ignore[attr-defined]
        return ml.OpaqueRef(Counted())

    def gone() -> int:
        import builtins
        import gc

        gc.collect()
        return builtins.gone  # type: ignore[attr-defined,no-any-return]

    ref = make()
    assert ml.call_on_shard_and_fetch(gone).result() == 0
    del ref
    gc.collect()
    assert ml.call_on_shard_and_fetch(gone).result() == 1


def test_what_hangs_on_an_object_that_failed_fails_with_it(cell: Any) -> None:
    def fail() -> Any:
        raise ValueError("no object")

    ref = ml.remote(fail, propagate=lambda: ml.OpaqueRef(None))()
    out = ml.remote(lambda r: r.value, propagate=lambda r: torch.empty(1))(ref)
    with pytest.raises(ml.RemoteException, match="no object"):
        ml.inspect(out)


def _setup(width: int) -> Any:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(width, 8), nn.ReLU(), nn.Linear(8, 1))
    return ml.OpaqueRef((model, torch.optim.SGD(model.parameters(), 0.05)))


def _step(ref: Any, x: Any, y: Any, group: Any) -> Any:
    import torch.distributed as dist

    model, optimizer = ref.value
    loss = (model(x) - y).square().mean()
    optimizer.zero_grad()
    loss.backward()
    for p in model.parameters():
        dist.all_reduce(p.grad, group=group)
        p.grad /= 2
    optimizer.step()
    return loss.detach()


def test_a_model_and_its_optimizer_train_on_the_workers_alone(cell: Any) -> None:
    model = ml.remote(_setup)(4)
    step = ml.remote(_step, propagate=lambda ref, x, y, group: torch.empty(()))
    group = cell.process_group("gpu")
    with ml.random.vary("gpu"):
        x = torch.randn(16, 4)
    y = x.sum(1, keepdim=True)
    losses = [step(model, x, y, group).reduce("gpu", "avg") for _ in range(5)]
    values = [loss.item() for loss in losses]
    assert all(v > 0 for v in values) and values[-1] < values[0]


class _Adder:
    def __init__(self, start: float) -> None:
        self.start = start
        self.calls = 0

    def add(self, x: Any) -> Any:
        self.calls += 1
        return x + self.start

    def count(self) -> int:
        return self.calls


class _FarAdder(ml.OpaqueObject):
    @ml.opaque_method
    def add(self, x: Any) -> Any:
        return torch.empty_like(x)


def test_an_object_is_used_through_its_proxy(cell: Any) -> None:
    far = _FarAdder(_Adder, 4.0)
    far.note = "the notebook's own"
    before = cell.client.cache.misses
    one = torch.ones(3, 4)
    assert cell.client.cache.misses <= before + 1
    before = cell.client.cache.misses
    out = far.add(one)
    assert cell.client.cache.misses == before and far.note == "the notebook's own"
    assert rank_values(out)[1] == [[5.0] * 4] * 3
    assert rank_values(far.call_method("add", torch.empty_like, one))[0] == [[5.0] * 4] * 3
    assert rank_values(far.call_method("add", None, one))[0] == [[5.0] * 4] * 3
    assert far.call_method_on_shard_and_fetch("count", shard={"gpu": 1}).result() == 3


def test_an_object_is_made_by_its_path_and_says_what_is_wrong(cell: Any) -> None:
    far = ml.OpaqueObject("collections.Counter", "aab")
    assert far.call_method_on_shard_and_fetch("most_common", 1).result() == [("a", 2)]
    with pytest.raises(ml.MeshError, match="no_such"):
        ml.OpaqueObject("collections.no_such")
    with pytest.raises(AttributeError, match="no_such"):
        far.call_method("no_such", None)
    with pytest.raises(TypeError, match="propagator"):
        far.call_method("total", 3)  # type: ignore[arg-type]
    with ml.no_mesh.activate(), pytest.raises(ValueError, match="no device mesh"):
        ml.OpaqueObject("collections.Counter")


def test_a_module_lives_on_the_workers_and_its_parameters_are_here(cell: Any) -> None:
    net = ml.OpaqueModule("torch.nn.Linear", 2, 1)
    weight, bias = net.parameters()
    assert isinstance(weight, nn.Parameter) and weight.shape == (1, 2) and weight.requires_grad
    assert [n for n, _ in net.named_parameters()] == ["weight", "bias"] and next(net.parameters()) is weight
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    x = torch.ones(3, 2)
    for _ in range(2):
        optimizer.zero_grad()
        net(x).sum().backward()
        assert rank_values(weight.grad) == [[[3, 3]]] * 2 and rank_values(bias.grad) == [[3]] * 2
        before = rank_values(weight)[0][0][0]
        optimizer.step()
        assert rank_values(weight)[0][0][0] == pytest.approx(before - 0.3)
    with torch.no_grad():
        for p in net.parameters():
            p.zero_()
    assert rank_values(net(x).sum()) == [0, 0]
    out = net(x, propagator=lambda x: torch.empty(3, 1))
    optimizer.zero_grad()
    out.sum().backward()
    assert rank_values(weight.grad) == [[[3, 3]]] * 2


def test_two_modules_of_a_kind_keep_their_gradients_apart(cell: Any) -> None:
    first, second = (ml.OpaqueModule(nn.Linear, 2, 1, bias=False) for _ in range(2))
    x = torch.ones(3, 2)
    for net, other in ((first, second), (second, first)):
        for p in other.parameters():
            p.grad = None
        net(x).sum().backward()
        (mine,), (theirs,) = net.parameters(), other.parameters()
        assert rank_values(mine.grad) == [[[3, 3]]] * 2 and theirs.grad is None


def test_what_is_no_module_is_refused(cell: Any) -> None:
    with pytest.raises(ml.MeshError, match="no nn.Module"):
        ml.OpaqueModule("collections.Counter")
