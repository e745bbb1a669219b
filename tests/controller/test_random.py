"""Random numbers of the workers (rule 9): one seed, equal draws, variation on request alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import monarch_lab as ml
from tests.controller.compare import assert_known_or_refused, by_rank, own_number, rank_values, run_on_both

_DRAWS: dict[str, Callable[[], Any]] = {
    "rand": lambda: torch.rand(3),
    "randn": lambda: torch.randn(2, 2, dtype=torch.float64),
    "randint": lambda: torch.randint(0, 10, (5,)),
    "randperm": lambda: torch.randperm(6),
    "normal": lambda: torch.normal(0.0, 1.0, (3,)),
    "normal of tensors": lambda: torch.normal(torch.zeros(3), torch.ones(3)),
    "bernoulli": lambda: torch.bernoulli(torch.full((9,), 0.5)),
    "multinomial": lambda: torch.multinomial(torch.ones(6), 3),
    "rand_like": lambda: torch.rand_like(torch.zeros(3)),
    "uniform_": lambda: torch.empty(3).uniform_(1.0, 2.0),
    "exponential_": lambda: torch.empty(3).exponential_(),
    "random_": lambda: torch.empty(3, dtype=torch.int64).random_(0, 9),
    "init": lambda: nn.init.kaiming_uniform_(torch.empty(3, 3)),
    "dropout": lambda: nn.functional.dropout(torch.ones(9)),
    "categorical": lambda: torch.distributions.Categorical(logits=torch.zeros(4)).sample((5,)),
}


@pytest.mark.parametrize("name", list(_DRAWS))
def test_a_seeded_draw_is_that_of_plain_torch_on_every_rank(mesh: Any, name: str) -> None:
    (first, again), _ = run_on_both(mesh, lambda: [_DRAWS[name](), _DRAWS[name]()])
    assert first.equal_dims == again.equal_dims == ("host", "gpu")


@pytest.mark.parametrize("draw", [lambda x: torch.poisson(x), lambda x: torch.distributions.Gamma(x, 1.0).sample()])
def test_a_sampler_that_rejects_draws_equal_numbers_from_equal_rates_and_the_seed_decides_them(
    cell: Any, draw: Callable[[Any], Any]
) -> None:
    rates = torch.full((20,), 3.0)
    seen = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        seen.append([draw(rates), draw(rates)])
    assert torch.equal(seen[0][0], seen[1][0]) and torch.equal(seen[0][1], seen[1][1])
    assert not torch.equal(seen[0][0], seen[2][0]) and not torch.equal(seen[0][0], seen[0][1])
    first, second = by_rank(seen[0][0])
    assert torch.equal(first, second)


def test_seeding_again_draws_the_same_again(cell: Any) -> None:
    torch.manual_seed(5)
    first = torch.rand(4)
    torch.manual_seed(5)
    assert torch.equal(torch.rand(4), first)
    torch.manual_seed(6)
    assert not torch.equal(torch.rand(4), first)


def test_fork_rng_gives_the_state_back(mesh: Any) -> None:
    def draws() -> Any:
        with torch.random.fork_rng():
            inside = torch.rand(2)
        return inside, torch.rand(2)

    (inside, after), _ = run_on_both(mesh, draws)
    assert torch.equal(inside, after)


def test_a_saved_state_of_the_generator_is_brought_back(mesh: Any) -> None:
    def draws() -> Any:
        state = torch.get_rng_state()
        first = torch.rand(2)
        torch.set_rng_state(state)
        return first, torch.rand(2)

    with mesh.activate():
        first, second = draws()
        assert torch.equal(first, second)


def test_vary_gives_each_rank_its_own_numbers(cell: Any) -> None:
    torch.manual_seed(3)
    with ml.random.vary("gpu"):
        for _ in range(2):
            y = torch.rand(3)
            first, second = rank_values(y)
            assert first != second and y.equal_dims == ("host",)
            z = torch.empty(3).normal_()
            assert_known_or_refused(z)
            assert_known_or_refused(nn.functional.dropout(torch.ones(50)))
            assert_known_or_refused(nn.Linear(3, 2).weight)
    after = torch.rand(3)
    torch.manual_seed(3)
    assert torch.equal(torch.rand(3), after), "as if nothing had been drawn"


def test_vary_of_a_kind_of_draw_seen_before_is_known_unequal(cell: Any) -> None:
    torch.rand(7)
    torch.rand(7)
    with ml.random.vary():
        assert_known_or_refused(torch.rand(7))
    first, second = by_rank(torch.rand(7))
    assert torch.equal(first, second)


def test_vary_along_a_dim_of_one_process_changes_nothing_between_the_others(cell: Any) -> None:
    with ml.random.vary("host"):
        first, second = by_rank(torch.rand(3))
    assert torch.equal(first, second)


def test_vary_takes_a_seed_and_nests(cell: Any) -> None:
    with ml.random.vary("gpu", seed=1):
        first = rank_values(torch.rand(2))
        with ml.random.vary("host"):
            rank_values(torch.rand(2))
        second = rank_values(torch.rand(2))
    with ml.random.vary("gpu", seed=1):
        assert rank_values(torch.rand(2)) == first
        assert rank_values(torch.rand(2)) == second
    with pytest.raises(KeyError, match="tp"), ml.random.vary("tp"):
        pass


def test_vary_on_a_mesh_of_other_dims_is_known_unequal_too(cell: Any) -> None:
    x = torch.zeros(3)
    with cell.flatten("all").activate(), ml.random.vary():
        for _ in range(2):
            assert_known_or_refused(torch.rand_like(x))
            assert_known_or_refused(torch.rand(3))


_DRIFTS: dict[str, Callable[[Any], Any]] = {
    "a part of the mesh": lambda m: _on_part(m),
    "a call on one shard": lambda m: ml.call_on_shard_and_fetch(
        lambda: torch.rand(3), shard={"host": 0, "gpu": 0}
    ).result(),
    "samplers that reject": lambda m: torch.poisson(torch.full((50,), 3.0) + own_number(m) * 40),
    "gamma": lambda m: torch._standard_gamma(torch.full((50,), 0.3) + own_number(m) * 40),
    "a remote function": lambda m: ml.remote(lambda r: (torch.rand(1) if r.item() else None, r + 1)[1])(m.rank("gpu")),
    "seeding in a remote function": lambda m: ml.remote(lambda r: (torch.manual_seed(r.item()), r + 1)[1])(
        m.rank("gpu")
    ),
}


def _on_part(mesh: Any) -> None:
    with mesh.slice(gpu=0).activate():
        torch.rand(3)


@pytest.mark.parametrize("name", list(_DRIFTS))
def test_numbers_drawn_on_one_rank_alone_do_not_make_later_ones_silently_differ(cell: Any, name: str) -> None:
    torch.rand(2)
    for _ in range(2):
        _DRIFTS[name](cell)
        assert_known_or_refused(torch.rand(2))
    with cell.activate():
        torch.manual_seed(0)
    first, second = by_rank(torch.rand(2))
    assert torch.equal(first, second)


def test_local_draws_and_mesh_draws_do_not_disturb_each_other(mesh: Any) -> None:
    torch.manual_seed(1)
    local = torch.rand(2)
    torch.manual_seed(1)
    with mesh.activate():
        torch.rand(5)
    assert torch.equal(torch.rand(2), local)
