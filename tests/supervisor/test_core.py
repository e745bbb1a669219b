from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from monarch_lab.supervisor.core import SupervisorCore
from monarch_lab.supervisor.core_events import (
    Action,
    AgentEnded,
    AgentStarted,
    Announce,
    EndProcess,
    Event,
    Fence,
    GroupLaunched,
    HostsRequested,
    HostsReturned,
    LetterSent,
    LetterTaken,
    PassOn,
    PeerBroken,
    PeerFenced,
    PeerJoined,
    PeerReported,
    Release,
    ShutdownAsked,
    SignalSent,
    StartAgents,
    Tell,
    Ticked,
    Warn,
)
from monarch_lab.supervisor.host_states import HOST_MOVES, PROCESS_MOVES, HostState, ProcessState
from monarch_lab.supervisor.letters import (
    HostConnected,
    HostDisconnected,
    ProcessExited,
    ProcessFailedToStart,
    ProcessStarted,
)
from monarch_lab.supervisor.records import HostRecord, HostTimes, PeerState, ProcessRecord
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
    Report,
    SignalProcesses,
    StopHost,
)

TIMES = HostTimes(beat=1, lease=600, unreachable=10, lost=15, stop_grace=3, stop=15)


class Bench:
    """A core with a clock of its own; what it does is kept, and silence is what the test says."""

    def __init__(self) -> None:
        self.core = SupervisorCore(TIMES)
        self.now = 100.0
        self.heard: dict[int, float] = {}
        self.done: list[Action] = []
        self._numbers = iter(range(1000))
        self._idents = iter(range(1000))

    def do(self, event: Event) -> list[Action]:
        actions = self.core.handle(event, self.now)
        self.done += actions
        self.check()
        return actions

    def request(self, count: int) -> list[HostRecord]:
        hosts = [HostRecord(next(self._numbers)) for _ in range(count)]
        self.do(HostsRequested(hosts))
        return hosts

    def join(self, peer: int) -> list[Action]:
        self.heard[peer] = self.now
        return self.do(PeerJoined(peer, f"h{peer}"))

    def report(self, peer: int, *reports: Report) -> list[Action]:
        self.heard[peer] = self.now
        return self.do(PeerReported(peer, [(report, b"payload") for report in reports]))

    def launch(self, host: HostRecord, count: int = 1) -> list[ProcessRecord]:
        made = [ProcessRecord(next(self._idents), host, rank, count, "p") for rank in range(count)]
        order = LaunchProcesses(made[0].ident, 0, count, count, ["p"] * count, [""] * count, ["x"], {}, "", False, 9)
        self.do(GroupLaunched(host, made, order, b""))
        return made

    def tick(self, seconds: float = 0.0, step: float = 0.5, heard: tuple[int, ...] = ()) -> list[Action]:
        """Time passes, in rounds as the loop makes them; ``heard`` peers beat all the while."""
        actions = self.do(Ticked(self._silence))
        end = self.now + seconds
        while self.now < end:
            self.now = min(end, self.now + step)
            self.heard.update(dict.fromkeys(heard, self.now))
            actions += self.do(Ticked(self._silence))
        return actions

    def _silence(self, peer: int) -> float:
        return self.now - self.heard[peer]

    def told(self, kind: type) -> list[object]:
        return [a.message for a in self.done if isinstance(a, Announce) and isinstance(a.message, kind)]

    def check(self) -> None:
        for host in self.core.hosts.values():
            assert (host.peer is not None) == (host.state in (HostState.ATTACHED, HostState.UNREACHABLE))
            assert all(p.state in (ProcessState.LAUNCHING, ProcessState.RUNNING) for p in host.processes.values())
        for peer in self.core.peers.values():
            assert (peer.host is not None) == (peer.state is PeerState.SERVING)
        assert not (self.core.hosts_waiting and self.core.peers_waiting)


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    ended = [a.sender for a in bench.done if isinstance(a, Announce) and isinstance(a.message, ProcessExited)]
    gone = [a.sender for a in bench.done if isinstance(a, Announce) and isinstance(a.message, HostDisconnected)]
    assert len({id(sender) for sender in ended}) == len(ended), "an end was told twice"
    assert len({id(sender) for sender in gone}) == len(gone), "a loss was told twice"


def kinds(actions: list[Action]) -> list[type]:
    return [type(action) for action in actions]


def test_hosts_asked_for_first_are_matched_in_order_and_their_orders_follow(bench: Bench) -> None:
    first, second = bench.request(2)
    process = bench.launch(first)[0]
    bench.do(LetterSent([process], b"letter"))
    assert bench.done == [StartAgents(2)]
    actions = bench.join(7)
    assert actions[0] == Tell(7, HostTerms(600, 3))
    assert actions[1] == Announce(first, HostConnected("h7"))
    assert [type(a.order) for a in actions[2:]] == [LaunchProcesses, DeliverLetter]  # type: ignore[union-attr]
    assert (first.state, second.state) == (HostState.ATTACHED, HostState.UNATTACHED)
    bench.join(9)
    assert (second.state, second.hostname) == (HostState.ATTACHED, "h9")


def test_agents_that_came_first_wait_and_no_other_is_started_for_them(bench: Bench) -> None:
    bench.join(1)
    bench.join(2)
    assert bench.core.peers_waiting == 2
    hosts = bench.request(3)
    assert [host.hostname for host in hosts] == ["h1", "h2", ""]
    assert bench.done[-1] == StartAgents(1)


def test_a_process_lives_and_ends_with_its_letters_between(bench: Bench) -> None:
    (host,) = bench.request(1)
    bench.join(1)
    (process,) = bench.launch(host)
    actions = bench.report(
        1,
        ChildStarted(process.ident, 42),
        ChildLetter(process.ident),
        ChildTook(process.ident, 5),
        ChildNote(process.ident, "no log"),
        ChildExited(process.ident, -9, True, "last words"),
    )
    assert kinds(actions) == [Announce, PassOn, Release, Warn, EndProcess, Announce]
    assert actions[0] == Announce(process, ProcessStarted(42))
    exited = actions[-1].message  # type: ignore[union-attr]
    assert exited.result == -9 == process.returncode
    assert exited.message == (
        "process p (rank 0 of 1, h1, pid 42) was killed by SIGKILL: the system was out of memory\nlast words"
    )
    counters = bench.core.counters
    assert (counters.launches, counters.starts, counters.exits, counters.responses, counters.deletions) == (1,) * 5


def test_a_process_that_cannot_start_is_told_with_the_traceback_and_hurts_no_other(bench: Bench) -> None:
    (host,) = bench.request(1)
    bench.join(1)
    bad, good = bench.launch(host, 2)
    bench.report(1, ChildNotStarted(bad.ident, "Traceback ..."), ChildStarted(good.ident, 3))
    result = bench.told(ProcessExited)[0].result  # type: ignore[attr-defined]
    assert isinstance(result, ProcessFailedToStart) and str(result) == "Traceback ..."
    assert good.state is ProcessState.RUNNING


def test_one_message_to_a_group_is_one_order_a_host(bench: Bench) -> None:
    hosts = bench.request(2)
    bench.join(1)
    bench.join(2)
    processes = [p for host in hosts for p in bench.launch(host, 3)]
    actions = bench.do(LetterSent(processes, b"x"))
    assert actions == [Tell(1, DeliverLetter([0, 1, 2]), b"x"), Tell(2, DeliverLetter([3, 4, 5]), b"x")]
    assert bench.do(SignalSent(processes[:1], 15, True)) == [Tell(1, SignalProcesses([0], 15, True))]
    assert bench.do(LetterTaken(processes[0], 7)) == [Tell(1, GrantCredit(0, 7))]


def test_a_silent_host_is_unreachable_then_lost_once_with_its_processes(bench: Bench) -> None:
    (host,) = bench.request(1)
    bench.join(1)
    (process,) = bench.launch(host)
    bench.report(1, ChildStarted(process.ident, 5))
    assert bench.tick(9.5) == []
    bench.tick(1)
    assert host.state is HostState.UNREACHABLE
    actions = bench.tick(5)
    assert kinds(actions) == [EndProcess, Announce, Announce, Fence]
    assert isinstance(actions[1].message.result, ConnectionAbortedError)  # type: ignore[union-attr]
    assert "h1" in actions[1].message.message and "15.0 s" in actions[1].message.message  # type: ignore[union-attr]
    assert isinstance(actions[2].message, HostDisconnected)  # type: ignore[union-attr]
    assert (actions[3].peer, actions[3].final) == (1, False)  # type: ignore[union-attr]
    assert (host.state, process.state) == (HostState.LOST, ProcessState.LOST)
    assert bench.tick(100) == []


def test_a_host_that_speaks_again_in_time_loses_nothing(bench: Bench) -> None:
    (host,) = bench.request(1)
    bench.join(1)
    bench.tick(14)
    assert host.state is HostState.UNREACHABLE
    bench.heard[1] = bench.now
    bench.tick(1)
    assert host.state is HostState.ATTACHED
    assert bench.told(HostDisconnected) == []


def test_nothing_a_lost_host_says_is_believed_and_it_comes_back_as_another(bench: Bench) -> None:
    (host,) = bench.request(1)
    bench.join(1)
    (process,) = bench.launch(host)
    bench.tick(16)
    assert bench.report(1, ChildStarted(process.ident, 5)) == []
    bench.join(1)
    assert host.state is HostState.LOST and bench.core.peers_waiting == 1
    (other,) = bench.request(1)
    assert other.state is HostState.ATTACHED
    bench.launch(other)
    assert bench.report(1, ChildExited(process.ident, 0, False, "")) == []


@pytest.mark.parametrize("asleep", [4.0, 3600.0])
def test_a_supervisor_that_was_asleep_itself_gives_a_full_grace(bench: Bench, asleep: float) -> None:
    """A laptop that was shut, or a kernel that was stopped: nothing is lost for it."""
    hosts = bench.request(3)
    for peer in (1, 2, 3):
        bench.join(peer)
    bench.tick(14)
    bench.now += asleep
    bench.tick(14)  # nobody was heard yet
    assert bench.told(HostDisconnected) == []
    for peer in (1, 2):
        bench.heard[peer] = bench.now
    bench.tick(2, heard=(1, 2))
    assert [host.state for host in hosts] == [HostState.ATTACHED, HostState.ATTACHED, HostState.LOST]


def test_a_loop_that_is_only_a_little_late_judges_as_ever(bench: Bench) -> None:
    (host,) = bench.request(1)
    bench.join(1)
    bench.tick(18, step=2.9)
    assert host.state is HostState.LOST


def test_a_returned_host_is_told_at_once_and_its_agent_stops_in_order(bench: Bench) -> None:
    (host,) = bench.request(1)
    bench.join(1)
    (process,) = bench.launch(host)
    actions = bench.do(HostsReturned([host], "broken"))
    assert kinds(actions) == [EndProcess, Announce, Announce, Tell]
    assert actions[-1] == Tell(1, StopHost(3, "broken"))
    assert "broken" in str(actions[1].message.result)  # type: ignore[union-attr]
    assert bench.report(1, ChildExited(process.ident, 0, False, "")) == []
    assert bench.report(1, HostStopped()) == [Fence(1, "", True)]
    assert bench.do(HostsReturned([host], None)) == []
    assert bench.core.is_empty


def test_an_agent_that_does_not_stop_is_given_up_in_time(bench: Bench) -> None:
    (host,) = bench.request(1)
    bench.join(1)
    bench.do(HostsReturned([host], None))
    assert bench.tick(14, heard=(1,)) == []
    assert bench.tick(2, heard=(1,)) == [Fence(1, "it did not stop in time", True)]


def test_a_launch_on_a_lost_or_returned_host_is_aborted_at_once(bench: Bench) -> None:
    (host,) = bench.request(1)
    bench.do(HostsReturned([host], None))
    processes = bench.launch(host, 2)
    results = [exited.result for exited in bench.told(ProcessExited)]  # type: ignore[attr-defined]
    assert [type(result) for result in results] == [ConnectionAbortedError] * 2
    assert "it was given back" in str(results[0])
    assert bench.do(LetterSent(processes, b"")) == []


def test_an_agent_that_ends_before_it_came_costs_one_host_that_nobody_else_will_serve(bench: Bench) -> None:
    first, second = bench.request(2)
    bench.do(AgentStarted(1))
    bench.do(AgentStarted(2))
    bench.do(AgentEnded(2, "no module zmq"))
    assert (first.state, first.reason) == (HostState.LOST, "no module zmq")
    bench.join(1)
    assert second.state is HostState.ATTACHED
    bench.do(AgentEnded(1, "killed"))
    assert [gone.reason for gone in bench.told(HostDisconnected)] == ["no module zmq", "killed"]  # type: ignore[attr-defined]


def test_an_agent_for_a_host_that_was_returned_meanwhile_costs_nobody(bench: Bench) -> None:
    first, second = bench.request(2)
    bench.do(AgentStarted(1))
    bench.do(AgentStarted(2))
    bench.do(HostsReturned([first], None))
    bench.do(AgentEnded(1, "x"))
    assert second.state is HostState.UNATTACHED


@pytest.mark.parametrize(
    "wrong",
    [
        lambda process: ChildStarted(process + 500, 1),
        lambda process: ChildStarted(-1, 1),
        lambda process: ChildExited(process, 0, False, ""),
        lambda process: HostStopped(),
    ],
    ids=["of a process nobody asked for", "of none", "ended before it started", "stopped unasked"],
)
def test_an_agent_that_breaks_the_rules_is_given_up(bench: Bench, wrong: Callable[[int], Report]) -> None:
    (host,) = bench.request(1)
    bench.join(1)
    (process,) = bench.launch(host)
    bench.report(1, wrong(process.ident))
    assert host.state is HostState.LOST
    assert [type(a) for a in bench.done].count(Fence) == 1


def test_an_agent_that_serves_nobody_has_nothing_to_say(bench: Bench) -> None:
    bench.join(1)
    assert kinds(bench.report(1, ChildStarted(0, 1))) == [Fence]


def test_an_agent_whose_words_are_not_understood_is_fenced_and_one_that_was_is_not_again(bench: Bench) -> None:
    bench.request(2)
    bench.join(1)
    bench.join(2)
    assert Fence in kinds(bench.do(PeerBroken(1, "garbage")))
    assert Fence not in kinds(bench.do(PeerFenced(2, "a later one came")))
    assert len(bench.told(HostDisconnected)) == 2


def test_an_agent_that_starts_anew_is_another_host(bench: Bench) -> None:
    (host,) = bench.request(1)
    bench.join(1)
    bench.join(1)
    assert host.state is HostState.LOST
    assert bench.core.peers_waiting == 1


def test_late_letters_of_ended_processes_are_counted_and_dropped(bench: Bench) -> None:
    (host,) = bench.request(1)
    bench.join(1)
    (process,) = bench.launch(host)
    bench.report(1, ChildStarted(process.ident, 1), ChildExited(process.ident, 0, False, ""))
    assert bench.report(1, ChildLetter(process.ident)) == []
    assert bench.core.counters.dropped == 1


def test_a_shutdown_gives_everything_back_and_ends_when_every_agent_has_gone(bench: Bench) -> None:
    bench.request(1)
    bench.join(1)
    bench.request(1)
    actions = bench.do(ShutdownAsked())
    assert actions.count(Tell(1, StopHost(3, None))) == 1
    assert len(bench.told(HostDisconnected)) == 2
    assert not bench.core.is_empty
    bench.report(1, HostStopped())
    assert bench.core.is_empty
    bench.join(2)  # came too late
    assert bench.done[-1] == Tell(2, StopHost(3, None))
    (late,) = bench.request(1)
    assert late.state is HostState.CLOSED


def test_no_move_leads_out_of_an_end() -> None:
    for state in (HostState.LOST, HostState.CLOSED):
        assert not [move for move in HOST_MOVES if move[0] is state]
    for ended in (ProcessState.EXITED, ProcessState.NOT_STARTED, ProcessState.LOST):
        assert not [move for move in PROCESS_MOVES if move[0] is ended]
