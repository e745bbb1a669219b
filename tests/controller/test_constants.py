"""0-dim tensors made from numbers: kept in the kernel, and never told from any other tensor by their values."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.controller.compare import assert_metadata_is_true, own_number, rank_values, run_on_both


def test_arithmetic_of_numbers_is_that_of_plain_torch(mesh: Any) -> None:
    def run() -> Any:
        a, b, n = torch.tensor(2.0), torch.tensor(3.0, dtype=torch.float64), torch.tensor(7)
        out = [a + b, a * n, n // 2, n % 3, a**b, -a, a < b, n == 7, a.sqrt(), a.to(torch.int32), n.float(), 1 / a]
        out += [torch.zeros(()), torch.ones([]), torch.full((), 5), a.clone(), a.detach(), torch.maximum(a, b.float())]
        a += 1
        n -= torch.tensor(2)
        return [*out, a, n]

    run_on_both(mesh, run)


def test_numbers_meet_tensors_by_the_rules_of_promotion(mesh: Any) -> None:
    def run() -> Any:
        x, i = torch.arange(3.0), torch.arange(3)
        f, d, n = torch.tensor(0.5), torch.tensor(0.5, dtype=torch.float64), torch.tensor(2)
        return [
            x * f,
            x * d,
            i * f,
            i * d,
            i * n,
            x - n,
            n - x,
            f / x,
            x.pow(n),
            torch.where(x > f, x, d),
            x.add(f, alpha=2),
            torch.stack([f, f + 1]),
            torch.cat([x, f.reshape(1)]),
            x[n],
            x.clamp(min=f),
            x.lerp(x + 1, f),
            f.expand(3),
            f.view(1),
            f[None],
            x.index_fill(0, torch.tensor([1]), f),
            torch.full_like(x, 2.0) * f,
            x.masked_fill(x > 1, f),
        ]

    run_on_both(mesh, run)


def test_a_write_to_a_number_reaches_its_aliases(mesh: Any) -> None:
    def run() -> Any:
        out = []
        for k in range(2):
            a = torch.tensor(1.0)
            b, v = a.detach(), a.view(1)
            v.add_(1)
            b.mul_(3)
            a.sub_(0.5)
            c = torch.tensor(1.0)
            d = c.detach()
            d.add_(torch.arange(3.0).sum())
            e = torch.tensor(1.0)
            f = e.data
            f.fill_(9)
            e.data.add_(k)
            g = torch.tensor(2.0)
            h = g.detach()
            g.copy_(torch.arange(3.0)[1])
            out += [a, b, v, c, d, e, f, g, h]
        return out

    run_on_both(mesh, run)


def test_a_number_that_becomes_unequal_is_known_so(cell: Any) -> None:
    a = torch.tensor(1.0)
    a.add_(own_number(cell))
    assert rank_values(a) == [1, 2]
    with pytest.raises(TypeError, match="fetch_all"):
        a.item()


def test_a_number_can_require_grad(mesh: Any) -> None:
    def run() -> Any:
        a = torch.tensor(2.0, requires_grad=True)
        b = torch.tensor(3.0).requires_grad_()
        c = torch.nn.Parameter(torch.tensor(4.0))
        (a * b * c * torch.arange(3.0)).sum().backward()
        return a.grad, b.grad, c.grad

    run_on_both(mesh, run)


def test_a_number_knows_its_metadata_once_it_is_sent(cell: Any) -> None:
    a = torch.tensor(2, dtype=torch.int32)
    a.view(1).add_(1)
    assert a.item() == 3
    assert_metadata_is_true(a)


def test_a_number_indexes_counts_and_prints_as_one(cell: Any) -> None:
    n = torch.tensor(2)
    assert [10, 20, 30][n] == 30 and list(range(n)) == [0, 1] and f"{n}" == "2" and "tensor(2)" in repr(n)
    assert int(n) == 2 and float(n) == 2.0 and bool(n) and n.tolist() == 2 and n.numpy() == 2
    assert torch.arange(5)[n].item() == 2 and torch.zeros(int(n)).shape == (2,)


def test_a_number_in_place_beside_a_tensor_keeps_its_dtype_rules(cell: Any) -> None:
    n = torch.tensor(2)
    with pytest.raises(RuntimeError, match="can't be cast"):
        n.add_(torch.tensor(0.5))
    with pytest.raises(RuntimeError, match="can't be cast|result type"):
        n.mul_(torch.arange(2.0).sum())
    assert n.item() == 2
