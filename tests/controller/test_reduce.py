"""reduce over mesh dims: values and adjoints (rule 11), worked out by hand for two ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import monarch_lab as ml
from tests.controller.compare import assert_metadata_is_true, own_number, rank_values


def three_and_five(mesh: Any) -> Any:
    """A leaf that is 3 on rank 0 and 5 on rank 1."""
    return (own_number(mesh) * 2 + 3).detach().requires_grad_()


@pytest.mark.parametrize(
    ("reduction", "expected"),
    [("sum", 8), ("avg", 4), ("product", 15), ("max", 5), ("min", 3)],
)
def test_a_reduction_combines_the_values_of_the_ranks(cell: Any, reduction: str, expected: float) -> None:
    x = (own_number(cell) * 2 + 3).expand(2, 2).contiguous()
    for dtype in (torch.float32, torch.float64, torch.int64, torch.float16, torch.bfloat16):
        if reduction == "avg" and not dtype.is_floating_point:
            continue
        for _ in range(2):
            y = x.to(dtype).reduce("gpu", reduction)
            assert y.tolist() == [[expected] * 2] * 2 and y.dtype == dtype and y.shape == (2, 2)
            assert_metadata_is_true(y)


@pytest.mark.parametrize(("reduction", "expected"), [("band", 1), ("bor", 7), ("bxor", 6)])
def test_a_reduction_by_bits_combines_integers(cell: Any, reduction: str, expected: int) -> None:
    x = cell.rank("gpu") * 2 + 3
    assert x.reduce("gpu", reduction).item() == expected


@pytest.mark.parametrize(
    ("reduction", "expected"), [("bor", True), ("band", False), ("bxor", True), ("max", True), ("min", False)]
)
def test_bools_reduce_as_truth_values(cell: Any, reduction: str, expected: bool) -> None:
    x = cell.rank("gpu") > 0
    y = x.reduce("gpu", reduction)
    assert y.item() is expected and y.dtype == torch.bool


def test_complex_numbers_add_up(cell: Any) -> None:
    x = own_number(cell) + 1j
    assert x.reduce("gpu").item() == 1 + 2j and x.reduce("gpu", "avg").item() == 0.5 + 1j
    with pytest.raises(TypeError, match="complex"):
        x.reduce("gpu", "max")


def test_the_average_of_integers_is_refused(cell: Any) -> None:
    with pytest.raises(TypeError, match="float"):
        cell.rank("gpu").reduce("gpu", "avg")


def test_non_contiguous_and_empty_values_reduce(cell: Any) -> None:
    x = (torch.arange(6.0).view(2, 3) + own_number(cell)).t()
    for _ in range(2):
        y = x.reduce("gpu")
        assert y.tolist() == [[1, 7], [3, 9], [5, 11]]
        assert_metadata_is_true(y)
    assert torch.ones(0, 3).reduce("gpu").shape == (0, 3)


def test_stack_gathers_a_dim_of_ranks(cell: Any) -> None:
    x = own_number(cell) + torch.tensor([1.0, 10.0])
    for _ in range(2):
        y = x.reduce("gpu", "stack")
        assert y.tolist() == [[1, 10], [2, 11]]
        assert x.reduce((), "stack").shape == (1, 2, 2) and x.reduce("host", "stack").shape == (1, 2)
        assert_metadata_is_true(y)


def test_scatter_gives_each_rank_its_piece(cell: Any) -> None:
    rows = torch.tensor([[1.0, 2.0], [3.0, 4.0]]) * (own_number(cell) + 1)
    for _ in range(2):
        assert rank_values(rows.reduce("gpu", "sum", scatter=True)) == [[3, 6], [9, 12]]
        assert rank_values(rows.reduce("gpu", "max", scatter=True)) == [[2, 4], [6, 8]]
        assert rank_values(rows.reduce("gpu", "avg", scatter=True)) == [[1.5, 3], [4.5, 6]]
        exchanged = rows.reduce("gpu", "stack", scatter=True)
        assert rank_values(exchanged) == [[[1, 2], [2, 4]], [[3, 4], [6, 8]]]
        assert_metadata_is_true(exchanged)


@pytest.mark.parametrize(
    ("reduction", "gradients"),
    [("sum", [1, 1]), ("avg", [0.5, 0.5]), ("max", [0, 1]), ("min", [1, 0]), ("product", [5, 3])],
)
def test_the_gradient_of_a_reduction_is_this_ranks_own(cell: Any, reduction: str, gradients: list[float]) -> None:
    for _ in range(2):
        x = three_and_five(cell)
        x.reduce("gpu", reduction).backward()
        assert rank_values(x.grad) == gradients


def test_the_upstream_gradient_of_each_rank_stays_its_own(cell: Any) -> None:
    for reduction, expected in (("sum", [10, 20]), ("avg", [5, 10]), ("max", [0, 20])):
        x = three_and_five(cell)
        (x.reduce("gpu", reduction) * (own_number(cell) * 10 + 10)).backward()
        assert rank_values(x.grad) == expected


@pytest.mark.parametrize("reduction", ["max", "min"])
def test_a_tie_splits_the_gradient(cell: Any, reduction: str) -> None:
    x = torch.tensor(3.0).requires_grad_()
    x.reduce("gpu", reduction).backward()
    assert rank_values(x.grad) == [0.5, 0.5]


def test_the_gradient_of_a_stack_is_this_ranks_entry_of_its_own_upstream(cell: Any) -> None:
    x = three_and_five(cell)
    stacked = x.reduce("gpu", "stack")
    (stacked * torch.tensor([1.0, 10.0]) * (own_number(cell) + 1)).sum().backward()
    assert rank_values(x.grad) == [1, 20]


def test_the_gradient_of_a_scattered_sum_gathers_the_pieces(cell: Any) -> None:
    for reduction, scale in (("sum", 1), ("avg", 0.5)):
        x = torch.ones(2, 1).requires_grad_()
        piece = x.reduce("gpu", reduction, scatter=True)
        (piece * (own_number(cell) + 1)).sum().backward()
        assert rank_values(x.grad) == [[[1 * scale], [2 * scale]]] * 2


def test_the_gradient_of_an_exchange_goes_back_where_it_came_from(cell: Any) -> None:
    x = (torch.tensor([1.0, 2.0]) + own_number(cell)).detach().requires_grad_()
    exchanged = x.reduce("gpu", "stack", scatter=True)
    assert rank_values(exchanged) == [[1, 2], [2, 3]]
    (exchanged * (torch.tensor([1.0, 10.0]) * (own_number(cell) * 100 + 1))).sum().backward()
    assert rank_values(x.grad) == [[1, 101], [10, 1010]]


def test_a_product_with_a_zero_has_a_gradient(cell: Any) -> None:
    x = (own_number(cell) * 2).detach().requires_grad_()
    x.reduce("gpu", "product").backward()
    assert rank_values(x.grad) == [2, 0]


def test_data_parallel_gradients_are_those_of_the_whole_batch(cell: Any) -> None:
    with ml.no_mesh.activate():
        torch.manual_seed(0)
        local, batch = torch.nn.Linear(3, 2), torch.randn(8, 3)
        local(batch).pow(2).mean().backward()
    model = cell.replicate(local)
    model.zero_grad()
    model(cell.shard(batch, "gpu")).pow(2).mean().backward()
    for p, q in zip(model.parameters(), local.parameters(), strict=True):
        p.grad.reduce_("gpu", "avg")
        torch.testing.assert_close(ml.inspect(p.grad), q.grad)


def test_several_dims_reduce_at_once(cell: Any) -> None:
    x = own_number(cell) + 1
    assert x.reduce().item() == x.reduce(("host", "gpu")).item() == x.reduce(["gpu", "host"]).item() == 3
    parts = cell.split(gpu=("dp", "tp"), tp=1)
    with parts.activate():
        y = parts.rank("dp") + 1
        assert y.reduce(("dp", "tp")).item() == 3 and rank_values(y.reduce("tp")) == [1, 2]
        assert y.reduce(("dp", "tp"), "stack").shape == (2, 1)


def test_reduce_in_place_writes_the_tensor_and_its_views(cell: Any) -> None:
    for _ in range(2):
        x = torch.ones(2) + own_number(cell)
        view = x[1:]
        assert x.reduce_("gpu") is x
        assert x.tolist() == [3, 3] and view.tolist() == [3]


def test_reduce_into_out_writes_it(cell: Any) -> None:
    for _ in range(2):
        x, out = torch.ones(2) + own_number(cell), torch.zeros(2)
        assert x.reduce("gpu", out=out) is out
        assert out.tolist() == [3, 3] and rank_values(x) == [[1, 1], [2, 2]]
    with pytest.raises(ValueError, match="shape"):
        x.reduce("gpu", out=torch.zeros(3))


def test_reduce_takes_pytrees(cell: Any) -> None:
    tree = {"a": own_number(cell), "b": [cell.rank("gpu"), 7]}
    out = ml.reduce(tree, "gpu")
    assert out["a"].item() == 1 and out["b"][0].item() == 1 and out["b"][1] == 7
    ml.reduce_(tree, "gpu", "max")
    assert tree["a"].item() == 1


def test_reduce_names_what_is_wrong(cell: Any) -> None:
    x = torch.ones(3)
    with pytest.raises(KeyError, match="does not have dimension 'gpus'.*host, gpu"):
        x.reduce("gpus")
    with pytest.raises(ValueError, match="twice"):
        x.reduce(("gpu", "gpu"))
    with pytest.raises(ValueError, match="'mean' is no reduction.*avg"):
        x.reduce("gpu", "mean")
    with pytest.raises(TypeError, match="scattering.*\\(2,\\).*\\(3,\\)"):
        x.reduce("gpu", scatter=True)
    with pytest.raises(ValueError, match="not valid for in-place"):
        x.reduce_("gpu", "stack")
    with pytest.raises(ValueError, match="not valid for in-place"):
        x.reduce_("gpu", scatter=True)


def test_on_a_part_of_the_mesh_reduce_counts_the_part_alone(cell: Any) -> None:
    with cell.slice(gpu=1).activate() as _:
        mesh = ml.get_active_mesh()
        assert (mesh.process_idx() + 10).reduce().item() == 11
    x = cell.rank("gpu") + 1
    assert x.reduce("gpu").item() == 3


def test_reduce_under_no_grad_and_inference_mode_has_no_gradient(cell: Any) -> None:
    x = three_and_five(cell)
    for mode in (torch.no_grad, torch.inference_mode):
        for _ in range(2):
            with mode():
                assert not x.reduce("gpu").requires_grad
    assert x.reduce("gpu").requires_grad


def test_many_reductions_in_a_row_stay_in_step(cell: Any) -> None:
    x = own_number(cell)
    for k in range(200):
        x = (x + 1).reduce("gpu", "avg") if k % 3 else (x * 0.5).reduce("gpu", "max")
    first, second = rank_values(x)
    assert first == second
