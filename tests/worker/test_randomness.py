"""The generators of ranks, in one process: each Randomness stands for a rank."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from monarch_lab.worker.randomness import mixed


@pytest.fixture(autouse=True)
def generator_kept() -> Iterator[None]:
    state = torch.get_rng_state()
    yield
    torch.set_rng_state(state)


def test_neighbouring_positions_and_seeds_get_unrelated_seeds() -> None:
    seeds = {mixed(seed, position) for seed in range(100) for position in range(100)}
    assert len(seeds) == 10_000 and all(0 <= s < 1 << 63 for s in seeds)
    bits = [bin(mixed(0, p) ^ mixed(0, p + 1)).count("1") for p in range(500)]
    assert 28 < sum(bits) / len(bits) < 36, "half of 63 bits change"
