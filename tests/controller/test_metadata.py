"""What the controller knows of a tensor without having it (rules 4 and 5): always what the workers have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import monarch_lab as ml
from tests.controller.compare import assert_metadata_is_true, run_on_both


def base() -> Any:
    return torch.arange(12.0).view(3, 4)


_CHANGES: dict[str, Callable[[Any], Any]] = {
    "t_": lambda x: x.t_(),
    "transpose_": lambda x: x.transpose_(0, 1),
    "unsqueeze_": lambda x: x.unsqueeze_(0),
    "squeeze_": lambda x: x.unsqueeze_(0).squeeze_(0),
    "resize_": lambda x: x.resize_(2, 3),
    "as_strided_": lambda x: x.as_strided_((2, 2), (1, 2), 1),
    "swapdims_": lambda x: x.swapdims_(0, 1),
    "set_": lambda x: x.set_(torch.ones(2, 5)),
    "resize_as_": lambda x: x.resize_as_(torch.ones(2, 2)),
}


@pytest.mark.parametrize("name", list(_CHANGES))
def test_a_change_of_metadata_in_place_is_known(mesh: Any, name: str) -> None:
    def run() -> Any:
        seen = []
        for _ in range(3):
            x = base()
            out = _CHANGES[name](x)
            assert out is x
            seen.append((x.shape, x.stride(), x.storage_offset(), (x * 2).shape, tuple(x.size()), len(x)))
        return [x, x + 1, seen[0][0] == seen[2][0], seen[0][1] == seen[2][1], *seen[0][0], *seen[0][1], seen[0][2]]

    (x, *_), _ = run_on_both(mesh, run)
    assert_metadata_is_true(x)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.int32])
def test_data_of_another_dtype_changes_the_handle(cell: Any, dtype: torch.dtype) -> None:
    for _ in range(2):
        x = base()
        x.data = x.to(dtype)
        assert x.dtype == dtype and x.element_size() == dtype.itemsize
        assert (x + x).dtype == dtype
        assert_metadata_is_true(x)


def test_data_of_another_shape_changes_the_handle(mesh: Any) -> None:
    def run() -> Any:
        x = base()
        y = x * 1
        x.data = torch.ones(2, 2)
        x.add_(1)
        z = torch.zeros(2, 2)
        x.data = z
        x.add_(5)
        return x, y, z, x.sum()

    (x, y, z, _), _ = run_on_both(mesh, run)
    assert_metadata_is_true(x, y, z)


def test_writes_through_data_reach_the_tensor(mesh: Any) -> None:
    def run() -> Any:
        w = base().requires_grad_()
        w.data.mul_(2)
        w.data[0].zero_()
        w.detach()[1].fill_(9)
        return w.detach(), (w * 1).sum().detach()

    run_on_both(mesh, run)


def test_a_view_written_under_autograd_makes_its_base_require_grad(cell: Any) -> None:
    for _ in range(2):
        x = base()
        row, other = x[0], x[1]
        w = torch.ones(4).requires_grad_()
        row.mul_(w)
        for t in (x, row, other):
            assert t.requires_grad and not t.is_leaf
        assert_metadata_is_true(x, row, other)
        x.sum().backward()
        assert w.grad.tolist() == [0, 1, 2, 3]


def test_a_base_written_under_autograd_makes_its_views_require_grad(cell: Any) -> None:
    for _ in range(2):
        x = base()
        row = x[0]
        w = torch.tensor(3.0).requires_grad_()
        x.mul_(w)
        assert x.requires_grad and row.requires_grad
        assert_metadata_is_true(x, row)
        row.sum().backward()
        assert w.grad.item() == 6


def test_a_chain_of_writes_to_a_base_and_its_views_gives_the_gradients_of_plain_torch(mesh: Any) -> None:
    def run() -> Any:
        a, b = torch.ones(4).requires_grad_(), torch.full((3,), 2.0).requires_grad_()
        grads = []
        for _ in range(2):
            x = base()
            x[0].mul_(a)
            column = x[:, 1]
            column.add_(b)
            x[1:3, 1:3] = x[1:3, 1:3] * 2
            column.mul_(column.detach().clone())
            grads += torch.autograd.grad(x.pow(2).sum(), (a, b))
        return [x.detach(), column.detach(), *grads]

    run_on_both(mesh, run)


def test_requires_grad_of_an_alias_is_its_own(cell: Any) -> None:
    x = torch.ones(3)
    y = x.detach()
    x.requires_grad_()
    assert x.requires_grad and not y.requires_grad
    y.requires_grad_()
    y.requires_grad_(False)
    assert x.requires_grad
    assert_metadata_is_true(x, y)


def test_a_leaf_in_place_is_refused_as_in_plain_torch(cell: Any) -> None:
    w = torch.ones(3).requires_grad_()
    with pytest.raises(RuntimeError, match="leaf"):
        w.add_(1)
    with torch.no_grad():
        w.add_(1)
    assert w.tolist() == [2, 2, 2]


def test_writes_through_views_are_seen_by_every_alias(mesh: Any) -> None:
    def run() -> Any:
        x = base()
        views = [x[0], x.t(), x.view(-1), x[:, ::2], x.unsqueeze(0), x.diagonal(), *x.unbind(0), *x.chunk(2, 1)]
        for k, v in enumerate(views):
            v.add_(k)
        x[1, 2] = 50
        x[:, 0] = torch.ones(3)
        x[[0, 2], 1] += 3
        x.masked_fill_(x > 40, -1)
        x.index_add_(0, torch.tensor([0, 0]), torch.ones(2, 4))
        x.scatter_(1, torch.tensor([[0], [1], [2]]), 7.0)
        return [x, *views]

    (x, *views), _ = run_on_both(mesh, run)
    assert_metadata_is_true(x, *views)


def test_the_same_op_is_told_apart_by_dtype_strides_and_grad(cell: Any) -> None:
    for _ in range(2):
        plain = base()
        kinds = [plain, plain.double(), plain.t(), plain.int(), plain[::2], plain[:1].expand(3, 4), plain.bool()]
        kinds += [base().requires_grad_(), base().requires_grad_() * 1, plain.to(memory_format=torch.preserve_format)]
        for k in kinds:
            assert_metadata_is_true(k + k, k.contiguous(), k.clone(), k.t(), k.sum(0), k[0], k.reshape(-1))


def test_memory_formats_travel_with_the_metadata(cell: Any) -> None:
    x = torch.rand(2, 3, 4, 4)
    y = x.to(memory_format=torch.channels_last)
    for _ in range(2):
        for t in (x, y):
            out = nn.functional.relu(t)
            assert out.is_contiguous(memory_format=torch.channels_last) == (t is y)
            assert out.is_contiguous() == (t is x)
            assert_metadata_is_true(out, nn.functional.conv2d(t, torch.ones(2, 3, 3, 3)))


def test_the_default_dtype_decides_what_factories_make(cell: Any) -> None:
    for dtype in (torch.float64, torch.float32, torch.float64):
        torch.set_default_dtype(dtype)
        try:
            made = [torch.rand(2), torch.zeros(2), torch.tensor([1.0]), torch.arange(0, 1, 0.5), torch.tensor(1.5)]
            made += [torch.ones(2, dtype=torch.int64) / 2, torch.ones(2, dtype=torch.int64) * 0.5]
        finally:
            torch.set_default_dtype(torch.float32)
        for t in made:
            assert t.dtype == dtype
        assert_metadata_is_true(*made[:4], *made[5:])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_decides_the_dtype_of_results(mesh: Any, dtype: torch.dtype) -> None:
    def run() -> Any:
        layer, x = nn.Linear(4, 4), torch.randn(2, 4)
        outs = []
        for _ in range(2):
            with torch.autocast("cpu", dtype=dtype):
                y = layer(x)
                assert y.dtype == dtype
                with torch.autocast("cpu", enabled=False):
                    z = layer(x)
                    assert z.dtype == torch.float32
            u = layer(x)
            assert u.dtype == torch.float32
            (y.float().sum() + z.sum() + u.sum()).backward()
            outs += [y.float().detach(), z.detach()]
        return outs, layer.weight.grad

    run_on_both(mesh, run, 1e-2)


def test_a_weight_changed_between_autocast_blocks_is_cast_afresh(mesh: Any) -> None:
    def run() -> Any:
        layer, x = nn.Linear(4, 4), torch.ones(2, 4)
        with torch.autocast("cpu"):
            first = layer(x)
        with torch.autocast("cpu"):
            with torch.no_grad():
                layer.weight.mul_(2)
            second = layer(x)
        return first.detach().float(), second.detach().float()

    run_on_both(mesh, run, 1e-2)


def test_the_attributes_of_a_tensor_are_those_of_each_process(mesh: Any) -> None:
    def run() -> Any:
        x = torch.rand(2, 3, dtype=torch.complex64).conj().t()
        real = base()[1:, ::2]
        return [
            x.is_conj(),
            x.is_complex(),
            x.dim(),
            x.ndim,
            x.numel(),
            x.nelement(),
            x.element_size(),
            x.itemsize,
            x.nbytes,
            x.is_floating_point(),
            x.is_signed(),
            real.storage_offset(),
            real.is_contiguous(),
            *real.stride(),
            real.stride(0),
            real.size(-1),
            len(real),
            real.is_leaf,
            real._is_view(),
            x.is_sparse,
            real.get_device(),
            torch.is_tensor(real),
            torch.numel(real),
            torch.is_complex(x),
            real.dtype is torch.float32,
            real.layout is torch.strided,
            real.device.type == "cpu",
            real.is_cuda,
            real.is_cpu,
            x._version,
        ]

    run_on_both(mesh, run)


def test_the_version_of_a_tensor_is_never_an_old_one(cell: Any) -> None:
    x = torch.zeros(3)
    before = x._version
    x.add_(1)
    assert x._version == before + 1
    x.add_(1)
    x.add_(1)
    assert x._version == before + 3


@pytest.mark.parametrize("result", ["complex", "real", "imag", "T", "mT", "H"])
def test_views_by_attribute_share_the_data(mesh: Any, result: str) -> None:
    def run() -> Any:
        x = torch.arange(4.0).view(2, 2).to(torch.complex64) * (1 + 1j)
        if result == "complex":
            parts = torch.view_as_real(x)
            parts[..., 0] = 7
            return x, parts
        view = getattr(x, result)
        view.mul_(3)
        return x, view.resolve_conj() if result == "H" else view

    run_on_both(mesh, run)


def test_real_and_imag_can_be_assigned(mesh: Any) -> None:
    def run() -> Any:
        x = torch.zeros(3, dtype=torch.complex64)
        x.real = torch.arange(3.0)
        x.imag = torch.ones(3)
        return x

    run_on_both(mesh, run)


def test_named_results_have_their_fields(mesh: Any) -> None:
    def run() -> Any:
        x = torch.tensor([[3.0, 1.0], [2.0, 5.0]])
        top, low = x.max(dim=1), torch.sort(x, descending=True)
        svd, slog = torch.linalg.svd(x), torch.linalg.slogdet(x)
        return [top.values, top.indices, low.values, low.indices, svd.S, slog.logabsdet, *x.topk(1), *torch.frexp(x)]

    run_on_both(mesh, run, 1e-5)


def test_results_with_structure_come_back_in_it(mesh: Any) -> None:
    def run() -> Any:
        x = base()
        return [
            torch.split(x, [1, 3], 1),
            torch.unbind(x),
            torch.meshgrid(x[0], x[1], indexing="ij"),
            torch.broadcast_tensors(x, x[0]),
            torch.stack([x, x]),
            torch.cat((x, x), 1),
            torch.einsum("ij,kj->ik", x, x),
            torch.where(x > 3, x, 0.0),
            torch._foreach_add([x, x[0]], 2.0),
            torch.tensor_split(x, 2),
            x.tensor_split([1]),
        ]

    run_on_both(mesh, run)


def test_a_result_that_is_its_input_stays_the_same_object(cell: Any) -> None:
    x = base()
    for _ in range(2):
        assert x.contiguous() is x and x.to(torch.float32) is x and x.float() is x and x.requires_grad_(False) is x
        assert nn.functional.dropout(x, 0.5, training=False) is not None
        assert x.t().contiguous() is not x
        out = torch.empty(3, 4)
        assert torch.add(x, x, out=out) is out
        assert_metadata_is_true(out)


def test_a_cast_of_a_tensor_to_a_local_device_string_stays_on_the_mesh(cell: Any) -> None:
    x = base()
    for y in (x.cpu(), x.to("cpu"), x.to(torch.device("cpu"), torch.float64), torch.ones(2, device="cpu")):
        assert y.mesh is cell


def test_factories_like_a_mesh_tensor_work_without_an_active_mesh(mesh: Any) -> None:
    x = mesh.replicate(base())
    made = [torch.zeros_like(x), x.new_ones(2), torch.rand_like(x), x.new_tensor([1.0, 2.0]), torch.full_like(x, 3.0)]
    for t in made:
        assert t.mesh is mesh
    assert_metadata_is_true(*made)
    assert type(torch.ones(2)) is torch.Tensor
    assert ml.inspect(made[3]).tolist() == [1, 2]
