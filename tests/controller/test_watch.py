"""Stopped and stuck ranks, with a clock of the test's own."""

from __future__ import annotations

from monarch_lab.controller.watch import RankFacts, Watch


def facts(activity: str = "S", since: float = 0.0, op: str = "", ranks: tuple[int, ...] = (0,)) -> list[RankFacts]:
    return [RankFacts(rank, 100 + rank, activity, since, op) for rank in ranks]


def texts(watch: Watch, told: list[RankFacts], now: float, is_debugging: bool = False) -> list[str]:
    return [notice.text for notice in watch.look(told, is_debugging, now)]


def test_a_stopped_rank_is_told_once_and_so_is_its_going_on() -> None:
    watch = Watch(3.0, 100.0)
    assert [texts(watch, facts("T"), now) for now in (10.0, 12.0)] == [[], []]
    (text,) = texts(watch, facts("T"), 13.0)
    assert text.startswith("rank 0 (pid 100) is stopped by a signal") and "%mesh restart --ranks 0" in text
    assert texts(watch, facts("T"), 60.0) == []
    assert texts(watch, facts("S"), 61.0) == ["rank 0 (pid 100) goes on"]
    assert texts(watch, facts("S"), 62.0) == []


def test_a_short_stop_is_no_news() -> None:
    watch = Watch(3.0, 100.0)
    assert [texts(watch, facts(a), n) for a, n in (("T", 0.0), ("T", 2.0), ("S", 3.0), ("T", 4.0), ("T", 6.0))] == [
        []
    ] * 5


def test_ranks_stuck_in_one_op_are_told_together_once() -> None:
    watch = Watch(3.0, 120.0)
    both = facts(since=5.0, op="cell.py:3 y = f(x)", ranks=(0, 2))
    assert texts(watch, both, 10.0) == texts(watch, both, 129.0) == []
    notices = watch.look(both, False, 131.0)
    assert [n.ranks for n in notices] == [(0, 2)] and notices[0].is_stuck
    assert "ranks 0, 2 have not come to an end for 120 s, in or after cell.py:3 y = f(x)" in notices[0].text
    assert texts(watch, both, 500.0) == []


def test_a_rank_that_gets_on_is_never_stuck() -> None:
    watch = Watch(3.0, 120.0)
    assert all(not texts(watch, facts(since=float(n)), 100.0 * n) for n in range(1, 20))


def test_time_in_a_debugger_does_not_count() -> None:
    watch = Watch(3.0, 120.0)
    assert texts(watch, facts(since=1.0), 0.0) == []
    assert texts(watch, facts(since=1.0), 3600.0, is_debugging=True) == []
    assert texts(watch, facts(since=1.0), 3700.0) == []
    assert len(texts(watch, facts(since=1.0), 3730.0)) == 1


def test_a_restarted_rank_is_looked_at_afresh() -> None:
    watch = Watch(3.0, 120.0)
    texts(watch, facts("T"), 0.0)
    assert len(texts(watch, facts("T"), 5.0)) == 1
    assert texts(watch, [], 6.0) == []  # it has no process
    assert texts(watch, facts("S"), 7.0) == []
