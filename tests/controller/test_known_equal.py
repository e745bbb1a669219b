"""Known equal (rules 6, 9, 10): a value is told without a rank only where every process holds it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import monarch_lab as ml
from tests.controller.compare import assert_known_or_refused, own_number, rank_values

BOTH = ("host", "gpu")


def test_factories_literals_and_replicated_values_are_known_equal(cell: Any) -> None:
    made = [torch.rand(2), torch.zeros(2), torch.tensor([1, 2]), torch.tensor(1.0), cell.replicate(torch.ones)]
    for t in made[:4]:
        assert t.equal_dims == BOTH
    assert cell.replicate([1, "a"]) == [1, "a"]


def test_ranks_and_shards_are_known_unequal(cell: Any) -> None:
    with ml.no_mesh.activate():
        local = torch.arange(4.0)
    for t in (cell.rank("gpu"), cell.process_idx(), cell.shard(local, "gpu")):
        assert "gpu" not in t.equal_dims
        with pytest.raises(TypeError, match=r'"gpu".*ml\.inspect.*ml\.fetch_all.*reduce'):
            t.tolist()
    assert cell.rank("host").item() == 0


_READS: dict[str, Callable[[Any], Any]] = {
    "item": lambda t: t.item(),
    "bool": bool,
    "int": int,
    "float": float,
    "complex": complex,
    "index": lambda t: [1, 2, 3][t.long()],
    "tolist": lambda t: t.tolist(),
    "numpy": lambda t: t.numpy(),
    "asarray": lambda t: __import__("numpy").asarray(t),
    "equal": lambda t: torch.equal(t, t + 0),
    "allclose": lambda t: torch.allclose(t, t + 0),
    "if": lambda t: 1 if t else 2,
    "range": lambda t: list(range(t.long())),
    "in": lambda t: 1 in t.reshape(1),
}


@pytest.mark.parametrize("name", list(_READS))
def test_a_read_of_an_unequal_value_names_the_dim_and_what_to_do(cell: Any, name: str) -> None:
    with pytest.raises(TypeError, match='"gpu".*fetch_all'):
        _READS[name](own_number(cell))


@pytest.mark.parametrize("name", list(_READS))
def test_a_read_of_an_equal_value_gives_what_plain_torch_gives(cell: Any, name: str) -> None:
    far = _READS[name](torch.ones(1).sum() * 1)
    with ml.no_mesh.activate():
        local = _READS[name](torch.tensor(1.0))
    assert far == local and type(far) is type(local)


def test_an_unequal_operand_makes_the_result_unequal(cell: Any) -> None:
    for _ in range(2):
        for y in (torch.zeros(2) + own_number(cell), torch.stack([torch.ones(()), own_number(cell)])):
            assert_known_or_refused(y)
            assert "gpu" not in y.equal_dims


_WRITES: dict[str, Callable[[Any, Any], Any]] = {
    "add_": lambda x, r: x.add_(r),
    "operator": lambda x, r: x.__iadd__(r),
    "copy_": lambda x, r: x.copy_(r.expand(2)),
    "fill_": lambda x, r: x.fill_(r),
    "view": lambda x, r: x[0].add_(r),
    "setitem": lambda x, r: x.__setitem__(1, r),
    "data": lambda x, r: x.data.add_(r),
    "detach": lambda x, r: x.detach().sub_(r),
    "assigned data": lambda x, r: setattr(x, "data", r.expand(2).clone()),
    "out": lambda x, r: torch.add(x, r, out=x),
    "out of a view": lambda x, r: torch.add(x[:1], r, out=x[:1]),
    "foreach": lambda x, r: torch._foreach_add_([x], [r.expand(2)]),
    "index_put_": lambda x, r: x.index_put_((torch.tensor([0]),), r),
    "where the mask is unequal": lambda x, r: x.masked_fill_(r > 0, 9.0),
    "unequal index": lambda x, r: x.scatter_(0, r.long().reshape(1), 5.0),
    "exponential_": lambda x, r: x.exponential_().mul_(r),
    "remote": lambda x, r: ml.remote(lambda a, b: a.add_(b))(x, r),
    "remote data": lambda x, r: ml.remote(lambda a, b: (a.data.add_(b), b)[1])(x, r),
}


@pytest.mark.parametrize("name", list(_WRITES))
@pytest.mark.parametrize("grad_mode", ["grad", "no_grad", "inference"])
def test_a_write_of_unequal_values_ends_equality_through_every_alias(cell: Any, name: str, grad_mode: str) -> None:
    mode = {"grad": torch.enable_grad, "no_grad": torch.no_grad, "inference": torch.inference_mode}[grad_mode]
    with mode():
        for _ in range(2):
            x = torch.zeros(2)
            view = x.view(1, 2)
            _WRITES[name](x, own_number(cell))
            if name != "assigned data":
                assert_known_or_refused(view)
            assert_known_or_refused(x)
            assert len({str(v) for v in rank_values(x)}) == 2, "the case makes the processes differ"


def test_a_reduced_value_is_known_equal(cell: Any) -> None:
    x = torch.zeros(2) + own_number(cell)
    assert x.reduce("gpu").tolist() == [1, 1] and x.reduce("gpu").equal_dims == BOTH
    assert x.equal_dims == ("host",)
    x.reduce_("gpu", "avg")
    assert x.tolist() == [0.5, 0.5]


def test_reducing_a_part_of_a_tensor_says_nothing_of_the_rest(cell: Any) -> None:
    for _ in range(2):
        x = torch.zeros(2) + own_number(cell)
        x[0:1].reduce_("gpu")
        assert rank_values(x) == [[1, 0], [1, 1]]
        assert_known_or_refused(x)
        y = torch.zeros(2) + own_number(cell)
        torch.ones(1).reduce("gpu", out=y[0:1])
        assert_known_or_refused(y)


def test_reducing_along_a_dim_of_one_process_says_nothing_of_the_others(cell: Any) -> None:
    x = (torch.zeros(2) + own_number(cell)).reduce("host")
    assert_known_or_refused(x)


def test_scattered_pieces_are_known_unequal(cell: Any) -> None:
    x = torch.tensor([1.0, 2.0]).reduce("gpu", "sum", scatter=True)
    assert rank_values(x) == [2, 4]
    assert_known_or_refused(x)


def test_results_of_remote_functions_are_not_known_equal(cell: Any) -> None:
    @ml.remote
    def pid(x: Any) -> Any:
        import os

        return x + os.getpid()

    for _ in range(2):
        assert_known_or_refused(pid(torch.zeros(1, dtype=torch.int64)))


def test_a_remote_function_that_only_reads_leaves_its_arguments_known_equal(cell: Any) -> None:
    read = ml.remote(lambda weight, batch: (weight * batch).sum())
    weight = torch.ones(3)
    for _ in range(3):
        read(weight, torch.zeros(3) + own_number(cell))
        assert weight.tolist() == [1, 1, 1]


def test_equality_holds_through_training_on_reduced_gradients(cell: Any) -> None:
    model = torch.nn.Linear(2, 1)
    batch = torch.ones(4, 2) * (own_number(cell) + 1)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(batch).pow(2).mean()
        loss.backward()
        for p in model.parameters():
            p.grad.reduce_("gpu", "avg")
        optimizer.step()
        assert isinstance(loss.reduce("gpu", "avg").item(), float)
    for p in model.parameters():
        first, second = rank_values(p)
        assert first == second == p.tolist()
    assert_known_or_refused(model(batch))


def test_a_mesh_of_one_process_needs_no_equality(cell: Any) -> None:
    with cell.slice(gpu=1).activate():
        x = torch.arange(3.0)
        assert x.tolist() == [0, 1, 2]
    with cell.slice(gpu=slice(1, 2)).activate() as _:
        assert ml.get_active_mesh().rank("gpu").item() == 0


def test_a_deep_copy_of_an_unequal_value_is_not_known_equal(cell: Any) -> None:
    import copy

    x = torch.zeros(2) + own_number(cell)
    assert_known_or_refused(copy.deepcopy(x))
    assert_known_or_refused(x.clone())
    assert_known_or_refused(torch.nn.Parameter(x))
