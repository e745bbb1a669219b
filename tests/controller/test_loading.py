"""torch.utils.data with a mesh active (rule 18): batches are local, loader processes have no part in the mesh."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils import data

import monarch_lab as ml
from tests.controller.compare import is_mesh, rank_values


class Squares(data.Dataset):
    """Makes its items with factories and numpy, as datasets do."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, k: int) -> Any:
        return torch.tensor([float(k), k * k]), np.ones(2, np.float32) * k, k, {"f": k / 2}


class Stream(data.IterableDataset):
    def __iter__(self) -> Any:
        for k in range(4):
            yield torch.full((2,), float(k))


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_are_local_while_a_mesh_is_active(cell: Any, workers: int) -> None:
    loader = data.DataLoader(Squares(), batch_size=4, shuffle=True, num_workers=workers)
    for _ in range(2):
        seen = []
        for x, array, k, rest in loader:
            assert not any(is_mesh(t) for t in (x, array, k, rest["f"]))
            assert is_mesh(torch.ones(1)), "the cell goes on making mesh tensors"
            seen += k.tolist()
            far = cell.shard(x, "gpu")
            assert rank_values(far.sum(1)) == [x[:2].sum(1).tolist(), x[2:].sum(1).tolist()]
        assert sorted(seen) == list(range(8))
    cell.sync()


@pytest.mark.parametrize("workers", [0, 1])
def test_an_iterable_dataset_gives_local_batches(cell: Any, workers: int) -> None:
    batches = list(data.DataLoader(Stream(), batch_size=2, num_workers=workers))
    assert [b.tolist() for b in batches] == [[[0, 0], [1, 1]], [[2, 2], [3, 3]]] and not is_mesh(batches[0])


def test_batches_made_before_the_cell_and_in_it_are_the_same(mesh: Any) -> None:
    with ml.no_mesh.activate():
        dataset = data.TensorDataset(torch.arange(8.0), torch.arange(8))
    order = []
    for active in (False, True):
        with mesh.activate() if active else ml.no_mesh.activate():
            generator = torch.Generator().manual_seed(3)
            loader = data.DataLoader(dataset, batch_size=2, shuffle=True, generator=generator)
            order.append([y.tolist() for _, y in loader])
    assert order[0] == order[1]


def test_a_split_of_a_dataset_is_made_in_the_kernel(cell: Any) -> None:
    first, second = data.random_split(range(10), [7, 3])  # type: ignore[arg-type]
    assert sorted([*first.indices, *second.indices]) == list(range(10))
    again = [data.random_split(range(6), [0.5, 0.5], torch.Generator().manual_seed(1))[0].indices for _ in range(2)]  # type: ignore[arg-type]
    assert again[0] == again[1]


@pytest.mark.parametrize(
    "sampler",
    [
        lambda d: data.RandomSampler(d),
        lambda d: data.RandomSampler(d, replacement=True, num_samples=8),
        lambda d: data.WeightedRandomSampler([1.0] * 8, 8),
        lambda d: data.SubsetRandomSampler(range(8)),
        lambda d: data.SequentialSampler(d),
    ],
)
def test_samplers_choose_in_the_kernel(cell: Any, sampler: Any) -> None:
    dataset = Squares()
    misses = cell.client.cache.misses
    batches = list(data.DataLoader(dataset, batch_size=4, sampler=sampler(dataset)))
    assert len(batches) == 2 and not is_mesh(batches[0][0])
    assert cell.client.cache.misses == misses


def test_a_loader_left_half_way_does_no_harm(cell: Any) -> None:
    loader = data.DataLoader(Squares(), batch_size=2, num_workers=2, persistent_workers=True)
    for _ in range(2):
        iterator = iter(loader)
        next(iterator)
    del iterator, loader
    assert torch.ones(1).reduce("gpu").item() == 2


def test_a_training_loop_over_a_loader_runs(cell: Any) -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.0001)
    losses = []
    for _ in range(3):
        for x, *_ in data.DataLoader(Squares(), batch_size=4):
            optimizer.zero_grad()
            loss = model(cell.shard(x, "gpu")).pow(2).mean()
            loss.backward()
            for p in model.parameters():
                p.grad.reduce_("gpu", "avg")
            optimizer.step()
            losses.append(loss.reduce("gpu", "avg").item())
    assert losses[-1] < losses[1]
