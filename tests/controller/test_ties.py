"""Which ranks a fetch waits for."""

from __future__ import annotations

from monarch_lab.controller.ties import Ties


def test_ranks_are_tied_by_what_they_took_part_in() -> None:
    ties = Ties()
    ties.move((0, 1))
    assert ties.of((1,)) == {0, 1} and ties.unsettled((1,)) == set()
    ties.meet((2, 3))
    assert ties.unsettled((0,)) == set() and ties.unsettled((3,)) == {2, 3}
    ties.move((1, 2))
    assert ties.unsettled((0,)) == {0, 1, 2, 3} and ties.of((4,)) == {4}
    ties.meet((5,))
    assert ties.unsettled((5,)) == set()


def test_ranks_that_have_told_their_failures_are_tied_no_more() -> None:
    ties = Ties()
    ties.meet((0, 1))
    ties.meet((2, 3))
    ties.settle((0, 1, 2))
    assert ties.unsettled((0,)) == set() and ties.unsettled((2,)) == {2, 3}
    taken = ties.take()
    assert ties.unsettled((2,)) == set()
    ties.put_back(taken)
    assert ties.unsettled((2,)) == {2, 3}
    ties.settle(None)
    assert ties.take() == []
