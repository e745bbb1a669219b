"""A small GPT in plain PyTorch on one process, data-parallel, and as a pipeline over two hosts: equal losses."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import monarch_lab as ml

VOCABULARY, WIDTH, HEADS, LENGTH, BATCH, STEPS = 17, 16, 2, 6, 4, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Any) -> Any:
        b, t, c = x.shape
        q, k, v = (h.view(b, t, HEADS, c // HEADS).transpose(1, 2) for h in self.qkv(self.norm1(x)).split(c, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, c))
        return x + self.mlp(self.norm2(x))


class Front(nn.Module):
    """Embeddings and the first half of the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(Block(), Block())

    def forward(self, tokens: Any) -> Any:
        places = torch.arange(tokens.shape[1])
        return self.blocks(self.tokens(tokens) + self.places(places))


class Back(nn.Module):
    """The other half, and the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(), Block())
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, x: Any, targets: Any) -> Any:
        logits = self.head(self.norm(self.blocks(x)))
        return F.cross_entropy(logits.view(-1, VOCABULARY), targets.reshape(-1))


def made() -> tuple[Front, Back, list[torch.Tensor]]:
    torch.manual_seed(0)
    front, back = Front(), Back()
    return front, back, [torch.randint(VOCABULARY, (BATCH, LENGTH + 1)) for _ in range(STEPS)]


def optimizer(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=1e-2)


@pytest.fixture(scope="module")
def eager() -> list[float]:
    """The losses of one process."""
    front, back, batches = made()
    optimizers = [optimizer(front), optimizer(back)]
    losses = []
    for batch in batches:
        loss = back(front(batch[:, :-1]), batch[:, 1:])
        loss.backward()
        for o in optimizers:
            o.step()
            o.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    return losses


def same_to_five_digits(losses: list[float], eager: list[float]) -> None:
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(eager), rtol=1e-5, atol=0)


def test_a_data_parallel_gpt_trains_as_on_one_process(cell: Any, eager: list[float]) -> None:
    with ml.no_mesh.activate():
        front, back, batches = made()
    front, back = cell.replicate(front), cell.replicate(back)
    parameters = [*front.parameters(), *back.parameters()]
    opt = torch.optim.AdamW(parameters, lr=1e-2)
    losses = []
    for batch in batches:
        here = cell.shard(batch, "gpu")
        loss = back(front(here[:, :-1]), here[:, 1:])
        opt.zero_grad()
        loss.backward()
        for p in parameters:
            p.grad.reduce_("gpu", "avg")
        opt.step()
        losses.append(loss.detach().reduce("gpu", "avg").item())
    same_to_five_digits(losses, eager)


def on_stages(grid: Any) -> tuple[Any, Any, Any, Any, list[torch.Tensor]]:
    front, back, batches = made()
    first, second = grid.slice(host=0), grid.slice(host=1)
    return first, second, first.replicate(front), second.replicate(back), batches


def train(grid: Any, step: Callable[..., Any], average: bool) -> list[float]:
    first, second, front, back, batches = on_stages(grid)
    optimizers = [optimizer(front), optimizer(back)]
    losses = []
    for batch in batches:
        losses.append(step(first, second, front, back, batch))
        for module, opt in zip((front, back), optimizers, strict=True):
            for p in module.parameters():
                if average:
                    p.grad.reduce_("gpu", "avg")
            opt.step()
            opt.zero_grad()
    return losses


def test_a_gpt_in_two_stages_trains_as_on_one_process(grid: Any, eager: list[float]) -> None:
    def step(first: Any, second: Any, front: Any, back: Any, batch: torch.Tensor) -> float:
        with first.activate():
            hidden = front(first.replicate(batch[:, :-1]))
        loss = back(hidden.to_mesh(second), second.replicate(batch[:, 1:]))
        loss.backward()
        return loss.item()

    same_to_five_digits(train(grid, step, False), eager)


def test_a_gpt_in_two_stages_of_two_data_parallel_processes_with_micro_batches(grid: Any, eager: list[float]) -> None:
    def step(first: Any, second: Any, front: Any, back: Any, batch: torch.Tensor) -> float:
        total = 0.0
        losses = []
        for part in batch.view(2, BATCH // 2, -1):  # micro-batches
            with first.activate():
                hidden = front(first.shard(part[:, :-1], "gpu"))
            losses.append(back(hidden.to_mesh(second), second.shard(part[:, 1:], "gpu")) / 2)
        for loss in losses:
            loss.backward()
            total += loss.detach().reduce("gpu", "avg").item()
        return total

    same_to_five_digits(train(grid, step, True), eager)


def test_a_pipeline_waits_for_nothing_once_it_is_known(grid: Any) -> None:
    first, second, front, back, batches = on_stages(grid)
    optimizers = [optimizer(front), optimizer(back)]
    misses = []
    for k in range(6):
        batch = batches[k % STEPS]
        misses.append(grid.client.cache.misses)
        with first.activate():
            hidden = front(first.replicate(batch[:, :-1]))
        back(hidden.to_mesh(second), second.replicate(batch[:, 1:])).backward()
        for o in optimizers:
            o.step()
            o.zero_grad()
    assert misses[4] == misses[5] == grid.client.cache.misses


def test_the_stages_have_the_gradients_of_the_whole_model(grid: Any) -> None:
    first, second, front, back, batches = on_stages(grid)
    local_front, local_back = (copy.deepcopy(m) for m in made()[:2])
    batch = batches[0]
    local_back(local_front(batch[:, :-1]), batch[:, 1:]).backward()
    with first.activate():
        hidden = front(first.replicate(batch[:, :-1]))
    back(hidden.to_mesh(second), second.replicate(batch[:, 1:])).backward()
    for far, local in ((front, local_front), (back, local_back)):
        for p, q in zip(far.parameters(), local.parameters(), strict=True):
            torch.testing.assert_close(ml.inspect(p.grad, gpu=1), q.grad)
