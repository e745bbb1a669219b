"""Verdicts on a silent agent, with a clock of the test's own."""

from __future__ import annotations

from monarch_lab.supervisor.silence import Silence, Verdict


def heard(look_every_s: float, now: float) -> Silence:
    silence = Silence(look_every_s, 10.0, 15.0)
    silence.hear(now)
    return silence


def looks(silence: Silence, times: list[float]) -> list[Verdict]:
    return [silence.look(now) for now in times]


def test_a_silent_agent_is_unreachable_and_then_lost() -> None:
    silence = heard(1.0, 100.0)
    verdicts = looks(silence, [100.0 + n for n in range(1, 17)])
    assert verdicts == [Verdict.FINE] * 9 + [Verdict.UNREACHABLE] * 5 + [Verdict.LOST] * 2


def test_one_that_speaks_again_in_time_is_fine() -> None:
    silence = heard(1.0, 0.0)
    assert looks(silence, [float(n) for n in range(1, 15)])[-1] is Verdict.UNREACHABLE
    silence.hear(14.5)
    assert looks(silence, [float(n) for n in range(15, 24)]) == [Verdict.FINE] * 9


def test_nobody_is_lost_for_the_judge_having_been_asleep() -> None:
    silence = heard(1.0, 0.0)
    silence.look(1.0)
    assert silence.look(3601.0) is Verdict.FINE  # an hour: nothing was looked at, nothing could be heard
    assert looks(silence, [3601.0 + n for n in range(1, 16)])[-1] is Verdict.LOST  # it had its whole time again


def test_a_look_is_due_at_its_time() -> None:
    silence = heard(2.0, 5.0)
    assert silence.next_look == 7.0
    assert [silence.is_due(now) for now in (6.9, 7.0)] == [False, True]


def test_nothing_is_due_before_the_first_word() -> None:
    silence = Silence(2.0, 10.0, 15.0)
    assert not silence.is_due(1e9) and silence.next_look == float("inf")
