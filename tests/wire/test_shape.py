"""Slices of ranks: pure arithmetic."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch_lab.wire.shape import Slice


def test_a_dense_slice_counts_row_by_row() -> None:
    part = Slice.dense(2, 3, 4)
    assert part.strides == (12, 4, 1) and len(part) == 24 and list(part) == list(range(24))
    assert part.rank((1, 2, 3)) == 23 and part.coordinates(23) == (1, 2, 3)


def test_a_rank_of_another_slice_is_an_error() -> None:
    with pytest.raises(ValueError, match="rank 5 is not in"):
        Slice(0, (2,), (2,)).coordinates(5)


def test_a_slice_without_dims_is_one_rank() -> None:
    point = Slice.dense(2, 2).fix(0, 1).fix(0, 1)
    assert list(point) == [3] and len(point) == 1 and point.coordinates(3) == ()


def test_members_of_a_dim_are_the_ranks_that_share_the_other_coordinates() -> None:
    part = Slice.dense(3, 4)
    assert list(part.fix(0, 1)) == [4, 5, 6, 7] and list(part.fix(1, 2)) == [2, 6, 10]


@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=3),
    st.integers(0, 3),
    st.integers(-5, 5),
    st.integers(-5, 5),
    st.integers(1, 3),
)
def test_a_cut_picks_what_a_python_slice_picks(sizes: list[int], dim: int, start: int, stop: int, step: int) -> None:
    dim %= len(sizes)
    part = Slice.dense(*sizes)
    chosen = range(sizes[dim])[start:stop:step]
    if not chosen:
        return
    cut = part.cut(dim, slice(start, stop, step))
    places = [list(chosen) if k == dim else list(range(n)) for k, n in enumerate(sizes)]
    assert list(cut) == [part.rank(at) for at in itertools.product(*places)]
    for rank in cut:
        assert cut.rank(cut.coordinates(rank)) == rank


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4))
def test_a_whole_slice_is_dense_and_every_second_of_it_is_not(sizes: list[int]) -> None:
    assert Slice.dense(*sizes).is_dense
    if sizes[-1] >= 3:
        assert not Slice.dense(*sizes).cut(len(sizes) - 1, slice(None, None, 2)).is_dense
