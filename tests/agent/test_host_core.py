from __future__ import annotations

import signal

import pytest

from monarch_lab.agent.host_core import (
    MOVES,
    SIMULATED_PID,
    Action,
    AgentState,
    Cleared,
    ClearTree,
    Connected,
    Ended,
    Exit,
    Fenced,
    Forked,
    ForkFailed,
    HostCore,
    Noted,
    Ordered,
    OwnerGone,
    Rejoin,
    Say,
    Sent,
    SignalChild,
    StartChild,
    Ticked,
    Took,
    WriteCall,
    WriteCredit,
    WriteLetter,
)
from monarch_lab.wire.hosts import (
    ChildExited,
    ChildLetter,
    ChildNote,
    ChildNotStarted,
    ChildStarted,
    ChildTook,
    DeliverLetter,
    GrantCredit,
    HostStopped,
    HostTerms,
    LaunchProcesses,
    Order,
    SignalProcesses,
    StopHost,
)

NOW = 50.0


def launch(count: int = 1, call: bool = False, simulate: bool = False) -> LaunchProcesses:
    argv = [] if call else ["true"]
    return LaunchProcesses(10, 0, count, count, ["p"] * count, [""] * count, argv, {}, "", simulate, 1000)


def order(core: HostCore, *orders: Order, payload: bytes = b"", now: float = NOW) -> list[Action]:
    return core.handle(Ordered([(order, payload) for order in orders]), now)


@pytest.fixture
def core() -> HostCore:
    return HostCore(HostTerms(600, 3))


def test_processes_are_started_and_told(core: HostCore) -> None:
    asked = launch(2)
    assert order(core, asked) == [StartChild(asked, 0), StartChild(asked, 1)]
    assert core.handle(Forked(10, 77), NOW) == [Say(ChildStarted(10, 77))]
    assert core.handle(ForkFailed(11, "no such file"), NOW) == [Say(ChildNotStarted(11, "no such file"))]
    assert core.handle(Noted(10, "no log"), NOW) == [Say(ChildNote(10, "no log"))]
    assert core.handle(Ended(10, 3, False, "tail"), NOW) == [Say(ChildExited(10, 3, False, "tail"))]
    assert core.children == {}


def test_simulated_processes_start_and_end_without_a_fork(core: HostCore) -> None:
    actions = order(core, launch(2, simulate=True))
    assert [a.report for a in actions] == [  # type: ignore[union-attr]
        ChildStarted(10, SIMULATED_PID),
        ChildExited(10, 0, False, ""),
        ChildStarted(11, SIMULATED_PID),
        ChildExited(11, 0, False, ""),
    ]


def test_the_call_and_letters_are_held_until_the_process_connects(core: HostCore) -> None:
    order(core, launch(call=True), payload=b"call")
    assert order(core, DeliverLetter([10]), payload=b"one") == []
    assert order(core, DeliverLetter([10, 99]), payload=b"two") == []
    assert core.handle(Connected(10), NOW) == [WriteCall(10, b"call"), WriteLetter(10, b"one"), WriteLetter(10, b"two")]
    assert order(core, DeliverLetter([10]), payload=b"three") == [WriteLetter(10, b"three")]


def test_letters_and_credit_pass_and_a_process_without_credit_is_not_read(core: HostCore) -> None:
    order(core, launch())
    child = core.children[10]
    assert core.handle(Sent(10, b"x" * 2000), NOW) == [Say(ChildLetter(10), b"x" * 2000)]
    assert child.is_over
    assert order(core, GrantCredit(10, 2256)) == [WriteCredit(10, 2256)]
    assert not child.is_over
    assert core.handle(Took(10, 5), NOW) == [Say(ChildTook(10, 5))]
    assert core.handle(Sent(99, b""), NOW) == core.handle(Took(99, 1), NOW) == order(core, GrantCredit(99, 1)) == []


def test_signals_reach_those_that_live(core: HostCore) -> None:
    order(core, launch())
    assert order(core, SignalProcesses([10, 99], 2, True)) == [SignalChild(10, 2, True)]


def test_a_stop_gives_a_real_grace_and_then_clears_up(core: HostCore) -> None:
    order(core, launch())
    assert order(core, StopHost(3.0, None)) == [
        SignalChild(10, signal.SIGTERM, True),
        SignalChild(10, signal.SIGCONT, True),
    ]
    assert core.handle(Ticked(), NOW + 2.9) == []
    assert core.handle(Ticked(), NOW + 3.0) == [ClearTree()]
    assert core.handle(Ended(10, -9, False, ""), NOW + 3) == [Say(ChildExited(10, -9, False, ""))]
    assert core.handle(Cleared(True), NOW + 3) == [Say(HostStopped()), Exit(0, "")]
    assert core.state is AgentState.ENDED


def test_a_stop_ends_as_soon_as_no_child_is_left(core: HostCore) -> None:
    order(core, launch())
    order(core, StopHost(30.0, "it was replaced"))
    assert core.handle(Ended(10, -15, False, ""), NOW + 1)[-1] == ClearTree()
    assert core.handle(Cleared(True), NOW + 1) == [Say(HostStopped()), Exit(1, "it was replaced")]


def test_what_is_ordered_after_a_stop_is_not_done(core: HostCore) -> None:
    order(core, launch())
    assert not [a for a in order(core, StopHost(3, None), launch()) if isinstance(a, StartChild)]


def test_an_agent_that_was_given_up_kills_its_tree_and_joins_anew(core: HostCore) -> None:
    order(core, launch())
    assert core.handle(Fenced(), NOW) == [ClearTree()]
    core.handle(Ended(10, -9, False, ""), NOW)
    assert core.handle(Cleared(True), NOW) == [Rejoin()]
    assert (core.state, core.children) == (AgentState.SERVING, {})
    asked = launch()
    assert order(core, asked) == [StartChild(asked, 0)]


def test_an_agent_that_cannot_kill_its_tree_ends_and_leaves_it_to_its_guard(core: HostCore) -> None:
    core.handle(Fenced(), NOW)
    (end,) = core.handle(Cleared(False), NOW)
    assert isinstance(end, Exit) and end.code == 1 and "guard" in end.text


def test_without_its_owner_an_agent_ends_with_its_children(core: HostCore) -> None:
    order(core, launch())
    assert core.handle(OwnerGone("the supervisor has ended"), NOW)[-1] == ClearTree()
    assert core.handle(Cleared(True), NOW) == [Exit(1, "the supervisor has ended")]


def test_an_owner_that_goes_during_a_stop_cuts_the_grace_short(core: HostCore) -> None:
    order(core, launch(), StopHost(30, None))
    assert core.handle(OwnerGone("gone"), NOW + 1) == [ClearTree()]
    assert core.handle(Cleared(True), NOW)[-1] == Exit(0, "")


def test_the_supervisor_says_how_long_to_live_without_it(core: HostCore) -> None:
    order(core, HostTerms(5, 1))
    assert core.terms == HostTerms(5, 1)


def test_every_state_but_the_last_can_be_left() -> None:
    assert {state for state, _ in MOVES} == set(AgentState) - {AgentState.ENDED}
