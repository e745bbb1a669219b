"""Joining, fencing and beginning anew, under everything a network can do. Time and numbers are given here."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from monarch_lab.config import Link, Timeouts
from monarch_lab.errors import ClosedError, ProtocolError
from monarch_lab.transport.dialing import Dialing, DialState
from monarch_lab.transport.events import Fenced, Joined, Received, Refused
from monarch_lab.transport.keys import Invitation
from monarch_lab.transport.roster import _MOST_FENCED, Action, Reply, Roster, Stranger
from monarch_lab.wire.codec import encode
from monarch_lab.wire.link import Envelope, Frame, Kind, LinkHello, LinkWelcome, Versions, link_limits, link_times

MESH = b"m" * 16
KEY = b"k" * 32
TIMES = link_times(Timeouts())
LIMITS = link_limits(Link(window_messages=8))
OURS = Versions("3.11.2", "2.13.0+cpu", "0.1.0")
WELCOME = LinkWelcome(KEY, OURS.python, OURS.torch, OURS.monarch_lab, 1, "kernel")

Wire = tuple[Envelope, Sequence[Frame]]


def roster_of(*peers: int) -> Roster:
    numbers = itertools.count(1000)
    roster = Roster(MESH, KEY, WELCOME, TIMES, LIMITS, lambda: next(numbers))
    for peer in peers:
        roster.expect(peer)
    return roster


def dialing_of(number: int = 1, incarnation: int = 7, now: float = 0.0, versions: Versions = OURS, **changes: Any):
    numbers = itertools.count(incarnation)
    values: dict[str, Any] = {"address": "ipc:///x", "mesh": MESH, "key": KEY, "peer": number, **changes}
    invitation = Invitation(times=TIMES, limits=LIMITS, **values)
    return Dialing(invitation, versions, 50 + number, f"h{number}", now, lambda: next(numbers))


def give(roster: Roster, wires: Sequence[Wire], now: float = 0.0, user: int | None = None) -> list[Action]:
    return [a for envelope, frames in wires for a in roster.handle(envelope, list(frames), user, b"route", now)]


def answer(dialing: Dialing, actions: Sequence[Action], now: float = 0.0) -> list[object]:
    replies = [action for action in actions if isinstance(action, Reply)]
    return [e for reply in replies for e in dialing.handle(reply.envelope, list(reply.frames), now)]


def join(roster: Roster, dialing: Dialing, now: float = 0.0) -> list[Action]:
    assert [type(e) for e in answer(dialing, give(roster, dialing.outgoing(now), now), now)] == [Joined]
    return give(roster, dialing.outgoing(now), now)


def test_a_peer_joins_by_hello_welcome_and_its_first_frame() -> None:
    roster, dialing = roster_of(1), dialing_of()
    dialing.send([b"early"])
    hello = dialing.outgoing(0.0)
    (welcome,) = give(roster, hello)
    assert isinstance(welcome, Reply) and welcome.envelope.kind is Kind.WELCOME
    with pytest.raises(ClosedError, match="has not joined"):
        roster.joined(1)
    assert answer(dialing, [welcome]) == [Joined(0, 1000, WELCOME)]
    joined, received = give(roster, dialing.outgoing(0.0))
    assert isinstance(joined, Joined) and (joined.peer, joined.incarnation, joined.hello.hostname) == (1, 7, "h1")
    assert received == Received(1, [b"early"])


def test_a_hello_is_said_again_and_answered_the_same() -> None:
    roster, dialing = roster_of(1), dialing_of()
    first = give(roster, dialing.outgoing(0.0))
    again = give(roster, dialing.outgoing(dialing.next_wake()))
    assert first == again
    pauses, now = [], 0.0
    for _ in range(20):
        pauses.append(dialing.next_wake() - now)
        now = dialing.next_wake()
        dialing.outgoing(now)
    assert pauses[0] < 0.1 and pauses[-1] == pytest.approx(TIMES.resend_at_most)
    answer(dialing, first)
    assert isinstance(give(roster, dialing.outgoing(now))[0], Joined)
    assert answer(dialing, give(roster, [(Envelope(Kind.HELLO, MESH, 7, 0), [dialing._hello])])) == []


@pytest.mark.parametrize(
    ("envelope", "frames", "user"),
    [
        (Envelope(Kind.HELLO, MESH, 7, 0), [b"garbage"], None),
        (Envelope(Kind.HELLO, MESH, 7, 0), [], None),
        (Envelope(Kind.HELLO, MESH, 7, 0), [bytes(5000)], None),
        (Envelope(Kind.HELLO, b"n" * 16, 7, 0), [encode(LinkHello(KEY, 1, "3.11", "", "", 1, ""))], None),
        (Envelope(Kind.HELLO, MESH, 7, 0), [encode(LinkHello(b"x" * 32, 1, "3.11", "", "", 1, ""))], None),
        (Envelope(Kind.HELLO, MESH, 7, 0), [encode(LinkHello(b"", 1, "2.7", "", "", 1, ""))], None),
        (Envelope(Kind.HELLO, MESH, 7, 0), [encode(LinkHello(KEY, 2, "3.11", "", "", 1, ""))], None),
        (Envelope(Kind.HELLO, MESH, 0, 0), [encode(LinkHello(KEY, 1, "3.11", "", "", 1, ""))], None),
        (Envelope(Kind.HELLO, MESH, 7, 0), [encode(LinkHello(KEY, 1, "3.11", "", "", 1, ""))], 2),
        (Envelope(Kind.WELCOME, MESH, 7, 0), [encode(WELCOME)], None),
        (Envelope(Kind.DATA, MESH, 7, 1000, 1), [b"before hello"], None),
        (Envelope(Kind.BARE, MESH, 7, 0), [], None),
    ],
)
def test_strangers_are_told_nothing(envelope: Envelope, frames: list[Frame], user: int | None) -> None:
    assert [type(action) for action in roster_of(1).handle(envelope, frames, user, b"r", 0.0)] == [Stranger]


@pytest.mark.parametrize(
    ("versions", "words"),
    [
        (Versions("3.12.1", "2.13.0", "0.1.0"), "Python is 3.11.2 here and 3.12.1 on h1 (pid 51)"),
        (Versions("3.11.9", "2.12.1", "0.1.0"), "torch is 2.13.0+cpu here and 2.12.1 on h1 (pid 51)"),
        (Versions("3.11.9", "2.13.1", "0.2.0"), "monarch_lab is 0.1.0 here and 0.2.0 on h1 (pid 51)"),
    ],
)
def test_other_versions_are_refused_with_both_named(versions: Versions, words: str) -> None:
    roster, dialing = roster_of(1), dialing_of(versions=versions)
    (refused,) = answer(dialing, give(roster, dialing.outgoing(0.0)))
    assert isinstance(refused, Refused) and words in refused.reason and refused.final
    with pytest.raises(ClosedError):
        dialing.send([b"x"])
    with pytest.raises(ClosedError):
        dialing.rejoin(1.0)


@pytest.mark.parametrize("versions", [Versions("3.11.9", "2.13.4+cu130", "0.1.7"), Versions("3.11.2", "", "0.1.0")])
def test_patch_levels_and_a_missing_torch_are_no_matter(versions: Versions) -> None:
    assert isinstance(join(roster_of(1), dialing_of(versions=versions))[0], Joined)


def test_another_version_of_the_link_is_refused_by_its_hello_and_dropped_otherwise() -> None:
    roster, dialing = roster_of(1), dialing_of()
    ((envelope, frames),) = dialing.outgoing(0.0)
    (refused,) = answer(dialing, give(roster, [(msgspec.structs.replace(envelope, version=9), frames)]))
    assert isinstance(refused, Refused) and "version 1 here and 9 on h1" in refused.reason


def test_a_fenced_incarnation_is_told_and_not_heard_and_may_join_anew() -> None:
    roster, dialing = roster_of(1), dialing_of()
    join(roster, dialing)
    dialing.send([b"late"])
    late = dialing.outgoing(0.0)
    told = roster.fence(1, "it was silent for 15 s", False)
    with pytest.raises(ClosedError):
        roster.joined(1)
    (refused,) = give(roster, late)
    assert isinstance(refused, Reply) and refused.envelope.kind is Kind.REFUSED
    assert answer(dialing, [*told, refused]) == [Refused("it was silent for 15 s", False)]
    assert dialing.state is DialState.REFUSED and dialing.outgoing(9.0) == []
    dialing.rejoin(10.0)
    actions = join(roster, dialing, 10.0)
    assert isinstance(actions[0], Joined) and actions[0].incarnation == 8
    # What is still under way of the old one reaches nobody, and does not hurt the new one.
    stale = give(roster, late, 11.0)
    with pytest.raises(ProtocolError):
        answer(dialing, stale)
    assert roster.joined(1).session is not None and dialing.state is DialState.WELCOMED


def test_a_final_fence_bars_every_later_incarnation() -> None:
    roster, dialing = roster_of(1), dialing_of()
    join(roster, dialing)
    answer(dialing, roster.fence(1, "given up", True))
    assert dialing.state is DialState.ENDED
    later = dialing_of(incarnation=20)
    assert answer(later, give(roster, later.outgoing(0.0))) == [Refused("given up", True)]


def test_a_second_process_with_the_same_invitation_takes_over_and_the_first_must_end() -> None:
    roster, first, second = roster_of(1), dialing_of(incarnation=7), dialing_of(incarnation=20)
    join(roster, first)
    actions = join(roster, second)
    assert [type(a) for a in actions] == [Reply, Fenced, Joined]
    assert actions[1] == Fenced(1, 7, "process 51 on h1 has joined in its place")
    assert answer(first, actions[:1]) == [Refused("process 51 on h1 has joined in its place", True)]


def test_a_hello_alone_replaces_nobody() -> None:
    roster, first = roster_of(1), dialing_of(incarnation=7)
    late = dialing_of(incarnation=3).outgoing(0.0)
    join(roster, first)
    assert [type(a) for a in give(roster, late)] == [Reply]
    first.send([b"goes on"])
    assert Received(1, [b"goes on"]) in give(roster, first.outgoing(1.0), 1.0)


def test_a_late_hello_between_welcome_and_joining_costs_no_more_than_a_second_hello() -> None:
    roster, dialing = roster_of(1), dialing_of(incarnation=7)
    answer(dialing, give(roster, dialing.outgoing(0.0)))
    give(roster, dialing_of(incarnation=3).outgoing(0.0))
    dialing.send([b"x"])
    assert [type(a) for a in give(roster, dialing.outgoing(0.0))] == [Stranger]
    now = dialing.next_wake()
    assert answer(dialing, [a for a in give(roster, dialing.outgoing(now), now) if isinstance(a, Reply)], now) == []
    now += TIMES.resend_at_most
    assert [type(a) for a in give(roster, dialing.outgoing(now), now)][:2] == [Joined, Received]


def test_a_peer_that_breaks_the_protocol_is_fenced_for_good() -> None:
    roster, dialing = roster_of(1), dialing_of()
    join(roster, dialing)
    actions = give(roster, [(Envelope(Kind.PIECE, MESH, 7, 1000, 1), [b"?", b""])])
    assert [type(a) for a in actions] == [Reply, Fenced]
    assert answer(dialing, actions)[0].final  # type: ignore[attr-defined]


def test_a_peer_that_is_fenced_again_and_again_is_refused_for_good() -> None:
    roster, dialing = roster_of(1), dialing_of()
    for _ in range(_MOST_FENCED):
        join(roster, dialing)
        answer(dialing, roster.fence(1, "again", False))
        dialing.rejoin(0.0)
    (refused,) = answer(dialing, give(roster, dialing.outgoing(0.0)))
    assert refused == Refused(f"it was fenced {_MOST_FENCED} times", True)
    assert len(roster._by_token) <= _MOST_FENCED + 2


def test_a_revoked_invitation_opens_nothing() -> None:
    roster, dialing = roster_of(1), dialing_of()
    join(roster, dialing)
    roster.revoke(1)
    dialing.send([b"x"])
    assert [type(a) for a in give(roster, [*dialing.outgoing(0.0), *dialing_of().outgoing(0.0)])] == [Stranger] * 2
    assert roster._by_token == {}


def test_the_transports_word_on_who_speaks_is_kept_to() -> None:
    roster, dialing = roster_of(1), dialing_of()
    assert answer(dialing, give(roster, dialing.outgoing(0.0), user=1))
    frames = dialing.outgoing(0.0)
    assert [type(a) for a in give(roster, frames, user=2)] == [Stranger]
    assert [type(a) for a in give(roster, frames, user=1)] == [Joined]


class Mesh(RuleBasedStateMachine):
    """One host whose agent crashes, is fenced and joins anew, over a network that keeps and repeats everything."""

    def __init__(self) -> None:
        super().__init__()
        self.roster = roster_of(1)
        self.numbers = itertools.count(1)
        self.now = 0.0
        self.flying: list[tuple[str, Wire]] = []
        self.seen: list[tuple[str, Wire]] = []
        self.count = 0
        self.sent: dict[int, list[bytes]] = {}  # by incarnation
        self.got: dict[int, list[bytes]] = {}
        self.told: dict[int, list[bytes]] = {}  # from the hub, by the agent's incarnation
        self.heard: dict[int, list[bytes]] = {}
        self.fenced: set[int] = set()
        self.current = 0  # the incarnation that the owner of the hub believes in
        self.crash()

    @rule()
    def crash(self) -> None:
        """The process ends and another begins with the same invitation."""
        self.dialing = dialing_of(incarnation=next(self.numbers) * 1000, now=self.now)
        self.note()

    @rule()
    def rejoin(self) -> None:
        if self.dialing.state is not DialState.ENDED:
            self.dialing.rejoin(self.now)
            self.note()

    def note(self) -> None:
        for table in (self.sent, self.got, self.told, self.heard):
            table[self.dialing.incarnation] = []

    def put(self) -> None:
        self.flying += [("hub", wire) for wire in self.dialing.outgoing(self.now)]
        peer = self.roster.known(1)
        assert peer is not None
        if peer.session is not None:
            self.flying += [("agent", wire) for wire in peer.session.outgoing(self.now)]

    def arrive(self, to: str, wire: Wire) -> None:
        self.seen.append((to, wire))
        envelope, frames = wire
        if to == "agent":
            try:
                events = self.dialing.handle(envelope, list(frames), self.now)
            except ProtocolError:
                return
            for event in events:
                if isinstance(event, Received):
                    self.heard[self.dialing.incarnation].append(bytes(event.frames[0]))
            return
        for action in self.roster.handle(envelope, list(frames), None, b"r", self.now):
            match action:
                case Reply():
                    self.flying.append(("agent", (action.envelope, action.frames)))
                case Joined():
                    assert action.incarnation not in self.fenced
                    self.current = action.incarnation
                case Fenced():
                    assert action.incarnation == self.current
                    self.fenced.add(action.incarnation)
                case Received():
                    assert envelope.sender == self.current and self.current not in self.fenced
                    self.got[self.current].append(bytes(action.frames[0]))

    @rule()
    def agent_sends(self) -> None:
        self.count += 1
        if self.dialing.state in (DialState.CALLING, DialState.WELCOMED, DialState.JOINED):
            self.dialing.send([b"%d" % self.count])
            self.sent[self.dialing.incarnation].append(b"%d" % self.count)
            self.put()

    @rule()
    def hub_sends(self) -> None:
        self.count += 1
        try:
            peer = self.roster.joined(1)
        except ClosedError:
            return
        assert peer.session is not None
        peer.session.send([b"%d" % self.count])
        self.told[self.current].append(b"%d" % self.count)
        self.put()

    @rule()
    def owner_fences(self) -> None:
        if self.current and self.current not in self.fenced and len(self.fenced) < 10:
            for action in self.roster.fence(1, "verdict", False):
                assert isinstance(action, Reply)
                self.flying.append(("agent", (action.envelope, action.frames)))
            self.fenced.add(self.current)

    @rule(seconds=st.sampled_from((0.02, 0.6, 5.0)))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.put()

    @rule()
    def deliver_all(self) -> None:
        wires, self.flying = self.flying, []
        for to, wire in wires:
            self.arrive(to, wire)
        self.put()

    @rule(at=st.integers(0, 1 << 16))
    def deliver_any(self, at: int) -> None:
        if self.flying:
            self.arrive(*self.flying.pop(at % len(self.flying)))

    @rule(at=st.integers(0, 1 << 16))
    def lose(self, at: int) -> None:
        if self.flying:
            self.flying.pop(at % len(self.flying))

    @rule(at=st.integers(0, 1 << 16))
    def replay(self, at: int) -> None:
        """What somebody saw is sent again, however old."""
        if self.seen:
            self.arrive(*self.seen[at % len(self.seen)])

    @invariant()
    def each_incarnation_heard_a_beginning_of_what_was_sent_to_it(self) -> None:
        for number in self.sent:
            assert self.got[number] == self.sent[number][: len(self.got[number])]
            assert self.heard[number] == self.told[number][: len(self.heard[number])]

    def teardown(self) -> None:
        if self.dialing.state in (DialState.REFUSED, DialState.ENDED):
            self.crash()
        number = self.dialing.incarnation
        for _ in range(300):
            self.deliver_all()
            peer = self.roster.known(1)
            assert peer is not None
            wakes = [self.dialing.next_wake(), *([peer.session.next_wake()] if peer.session else [])]
            self.now = max(self.now, min(wakes))
            self.put()
            if self.dialing.state is DialState.REFUSED:  # the owner had fenced it: its refusal came now
                self.dialing.rejoin(self.now)
                self.note()
                number = self.dialing.incarnation
            if self.current == number and self.got[number] == self.sent[number]:
                break
        assert self.current == number and self.got[number] == self.sent[number]


TestMesh = Mesh.TestCase
TestMesh.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
