"""nn modules built and run in a cell: the outputs, gradients and buffers of plain torch, twice in a row."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

import monarch_lab as ml
from tests.controller.compare import assert_same, by_rank, own_number, run_on_both


def floats(*shape: int) -> Callable[[], torch.Tensor]:
    return lambda: torch.randn(*shape)


def words(below: int, *shape: int) -> Callable[[], torch.Tensor]:
    return lambda: torch.randint(below, shape)


def run(make: Callable[[], Any], inputs: Any, *, train: bool) -> Any:
    module = make().train(train)
    given = [i() for i in inputs]
    for x in given:
        if x.is_floating_point():
            x.requires_grad_()
    outputs = []
    for _ in range(2):
        out = tree_leaves(module(*given))
        wanted = [t for t in out if isinstance(t, torch.Tensor) and t.requires_grad]
        if wanted:
            sum(t.pow(2).sum() for t in wanted).backward()
        outputs.append([t.detach() for t in out if isinstance(t, torch.Tensor)])
    gradients = [p.grad for p in module.parameters()] + [x.grad for x in given if x.is_floating_point()]
    return outputs, gradients, list(module.buffers())


_MODULES: dict[str, tuple[Any, ...]] = {
    "Linear": (lambda: nn.Linear(3, 2), floats(4, 3)),
    "Bilinear": (lambda: nn.Bilinear(3, 2, 2), floats(4, 3), floats(4, 2)),
    "Conv1d": (lambda: nn.Conv1d(2, 3, 3), floats(2, 2, 8)),
    "Conv2d": (lambda: nn.Conv2d(2, 3, 3, padding="same", padding_mode="circular"), floats(2, 2, 8, 8)),
    "Conv3d": (lambda: nn.Conv3d(1, 2, 2), floats(1, 1, 4, 4, 4)),
    "ConvTranspose2d": (lambda: nn.ConvTranspose2d(2, 3, 3, stride=2), floats(2, 2, 4, 4)),
    "ConvTranspose3d": (lambda: nn.ConvTranspose3d(1, 2, 2), floats(1, 1, 3, 3, 3)),
    "BatchNorm1d": (lambda: nn.BatchNorm1d(3), floats(4, 3)),
    "BatchNorm1d, cumulative": (lambda: nn.BatchNorm1d(3, momentum=None), floats(4, 3)),
    "BatchNorm2d": (lambda: nn.BatchNorm2d(2), floats(2, 2, 3, 3)),
    "InstanceNorm1d": (lambda: nn.InstanceNorm1d(3, affine=True, track_running_stats=True), floats(2, 3, 5)),
    "LayerNorm": (lambda: nn.LayerNorm(3), floats(4, 3)),
    "LayerNorm, no affine": (lambda: nn.LayerNorm(3, elementwise_affine=False), floats(4, 3)),
    "LayerNorm, no bias": (lambda: nn.LayerNorm(3, bias=False), floats(4, 3)),
    "GroupNorm": (lambda: nn.GroupNorm(2, 4), floats(2, 4, 3)),
    "RMSNorm": (lambda: nn.RMSNorm(3), floats(4, 3)),
    "LocalResponseNorm": (lambda: nn.LocalResponseNorm(2), floats(2, 4, 3)),
    "Embedding": (lambda: nn.Embedding(5, 3), words(5, 2, 3)),
    "Embedding, padding": (lambda: nn.Embedding(5, 3, padding_idx=1), words(5, 2, 3)),
    "Embedding, max norm": (lambda: nn.Embedding(5, 3, max_norm=0.5), words(5, 2, 3)),
    "EmbeddingBag": (lambda: nn.EmbeddingBag(5, 3), words(5, 2, 3)),
    "RNN": (lambda: nn.RNN(3, 4, 2), floats(5, 2, 3)),
    "LSTM": (lambda: nn.LSTM(3, 4, 2, bidirectional=True, batch_first=True, dropout=0.3), floats(5, 2, 3)),
    "GRU": (lambda: nn.GRU(3, 4), floats(5, 2, 3)),
    "LSTMCell": (lambda: nn.LSTMCell(3, 4), floats(2, 3)),
    "GRUCell": (lambda: nn.GRUCell(3, 4), floats(2, 3)),
    "MaxPool2d": (lambda: nn.MaxPool2d(2, return_indices=True), floats(1, 2, 4, 4)),
    "AvgPool2d": (lambda: nn.AvgPool2d(2), floats(1, 2, 4, 4)),
    "AdaptiveMaxPool2d": (lambda: nn.AdaptiveMaxPool2d((2, None)), floats(1, 2, 4, 4)),
    "LPPool2d": (lambda: nn.LPPool2d(2.0, 2), floats(1, 2, 4, 4)),
    "FractionalMaxPool2d": (lambda: nn.FractionalMaxPool2d(2, output_ratio=0.5), floats(1, 2, 8, 8)),
    "Dropout": (lambda: nn.Dropout(0.5), floats(4, 4)),
    "Dropout, none": (lambda: nn.Dropout(0.0), floats(4, 4)),
    "Dropout2d": (lambda: nn.Dropout2d(0.5), floats(2, 4, 2, 2)),
    "AlphaDropout": (lambda: nn.AlphaDropout(0.5), floats(4, 4)),
    "RReLU": (lambda: nn.RReLU(), floats(4, 4)),
    "PReLU": (lambda: nn.PReLU(), floats(4, 4)),
    "GELU": (lambda: nn.GELU("tanh"), floats(4, 4)),
    "ReLU, in place": (lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True)), floats(4, 4)),
    "Upsample": (lambda: nn.Upsample(scale_factor=2.0, mode="bilinear"), floats(1, 1, 3, 3)),
    "PixelShuffle": (lambda: nn.PixelShuffle(2), floats(1, 4, 2, 2)),
    "Unfold": (lambda: nn.Unfold(2), floats(1, 1, 4, 4)),
    "ReflectionPad1d": (lambda: nn.ReflectionPad1d(1), floats(1, 2, 4)),
    "CosineSimilarity": (lambda: nn.CosineSimilarity(), floats(3, 4), floats(3, 4)),
    "CrossEntropyLoss": (lambda: nn.CrossEntropyLoss(label_smoothing=0.1), floats(3, 4), words(4, 3)),
    "NLLLoss": (nn.NLLLoss, floats(3, 4), words(4, 3)),
    "MSELoss": (nn.MSELoss, floats(3), floats(3)),
    "L1Loss": (nn.L1Loss, floats(3), floats(3)),
    "HuberLoss": (nn.HuberLoss, floats(3), floats(3)),
    "KLDivLoss": (lambda: nn.KLDivLoss(reduction="batchmean"), floats(3, 2), lambda: torch.rand(3, 2)),
    "BCEWithLogitsLoss": (nn.BCEWithLogitsLoss, floats(3), lambda: torch.rand(3)),
    "TripletMarginLoss": (nn.TripletMarginLoss, floats(3, 2), floats(3, 2), floats(3, 2)),
    "MultiMarginLoss": (nn.MultiMarginLoss, floats(3, 4), words(4, 3)),
    "GaussianNLLLoss": (nn.GaussianNLLLoss, floats(3), floats(3), lambda: torch.rand(3) + 0.1),
    "MultiheadAttention": (
        lambda: nn.MultiheadAttention(4, 2, dropout=0.1, batch_first=True),
        floats(2, 3, 4),
        floats(2, 3, 4),
        floats(2, 3, 4),
    ),
    "TransformerEncoder": (
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), 2),
        floats(2, 3, 4),
    ),
    "TransformerDecoderLayer": (lambda: nn.TransformerDecoderLayer(4, 2, 8), floats(3, 2, 4), floats(3, 2, 4)),
    "Transformer": (lambda: nn.Transformer(4, 2, 1, 1, 8), floats(3, 2, 4), floats(3, 2, 4)),
}
_WITH_TWO_WAYS = [
    k for k in _MODULES if k.startswith(("BatchNorm", "Instance", "Dropout", "LSTM", "RReLU", "Multihead", "Transf"))
]


@pytest.mark.parametrize("name", list(_MODULES))
def test_a_module_in_training_gives_what_plain_torch_gives(mesh: Any, name: str) -> None:
    make, *inputs = _MODULES[name]
    run_on_both(mesh, lambda: run(make, inputs, train=True), 1e-5)


@pytest.mark.parametrize("name", _WITH_TWO_WAYS)
def test_a_module_in_evaluation_gives_what_plain_torch_gives(mesh: Any, name: str) -> None:
    make, *inputs = _MODULES[name]
    run_on_both(mesh, lambda: run(make, inputs, train=False), 1e-5)


def test_a_packed_sequence_runs_through_an_lstm(mesh: Any) -> None:
    def packed() -> Any:
        x, layer = torch.randn(5, 2, 3), nn.LSTM(3, 4)
        out, state = layer(nn.utils.rnn.pack_padded_sequence(x, [5, 3]))
        return nn.utils.rnn.pad_packed_sequence(out)[0].detach(), [s.detach() for s in state]

    run_on_both(mesh, packed)


def test_an_encoder_without_gradients_gives_what_plain_torch_gives(mesh: Any) -> None:
    def encode() -> Any:
        layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
        encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
        with torch.no_grad():
            return encoder(torch.randn(2, 3, 4))

    run_on_both(mesh, encode, 1e-5)


def test_ctc_loss_takes_its_lengths_as_tensors(mesh: Any) -> None:
    def loss() -> Any:
        x = torch.randn(5, 2, 4).log_softmax(2)
        return F.ctc_loss(x, torch.tensor([[1, 2], [3, 1]]), torch.tensor([5, 5]), torch.tensor([2, 2]))

    run_on_both(mesh, loss)


def test_a_module_built_in_a_cell_is_equal_on_every_process_and_known_so(cell: Any) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.LSTM(4, 2))
    for t in [*model.parameters(), *model.buffers()]:
        assert t.equal_dims == ("host", "gpu")
        first, second = by_rank(t)
        assert torch.equal(first, second)


def test_dropout_masks_the_same_elements_on_every_process(cell: Any) -> None:
    out = F.dropout(torch.ones(100), 0.5)
    first, second = by_rank(out)
    assert torch.equal(first, second) and 0 < first.count_nonzero() < 100
    assert out.equal_dims == ("host", "gpu")


def test_a_state_dict_loads_into_another_mesh_module(cell: Any) -> None:
    first, second = nn.Linear(3, 2), nn.Linear(3, 2)
    assert not torch.equal(first.weight, second.weight)
    second.load_state_dict(first.state_dict())
    assert torch.equal(first.weight, second.weight)
    with torch.no_grad():
        first.weight.add_(1)
    assert not torch.equal(first.weight, second.weight)


def test_the_state_of_a_batch_norm_loads_into_another(cell: Any) -> None:
    first, second = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
    first(torch.randn(8, 3) + 4)
    second.load_state_dict(first.state_dict())
    assert torch.equal(first.running_mean, second.running_mean)
    assert second.num_batches_tracked.item() == 1


def test_running_statistics_of_unequal_batches_are_known_unequal(cell: Any) -> None:
    norm = nn.BatchNorm1d(3)
    batch = torch.randn(8, 3) + own_number(cell) * 5
    for _ in range(2):
        norm(batch)
        first, second = by_rank(norm.running_mean)
        assert not torch.equal(first, second)
        for buffer in (norm.running_mean, norm.running_var):
            with pytest.raises(TypeError, match="fetch_all"):
                buffer.tolist()
    assert norm.num_batches_tracked.item() == 2


def test_running_statistics_of_an_instance_norm_are_known_unequal(cell: Any) -> None:
    norm = nn.InstanceNorm1d(3, track_running_stats=True)
    norm(torch.randn(2, 3, 8) + own_number(cell) * 5)
    with pytest.raises(TypeError, match="fetch_all"):
        norm.running_mean.tolist()


def test_a_deep_copy_of_a_module_has_parameters_of_its_own(cell: Any) -> None:
    model = nn.Linear(3, 2)
    twin = copy.deepcopy(model)
    assert isinstance(twin.weight, nn.Parameter) and twin.weight.requires_grad and twin.weight.is_leaf
    with torch.no_grad():
        twin.weight.zero_()
    assert not torch.equal(model.weight, twin.weight)
    twin(torch.ones(1, 3)).sum().backward()
    assert model.weight.grad is None and twin.weight.grad.tolist() == [[1, 1, 1], [1, 1, 1]]


def test_a_deep_copy_keeps_tied_weights_tied(cell: Any) -> None:
    model = nn.ModuleDict({"in": nn.Linear(2, 2, bias=False), "out": nn.Linear(2, 2, bias=False)})
    model["out"].weight = model["in"].weight
    twin = copy.deepcopy(model)
    assert twin["out"].weight is twin["in"].weight
    assert len(list(twin.parameters())) == 1


def test_a_deep_copy_keeps_views_of_one_storage_together(mesh: Any) -> None:
    def copied() -> Any:
        flat = torch.arange(6.0)
        pair = [flat[:3], flat[3:].view(3, 1)]
        whole, (a, b) = copy.deepcopy([flat, pair])
        a.fill_(7)
        b.add_(1)
        return whole, a, b, flat

    run_on_both(mesh, copied)


def test_a_deep_copy_takes_the_gradient_along(cell: Any) -> None:
    weight = nn.Parameter(torch.ones(2))
    (weight * 3).sum().backward()
    twin = copy.deepcopy(weight)
    assert twin.grad.tolist() == [3, 3] and twin.grad is not weight.grad


def test_modules_change_their_dtype_in_place(mesh: Any) -> None:
    def changed() -> Any:
        model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
        weight = model[0].weight
        model(torch.randn(4, 3)).sum().backward()
        model.double()
        assert model[0].weight is weight and weight.dtype == weight.grad.dtype == torch.float64
        out = model(torch.randn(4, 3).double())
        model.zero_grad()
        out.pow(2).sum().backward()
        assert out.dtype == weight.grad.dtype == torch.float64
        model.to(torch.float32)
        return [p.detach() for p in model.parameters()], list(model.buffers()), out.detach(), weight.grad

    run_on_both(mesh, changed, 1e-5)


def test_a_parameter_of_a_parameter_is_a_parameter(cell: Any) -> None:
    first = nn.Parameter(torch.ones(2))
    second = nn.Parameter(first)
    assert isinstance(second, nn.Parameter) and second.requires_grad
    third = nn.Parameter(first.data, requires_grad=False)
    assert isinstance(third, nn.Parameter) and not third.requires_grad


def test_weight_norm_trains_as_in_plain_torch(mesh: Any) -> None:
    def fit() -> Any:
        model = nn.utils.parametrizations.weight_norm(nn.Linear(3, 2))
        model(torch.randn(2, 3)).pow(2).sum().backward()
        return [p.grad for p in model.parameters()]

    run_on_both(mesh, fit, 1e-5)


def test_functional_call_runs_a_module_on_other_parameters(mesh: Any) -> None:
    def called() -> Any:
        model = nn.Linear(3, 2)
        other = {name: torch.ones_like(p) for name, p in model.named_parameters()}
        return torch.func.functional_call(model, other, (torch.ones(1, 3),))

    run_on_both(mesh, called)


def test_forward_hooks_of_a_module_run_in_the_kernel(cell: Any) -> None:
    seen: list[Any] = []
    model = nn.Linear(3, 2)
    model.register_forward_hook(lambda module, args, out: seen.append(out))
    out = model(torch.ones(1, 3))
    assert seen[0] is out


def test_a_replicated_module_gives_what_the_local_one_gives(mesh: Any) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    batch = torch.randn(5, 3)
    far = mesh.replicate(model)
    for _ in range(2):
        assert_same(far(mesh.replicate(batch)), model(batch))
    assert_same(list(far.buffers()), list(model.buffers()))
    assert isinstance(far[0].weight, nn.Parameter)
    assert not getattr(model[0].weight, "is_mesh_tensor", False)


def test_checkpoint_without_reentry_gives_the_gradients_of_plain_torch(mesh: Any) -> None:
    from torch.utils.checkpoint import checkpoint

    def fit() -> Any:
        model, x = nn.Linear(3, 3), torch.randn(2, 3)
        checkpoint(model, x, use_reentrant=False).pow(2).sum().backward()
        return [p.grad for p in model.parameters()]

    run_on_both(mesh, fit, 1e-5)


def test_a_module_of_no_mesh_stays_local_while_a_mesh_is_active(cell: Any) -> None:
    with ml.no_mesh.activate():
        model, x = nn.Linear(3, 2), torch.ones(1, 3)
    out = model(x)
    assert type(out) is torch.Tensor


def test_lazy_modules_get_their_shape_in_place(mesh: Any) -> None:
    def run() -> Any:
        model = nn.Sequential(nn.LazyConv1d(4, 2), nn.LazyBatchNorm1d(), nn.Flatten(), nn.LazyLinear(2))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        twin = nn.Sequential(nn.LazyConv1d(4, 2), nn.LazyBatchNorm1d(), nn.Flatten(), nn.LazyLinear(2))
        weight = model[0].weight
        assert isinstance(weight, nn.UninitializedParameter) and isinstance(weight, nn.Parameter)
        with pytest.raises(RuntimeError, match="shape of an uninitialized parameter"):
            _ = weight.shape
        x = torch.randn(3, 2, 5)
        model(x)
        assert model[0].weight is weight and not isinstance(weight, nn.UninitializedParameter)
        assert tuple(weight.shape) == (4, 2, 2) and isinstance(weight, nn.Parameter)
        for _ in range(2):
            optimizer.zero_grad()
            model(x).pow(2).sum().backward()
            optimizer.step()
        twin.load_state_dict(model.state_dict())
        return [p.detach() for p in model.parameters()], list(model.buffers()), twin(x).detach()

    run_on_both(mesh, run, 1e-5)


def test_a_parameter_without_a_shape_is_refused_in_an_op(cell: Any) -> None:
    model = nn.LazyLinear(2)
    with pytest.raises(ValueError, match="lazy module.*run the module once"):
        model.weight * 2


@pytest.mark.parametrize("assign", [False, True])
def test_what_torch_load_gave_is_loaded_onto_the_mesh(cell: Any, tmp_path: Any, assign: bool) -> None:
    def made() -> Any:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
        return model, torch.optim.AdamW(model.parameters(), 0.1)

    def step(model: Any, optimizer: Any) -> None:
        optimizer.zero_grad()
        model(torch.ones(4, 3) * torch.arange(4.0)[:, None]).pow(2).sum().backward()
        optimizer.step()

    with ml.no_mesh.activate():
        local, local_optimizer = made()
        step(local, local_optimizer)
        torch.save({"model": local.state_dict(), "optimizer": local_optimizer.state_dict()}, tmp_path / "saved.pt")
        step(local, local_optimizer)
    model, optimizer = made()
    weight = model[0].weight
    loaded = torch.load(tmp_path / "saved.pt")
    assert type(loaded["model"]["0.weight"]) is torch.Tensor
    if assign:
        model.load_state_dict(loaded["model"], assign=True)
        optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    else:
        model.load_state_dict(loaded["model"])
        assert model[0].weight is weight
    optimizer.load_state_dict(loaded["optimizer"])
    step(model, optimizer)
    assert_same(list(model.state_dict().values()), list(local.state_dict().values()), 1e-5)
    counter = optimizer.state[model[0].weight]["step"]
    assert counter.item() == 2 and hasattr(counter, "_value")
    with pytest.raises(RuntimeError, match="Missing key|Unexpected key"):
        model.load_state_dict({"other": torch.ones(1)})


def test_what_is_unpickled_in_a_cell_is_local(cell: Any) -> None:
    with ml.no_mesh.activate():
        data = pickle.dumps(torch.arange(3.0))
    found = pickle.loads(data)
    assert type(found) is torch.Tensor and found.tolist() == [0, 1, 2]
