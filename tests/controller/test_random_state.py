"""``ml.random``: states, seeds of parts, deterministic algorithms."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import monarch_lab as ml
from tests.controller.compare import assert_known_or_refused, by_rank, rank_values


def _equal_on_ranks(tensor: Any) -> bool:
    first, second = by_rank(tensor)
    return torch.equal(first, second)


def test_a_state_brought_back_repeats_the_numbers(cell: Any) -> None:
    state = ml.random.get_state()
    first = torch.rand(3)
    ml.random.set_state(state)
    assert torch.equal(torch.rand(3), first)
    assert state[0].dtype == torch.uint8 and state[0].equal_dims == ("host", "gpu")


def test_a_new_state_is_that_of_a_seed_and_changes_nothing_before_it_is_set(mesh: Any) -> None:
    torch.manual_seed(11)
    expected = torch.rand(3)
    with mesh.activate():
        torch.manual_seed(0)
        first = torch.rand(3)
        torch.manual_seed(0)
        made = [ml.random.new_state(11) for _ in range(2)]
        assert torch.equal(torch.rand(3), first)
        for state in made:
            ml.random.set_state(state)
            drawn = torch.rand(3)
            assert _equal_on_ranks(drawn) and torch.equal(by_rank(drawn)[0], expected)
        assert not torch.equal(drawn, first)


def test_states_that_differ_by_rank_give_numbers_known_to_differ(cell: Any) -> None:
    common = ml.random.get_state()
    for _ in range(2):
        ml.random.set_state(ml.random.new_state(cell.rank("gpu")))
        drawn = torch.rand(3)
        assert not _equal_on_ranks(drawn) and drawn.equal_dims == ("host",)
        assert_known_or_refused(torch.get_rng_state())
    assert_known_or_refused(torch.get_rng_state())
    ml.random.set_state(common)
    after = torch.rand(3)
    assert _equal_on_ranks(after) and after.equal_dims == ("host", "gpu")


def test_states_that_differ_are_forgotten_with_a_seed_and_kept_out_of_a_block_that_varies(cell: Any) -> None:
    ml.random.set_state(ml.random.new_state(cell.rank("gpu")))
    with ml.random.vary("host"):
        assert_known_or_refused(torch.rand(3))
    assert_known_or_refused(torch.rand(3))
    ml.random.manual_seed(4)
    drawn = torch.rand(3)
    assert _equal_on_ranks(drawn) and drawn.equal_dims == ("host", "gpu")
    with ml.random.vary("gpu"):
        ml.random.set_state(ml.random.new_state(7))
        assert_known_or_refused(torch.rand(3))
    assert _equal_on_ranks(torch.rand(3))


def test_the_state_while_ranks_vary_is_known_to_differ(cell: Any) -> None:
    with ml.random.vary("gpu"):
        state = ml.random.get_state()
        assert_known_or_refused(state[0])
        first = torch.rand(2)
        ml.random.set_state(state)
        assert rank_values(torch.rand(2)) == rank_values(first)


def test_seeding_a_part_leaves_what_all_draw_together_equal(cell: Any) -> None:
    torch.manual_seed(2)
    first = torch.rand(3)
    torch.manual_seed(2)
    part = cell.slice(gpu=0)
    with part.activate():
        torch.manual_seed(9)
        own = ml.inspect(torch.rand(2))
        torch.manual_seed(9)
        assert torch.equal(ml.inspect(torch.rand(2)), own)
    drawn = torch.rand(3)
    assert _equal_on_ranks(drawn) and torch.equal(drawn, first)
    with ml.no_mesh.activate():
        torch.manual_seed(9)
        assert torch.equal(torch.rand(2), own)


def test_seeding_a_part_begins_the_users_functions_of_its_ranks_again(cell: Any) -> None:
    draw = ml.remote(lambda: torch.rand(2))
    with cell.slice(host=0, gpu=1).activate():
        torch.manual_seed(1)
        first = ml.inspect(draw())
        torch.manual_seed(1)
        assert torch.equal(ml.inspect(draw()), first)


def test_a_state_of_parts_and_of_the_whole_that_differ_are_kept_apart(cell: Any) -> None:
    flat = cell.flatten("all")
    ml.random.set_state(ml.random.new_state(cell.rank("gpu")))
    with flat.activate():
        ml.random.set_state(ml.random.new_state(flat.rank("all")))
        ml.random.set_state(ml.random.new_state(0))
        assert_known_or_refused(torch.rand(3))
    assert_known_or_refused(torch.rand(3))


def test_make_deterministic_seeds_and_refuses_what_is_not(cell: Any) -> None:
    try:
        ml.random.make_deterministic()
        first = torch.rand(3)
        assert ml.remote(lambda: torch.are_deterministic_algorithms_enabled())()
        ml.random.make_deterministic()
        assert torch.equal(torch.rand(3), first)
        ml.random.make_deterministic(1)
        assert not torch.equal(torch.rand(3), first)
    finally:
        torch.use_deterministic_algorithms(False)


def test_what_is_no_state_is_refused(mesh: Any) -> None:
    for call in (ml.random.get_state, ml.random.new_state, ml.random.make_deterministic):
        with pytest.raises(ValueError, match="no device mesh is active"):
            call()
    with pytest.raises(ValueError, match="no device mesh is active"):
        ml.random.manual_seed(0)
    with mesh.activate(), pytest.raises(TypeError, match="get_state"):
        ml.random.set_state((torch.random.default_generator.get_state(),))
