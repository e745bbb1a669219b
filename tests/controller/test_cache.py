"""What is learned and when it may be believed (rules 1 to 4)."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch
from torch.nn import functional as F

import monarch_lab as ml
from monarch_lab.tensors.meta import intern
from tests.controller.compare import assert_metadata_is_true, by_rank, rank_values


def misses(mesh: Any) -> int:
    return mesh.client.cache.misses


def test_a_float_is_an_operand_not_a_kind_of_call(cell: Any) -> None:
    x = torch.ones(3, 17)[0]  # of a kind that no other test has
    ((x * 0.25) + 0.5).pow(1.5)
    before = misses(cell)
    values = [((x * f) + f).pow(f)[0].reshape(()) for f in (0.3, 2.5, 7.25)]
    assert misses(cell) == before + 2, "the index and the reshape are new, the floats are not"
    assert [v.item() for v in values] == pytest.approx([(2 * f) ** f for f in (0.3, 2.5, 7.25)])


@pytest.mark.parametrize("number", [0.0, 1.0, -0.0, float("inf"), float("nan"), 1e300, 5e-324])
def test_every_float_arrives_as_it_was(cell: Any, number: float) -> None:
    x = torch.ones(2, dtype=torch.float64)
    for _ in range(2):
        got = ml.inspect(x * number)
        with ml.no_mesh.activate():
            want = torch.ones(2, dtype=torch.float64) * number
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(got.signbit(), want.signbit())


@pytest.mark.parametrize("number", [1 << 40, -(1 << 63), (1 << 63) - 1])
def test_big_integers_arrive_as_they_were(cell: Any, number: int) -> None:
    x = torch.zeros(1, dtype=torch.int64)
    for _ in range(2):
        assert (x + number).item() == number


def test_numbers_of_other_kinds_are_told_apart(cell: Any) -> None:
    x = torch.ones(2, dtype=torch.int64)
    for _ in range(2):
        assert (x + 1).dtype == torch.int64 and (x + 1.0).dtype == torch.float32 and (x + True).dtype == torch.int64
        assert (x.bool() + True).dtype == torch.bool and (x + 1j).dtype == torch.complex64
        assert (x.bool() | True).dtype == torch.bool and (x | 1).dtype == torch.int64


def test_numpy_scalars_are_numbers(cell: Any) -> None:
    np = pytest.importorskip("numpy")
    x = torch.ones(3)
    for _ in range(2):
        assert (x * np.float64(0.5)).tolist() == [0.5] * 3 and (x * np.float32(2)).tolist() == [2] * 3
        assert x[np.int64(1)].item() == 1 and x.sum(np.int64(0)).item() == 3


@pytest.mark.timeout(30)
@pytest.mark.parametrize("value", [True, False])
def test_a_bool_without_dims_is_an_operand(cell: Any, value: bool) -> None:
    x = torch.ones(3)
    for _ in range(2):
        assert (x * torch.tensor(value)).tolist() == [float(value)] * 3
        assert ((x > 0) & torch.tensor(value)).tolist() == [value] * 3


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32, torch.uint8, torch.bfloat16, torch.complex64])
def test_a_local_tensor_without_dims_is_a_number_of_its_dtype(mesh: Any, dtype: torch.dtype) -> None:
    number = torch.tensor(3, dtype=dtype)
    x = mesh.replicate(torch.arange(3))
    for _ in range(2):
        got = x * number
        assert got.dtype == torch.result_type(torch.arange(3), number)
        assert ml.inspect(got).real.tolist() == [0, 3, 6]


def test_a_float_that_decides_a_shape_is_part_of_the_call(cell: Any) -> None:
    x = torch.rand(1, 1, 8, 8)
    for _ in range(2):
        assert [len(torch.arange(0.0, e)) for e in (2.0, 3.0, 3.5)] == [2, 3, 4]
        assert [F.interpolate(x, scale_factor=s).shape[2] for s in (0.5, 2.0, 0.25)] == [4, 16, 2]
        shapes = [F.fractional_max_pool2d(x, 2, output_ratio=(r, r)).shape[2] for r in (0.5, 0.75, 0.5)]
        assert shapes == [4, 6, 4]
    cell.sync()


def test_dropout_without_effect_is_told_from_one_with(cell: Any) -> None:
    x = torch.ones(50)
    for p in (0.5, 0.0, 0.3, 1.0, 0.0):
        zeros = (F.dropout(x, p) == 0).sum().item()
        assert zeros == {0.0: 0, 1.0: 50}.get(p, zeros) and (p in (0.0, 1.0) or 0 < zeros < 50)


def test_python_values_are_asked_each_time(cell: Any) -> None:
    x = torch.zeros(2)
    for k in range(4):
        assert x.tolist() == [k, k] and x.sum().item() == 2 * k and bool((x == k).all()) and f"{x[0]:.1f}" == f"{k}.0"
        assert torch.equal(x, torch.full((2,), float(k))) and torch.allclose(x, torch.full((2,), float(k)))
        assert x.numpy().tolist() == [k, k] and f"tensor([{k}., {k}.])" in repr(x)
        x.add_(1)


def test_a_sparse_count_is_asked_each_time(cell: Any) -> None:
    for n in (1, 2, 3):
        x = torch.zeros(4)
        x[:n] = 1
        sparse = x.to_sparse()
        assert sparse._nnz() == n and sparse.indices().shape == (1, n) and sparse.values().shape == (n,)


def test_a_shape_that_hangs_on_values_is_asked_each_time(cell: Any) -> None:
    for n in (1, 3, 2):
        x = torch.zeros(4)
        x[:n] = torch.arange(1.0, n + 1)
        mask = x > 0
        shapes = {
            "nonzero": x.nonzero().shape[0],
            "as tuple": x.nonzero(as_tuple=True)[0].shape[0],
            "where": torch.where(x)[0].shape[0],
            "argwhere": torch.argwhere(x).shape[0],
            "masked_select": x.masked_select(mask).shape[0],
            "mask": x[mask].shape[0],
            "unique": torch.unique(x).shape[0] - 1,
            "unique_consecutive": torch.unique_consecutive(x).shape[0] - 1,
            "bincount": torch.bincount(mask.long() * n).shape[0] - 1,
            "repeat_interleave": torch.repeat_interleave(x, mask.long()).shape[0],
            "one_hot": F.one_hot(mask.long() * n).shape[1] - 1,
            "slice": x[: mask.sum()].shape[0],
        }
        assert shapes == dict.fromkeys(shapes, n)
        assert_metadata_is_true(x[mask])


def test_a_shape_that_differs_by_rank_is_an_error_that_lists_them(cell: Any) -> None:
    x = torch.arange(3) + cell.rank("gpu")
    for call in (x.nonzero, lambda: torch.unique(x > 0), lambda: x[x > 0]):
        with pytest.raises(ValueError, match=r"rank 0: .*\(.*rank 1: .*\(.*"):
            call()
    assert rank_values(x) == [[0, 1, 2], [1, 2, 3]]


def test_an_integer_index_is_believed(cell: Any) -> None:
    x, at = torch.arange(4.0), torch.tensor([0, 2])
    for _ in range(2):
        x[at]
    before = misses(cell), cell.client.cache.asked
    for k in range(3):
        assert x[at + k % 2].tolist() == [k % 2, 2 + k % 2]
    cell.sync()
    assert cell.client.cache.asked == before[1]


def test_the_same_call_under_another_ambient_state_is_another_call(cell: Any) -> None:
    w = torch.ones(2, 2).requires_grad_()
    for _ in range(2):
        kinds = [(w @ w).requires_grad]
        with torch.no_grad():
            kinds.append((w @ w).requires_grad)
        with torch.inference_mode():
            kinds.append((w @ w).is_inference())
        with torch.autocast("cpu", torch.bfloat16):
            kinds.append((w @ w).dtype)
        with torch.autocast("cpu", torch.float16):
            kinds.append((w @ w).dtype)
        assert kinds == [True, False, True, torch.bfloat16, torch.float16]


def test_deterministic_algorithms_reach_the_workers(cell: Any) -> None:
    asked = ml.remote(lambda: torch.tensor(torch.are_deterministic_algorithms_enabled()))
    torch.use_deterministic_algorithms(True)
    try:
        on = asked().reduce("gpu", "band").item()
    finally:
        torch.use_deterministic_algorithms(False)
    assert on and not asked().reduce("gpu", "bor").item()


def _entry_of(mesh: Any, func: Any) -> Any:
    return next(e for key, e in mesh.client.cache.entries.items() if key[0] is func)


def test_a_wrong_prediction_is_an_error_that_names_op_rank_and_shapes_and_is_forgotten(mesh: Any) -> None:
    @ml.remote
    def grown(x: Any) -> Any:
        import builtins

        n = builtins.__dict__.setdefault("_grown", 2)
        return torch.zeros(n)

    @ml.remote
    def grow(x: Any) -> Any:
        import builtins

        builtins.__dict__["_grown"] = 5
        return x

    x = mesh.replicate(torch.ones(1))
    for _ in range(2):
        assert grown(x).shape == (2,)
    entries = len(mesh.client.cache.entries)
    grow(x)
    wrong = grown(x)
    with pytest.raises(ml.RemoteException) as raised:
        mesh.sync()
    text = str(raised.value)
    assert "(5,)" in text and "(2,)" in text and "rank" in text and raised.value.ranks == (0, 1)
    assert raised.value.issued[0].source == "wrong = grown(x)"
    del wrong
    assert len(mesh.client.cache.entries) <= entries
    assert grown(x).shape == (5,)
    assert grown(x).shape == (5,)


def test_a_forced_wrong_entry_is_noticed_by_the_worker(mesh: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from monarch_lab.controller import learning

    x = mesh.replicate(torch.ones(3))
    real = learning._keep

    def keep_wrong(call: Any, entry: Any, template: int, answer: Any) -> None:
        outputs = [msgspec.structs.replace(m, shape=(4,), stride=(1,)) for m in answer.outputs]
        entry.outputs = [intern(m) for m in outputs]
        real(call, entry, template, msgspec.structs.replace(answer, outputs=outputs))

    monkeypatch.setattr(learning, "_keep", keep_wrong)
    x.erfinv()
    monkeypatch.undo()
    x.erfinv()
    with pytest.raises(ml.RemoteException, match=r"erfinv.*\(3,\).*rank.*\(4,\)") as raised:
        mesh.sync()
    assert raised.value.ranks == (0, 1)
    good = x.erfinv()
    assert good.shape == (3,)
    assert_metadata_is_true(good)
    assert len(by_rank(good)) == 2


def test_a_full_cache_starts_afresh_and_stays_right(mesh: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mesh.client.cache, "_limit", 20)
    x = mesh.replicate(torch.zeros(3, dtype=torch.int64))
    for k in range(60):
        assert ml.inspect(x + k).tolist() == [k] * 3
    assert len(mesh.client.cache.entries) <= 20


def test_mixed_kinds_of_one_call_never_share_an_answer(cell: Any) -> None:
    x = torch.arange(6).view(2, 3)
    for _ in range(2):
        assert x.sum(0).shape == (3,) and x.sum(1).shape == (2,)
        assert x.sum((0, 1)).shape == () and x.sum([0], True).shape == (1, 3) and x.sum(dim=0, keepdim=True).ndim == 2
        assert x[0].shape == (3,) and x[0:1].shape == (1, 3) and x[(0, 1)].shape == () and x[[0, 1]].shape == (2, 3)
        assert x[None].shape == (1, 2, 3) and x[...].shape == (2, 3) and x[..., 0].shape == (2,)
        assert x[True].shape == (1, 2, 3) and x[1].tolist() == [3, 4, 5]
        assert x.to(torch.int32).dtype == torch.int32 and x.to("cpu").dtype == torch.int64


def test_deletes_on_a_part_of_the_mesh_reach_every_rank(cell: Any) -> None:
    @ml.remote
    def cells() -> Any:
        import gc

        return torch.tensor(len(next(o for o in gc.get_objects() if type(o).__name__ == "Engine").cells))

    part = cell.slice(gpu=0)
    with part.activate():
        y = torch.ones(1)
        y = y + 0.5
        y = y + 0.5
    before = [v.item() for v in by_rank(cells())]
    many = [torch.rand(2) for _ in range(100)]
    with part.activate():
        y = y + 0.5
        del many
        y = y + 0.5
        ml.inspect(y)
    after = [v.item() for v in by_rank(cells())]
    assert all(a - b < 20 for a, b in zip(after, before, strict=True)), (before, after)


def test_a_tensor_given_as_a_number_is_no_reason_to_ask_again(cell: Any) -> None:
    """As LBFGS does: p.add_(direction, alpha=t)."""
    x, alpha = torch.zeros(2), torch.ones(2).sum()
    for k in range(4):
        before = cell.client.cache.misses
        x.add_(torch.ones(2), alpha=alpha * (k + 1))
        y = torch.sub(x, torch.ones(2), alpha=alpha)
        z = x.addcmul(x, x, value=alpha)
    assert cell.client.cache.misses == before
    assert rank_values(x) == [[20, 20]] * 2 and y.tolist() == [18, 18] and z.tolist() == [820, 820]


def test_asking_for_a_gradient_of_a_detached_tensor_waits_for_nothing(cell: Any) -> None:
    w = torch.full((2,), 3.0).requires_grad_()
    for k in range(4):
        cell.client.flush()
        asked = cell.client._last_ident
        x = w.detach().requires_grad_()
        part = w.detach()[:1].requires_grad_()
        assert k == 0 or cell.client._last_ident == asked
        (x * x).sum().backward()
        part.sum().backward()
        assert x.grad.tolist() == [6, 6] and part.grad.tolist() == [1] and w.grad is None
        assert_metadata_is_true(w, x, part)
    base = torch.zeros(2)
    view = base[:1]
    with torch.enable_grad():
        view.mul_(torch.ones(1).requires_grad_())  # a view that is written makes its base require grad
    assert base.requires_grad
    assert_metadata_is_true(base, view)
