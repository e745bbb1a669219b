"""A whole training on the mesh, as in the notebooks, against the same training in plain torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import monarch_lab as ml
from tests.controller.compare import assert_same, by_rank


class Block(nn.Module):
    """A small causal transformer block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mix = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Any) -> Any:
        b, t, c = x.shape
        q, k, v = self.mix(self.norm1(x)).split(c, dim=2)
        q, k, v = (y.view(b, t, self.heads, c // self.heads).transpose(1, 2) for y in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).contiguous().view(b, t, c))
        return x + self.mlp(self.norm2(x))


class Small(nn.Module):
    def __init__(self, words: int = 17, width: int = 8, length: int = 6) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList([Block(width, 2) for _ in range(2)])
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.words.weight

    def forward(self, at: Any) -> Any:
        x = self.words(at) + self.places(torch.arange(at.shape[1], device=at.device))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def train(model: Any, batches: list[Any], average: Any) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=len(batches) + 1)
    losses = []
    for batch in batches:
        logits = model(batch[:, :-1])
        loss = F.cross_entropy(logits.reshape(-1, logits.shape[-1]), batch[:, 1:].reshape(-1))
        optimizer.zero_grad()
        loss.backward()
        average([p.grad for p in model.parameters()])
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss)
    return losses


@pytest.fixture
def batches() -> list[torch.Tensor]:
    torch.manual_seed(1)
    return [torch.randint(0, 17, (8, 7)) for _ in range(12)]


def test_a_language_model_trained_data_parallel_learns_as_on_one_process(mesh: Any, batches: list[Any]) -> None:
    torch.manual_seed(2)
    local = Small().double()
    far = mesh.replicate(local)
    want = [loss.item() for loss in train(local, batches, lambda gradients: None)]
    with mesh.activate():
        shards = [mesh.shard(b, "gpu") for b in batches]
        losses = train(far, shards, lambda gradients: [g.reduce_("gpu", "avg") for g in gradients])
        got = [loss.reduce("gpu", "avg").item() for loss in losses]
    assert got == pytest.approx(want, rel=1e-6)
    assert want[-1] < want[0]
    assert_same(list(far.parameters()), list(local.parameters()), 1e-6)
    for p in far.parameters():
        assert torch.equal(*by_rank(p))


def test_a_step_that_was_learned_waits_for_nothing(mesh: Any, batches: list[Any]) -> None:
    far = mesh.replicate(Small())
    with mesh.activate():
        shards = [mesh.shard(b, "gpu") for b in batches]
        average = lambda gradients: [g.reduce_("gpu", "avg") for g in gradients]  # noqa: E731
        model_and_state = train(far, shards[:3], average)
        optimizer = torch.optim.AdamW(far.parameters(), lr=0.01)

        def step(batch: Any) -> None:
            logits = far(batch[:, :-1])
            loss = F.cross_entropy(logits.reshape(-1, logits.shape[-1]), batch[:, 1:].reshape(-1))
            optimizer.zero_grad()
            loss.backward()
            average([p.grad for p in far.parameters()])
            optimizer.step()

        for batch in shards[3:7]:
            step(batch)
        misses, asked = mesh.client.cache.misses, mesh.client.cache.asked
        for batch in shards[7:]:
            step(batch)
        assert (mesh.client.cache.misses, mesh.client.cache.asked) == (misses, asked)
    assert len(model_and_state) == 3


def test_a_model_goes_from_the_mesh_to_a_file_and_back(mesh: Any, tmp_path: Any) -> None:
    with mesh.activate():
        far = Small()
        out = far(torch.zeros(1, 5, dtype=torch.int64))
        torch.save(ml.inspect(far.state_dict()), tmp_path / "model.pt")
    local = Small()
    local.load_state_dict(torch.load(tmp_path / "model.pt"))
    assert_same(out, local(torch.zeros(1, 5, dtype=torch.int64)), 1e-5)
    again = mesh.replicate(local)
    assert_same(list(again.parameters()), list(local.parameters()))


def test_a_classifier_with_batch_norm_and_dropout_trains_and_evaluates(mesh: Any) -> None:
    def fit() -> Any:
        torch.manual_seed(3)
        model = nn.Sequential(
            nn.Conv2d(1, 4, 3),
            nn.BatchNorm2d(4),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Dropout(0.3),
            nn.Linear(36, 3),
        )
        x, y = torch.randn(12, 1, 8, 8), torch.randint(0, 3, (12,))
        optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
        for _ in range(5):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            scores = model(x)
            right = (scores.argmax(1) == y).float().mean().item()
        return scores, right, list(model.buffers())

    want = fit()
    with mesh.activate():
        got = fit()
        assert_same(got, want, 1e-4)


def test_many_small_ops_in_a_row_end_where_plain_torch_ends(mesh: Any) -> None:
    x = mesh.replicate(torch.zeros(3))
    for _ in range(2048):
        x = x + 1
    assert x.tolist() == [2048] * 3
