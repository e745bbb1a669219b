"""One link under everything a network can do to messages. Time is a number here."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from monarch_lab.config import Link, Timeouts
from monarch_lab.errors import BacklogError, PayloadTooLarge, ProtocolError
from monarch_lab.wire.link import Envelope, Frame, Kind, LinkLimits, link_limits, link_times
from monarch_lab.wire.session import Session

MESH = b"m" * 16
TIMES = link_times(Timeouts())
LIMITS = link_limits(Link())
SMALL = LinkLimits(message_bytes=40, piece_bytes=4, window_bytes=1 << 10, window_messages=4, backlog_bytes=1 << 14)

Wire = tuple[Envelope, Sequence[Frame]]


def pair(limits: LinkLimits = LIMITS) -> tuple[Session, Session]:
    return Session(MESH, 1, 2, TIMES, limits, 0.0), Session(MESH, 2, 1, TIMES, limits, 0.0)


def feed(session: Session, wires: Sequence[Wire], now: float) -> list[list[bytes]]:
    found = []
    for envelope, frames in wires:
        found += session.receive(envelope, list(frames), now)
    return [[bytes(frame) for frame in message] for message in found]


def data(wires: Sequence[Wire]) -> list[int]:
    return [envelope.seq for envelope, _ in wires if envelope.kind is not Kind.BARE]


def test_a_message_arrives_once_and_its_ack_frees_it() -> None:
    a, b = pair()
    a.send([b"header", b"payload"])
    assert a.backlog_bytes() > 0
    assert feed(b, a.outgoing(0.0), 0.0) == [[b"header", b"payload"]]
    assert feed(a, b.outgoing(TIMES.ack), TIMES.ack) == []
    assert a.backlog_bytes() == 0
    assert a.next_wake() == TIMES.beat


def test_nothing_is_said_twice_before_an_ack_is_overdue() -> None:
    a, _ = pair()
    a.send([b"1"])
    assert data(a.outgoing(0.0)) == [1]
    assert a.outgoing(TIMES.resend * 0.9) == []
    assert data(a.outgoing(TIMES.resend * 1.1)) == [1]
    assert a.outgoing(TIMES.resend * 1.2) == []


def test_a_lost_message_holds_back_later_ones_and_its_resend_frees_them() -> None:
    a, b = pair()
    for text in (b"1", b"2", b"3"):
        a.send([text])
    lost, *others = a.outgoing(0.0)
    assert feed(b, others, 0.0) == []
    again = a.outgoing(1.0)
    assert feed(b, again[:1], 1.0) == [[b"1"], [b"2"], [b"3"]]
    assert feed(b, again, 1.0) == [] and b.duplicates == 3
    feed(a, b.outgoing(1.0), 1.0)
    assert a.backlog_bytes() == 0


def test_a_long_cut_ends_in_bursts_and_not_in_a_storm() -> None:
    a, b = pair()
    for n in range(1000):
        a.send([b"%d" % n])
    assert len(a.outgoing(0.0)) == 1000
    now, said = 0.0, 0
    while now < 600.0:  # nothing arrives
        now = a.next_wake()
        said += len(data(a.outgoing(now)))
    assert said <= 64 * (600 / TIMES.resend_at_most + 5)
    got: list[list[bytes]] = []
    rounds, healed = 0, now
    while a.backlog_bytes():
        now = max(now, a.next_wake())
        wires = a.outgoing(now)
        assert len(wires) <= 64
        got += feed(b, wires, now)
        feed(a, b.outgoing(now), now)
        rounds += 1
    assert got == [[b"%d" % n] for n in range(1000)]
    # Each burst is asked for by the ack of the one before, without a pause.
    assert rounds <= 20 and now - healed <= TIMES.resend_at_most


def test_messages_that_come_late_by_themselves_cost_a_burst_at_most() -> None:
    a, b = pair()
    for n in range(500):
        a.send([b"%d" % n])
    wires = a.outgoing(0.0)
    again = a.outgoing(1.0)
    assert len(again) == 64
    got = feed(b, [*wires, *again], 2.0)
    assert len(got) == 500
    feed(a, b.outgoing(2.0), 2.0)
    assert data(a.outgoing(2.0)) == [] and a.resends == 64


def test_the_wait_for_an_ack_follows_the_round_trip() -> None:
    a, b = pair()
    now = 0.0
    for n in range(20):  # a wire of two seconds
        a.send([b"%d" % n])
        wires = a.outgoing(now)
        now += 2.0
        feed(b, wires, now)
        feed(a, b.outgoing(now + TIMES.ack), now + TIMES.ack)
    before = a.resends
    a.send([b"last"])
    a.outgoing(now)
    assert data(a.outgoing(now + 1.9)) == [] and a.resends == before


def test_many_bytes_under_way_are_waited_for_longer() -> None:
    a, _ = pair()
    a.send([bytes(24 << 20)])
    a.outgoing(0.0)
    assert data(a.outgoing(5.0)) == []
    assert data(a.outgoing(7.0)) != []


def test_a_silent_link_beats() -> None:
    a, b = pair()
    for now in (0.0, 1.0, 2.0):
        (bare,) = a.outgoing(now)
        assert bare[0].kind is Kind.BARE
        assert feed(b, [bare], now) == []
        assert a.outgoing(now + 0.5) == []


def test_a_large_message_travels_in_pieces_and_arrives_frame_by_frame() -> None:
    limits = msgspec.structs.replace(LIMITS, piece_bytes=10, window_messages=7)
    a, b = pair(limits)
    message = [b"header", bytes(range(100)), b"", memoryview(bytearray(b"x" * 20)), b"tail"]
    a.send(message)
    a.send([b"small"])
    got, now = [], 0.0
    while a.backlog_bytes():
        wires = a.outgoing(now)
        assert all(sum(map(len, frames)) <= 11 for _, frames in wires)
        got += feed(b, wires, now)
        feed(a, b.outgoing(now + TIMES.ack), now + TIMES.ack)
        now += 0.1
    assert got == [[bytes(frame) for frame in message], [b"small"]]


def test_a_message_above_the_limit_is_refused_before_it_is_sent_with_what_to_do() -> None:
    a, _ = pair(SMALL)
    with pytest.raises(PayloadTooLarge, match="41 bytes is more than the 40.*MONARCH_LAB_LINK_MESSAGE_BYTES"):
        a.send([bytes(20), bytes(21)])
    assert a.backlog_bytes() == 0


def test_a_host_that_takes_nothing_is_an_error_before_memory_is_full() -> None:
    a, _ = pair(SMALL)
    taken = 0
    with pytest.raises(BacklogError, match="wait for a host that does not take them, and 4 more"):
        while True:
            a.send([b"1234"])
            taken += 1
    assert taken == SMALL.backlog_bytes // 132
    assert len(a.outgoing(0.0)) == SMALL.window_messages


def test_what_is_sent_before_the_peer_is_known_waits_for_it() -> None:
    a = Session(MESH, 1, 0, TIMES, LIMITS, 0.0)
    a.send([b"early"])
    assert a.outgoing(5.0) == [] and a.next_wake() == float("inf")
    a.meet(2)
    assert data(a.outgoing(5.0)) == [1]


@pytest.mark.parametrize(
    "envelope",
    [
        Envelope(Kind.DATA, b"n" * 16, 1, 2, 1),
        Envelope(Kind.DATA, MESH, 3, 2, 1),
        Envelope(Kind.DATA, MESH, 1, 3, 1),
        Envelope(Kind.DATA, MESH, 1, 2, 1, ack=1),
    ],
)
def test_another_mesh_or_incarnation_or_an_ack_of_nothing_changes_nothing(envelope: Envelope) -> None:
    a, b = pair()
    with pytest.raises(ProtocolError):
        b.receive(envelope, [b"foreign"], 0.0)
    a.send([b"ours"])
    assert feed(b, a.outgoing(0.0), 0.0) == [[b"ours"]]


@pytest.mark.parametrize(
    "pieces",
    [
        [(Kind.PIECE, [b"\0", b"x"]), (Kind.DATA, [b"inside"])],
        [(Kind.PIECE, [b"\7", b"x"])],
        [(Kind.PIECE, [b"\0"])],
        [(Kind.PIECE, [])],
        [(Kind.HELLO, [b"x"])],
        [(Kind.PIECE, [b"\1", bytes(30)]), (Kind.PIECE, [b"\0", bytes(30)])],
    ],
)
def test_pieces_that_make_no_message_break_the_protocol(pieces: list[tuple[Kind, list[Frame]]]) -> None:
    _, b = pair(SMALL)
    with pytest.raises(ProtocolError):
        for seq, (kind, frames) in enumerate(pieces, 1):
            b.receive(Envelope(kind, MESH, 1, 2, seq), frames, 0.0)


class Network(RuleBasedStateMachine):
    """Two ends, and between them a network that does what it likes."""

    def __init__(self) -> None:
        super().__init__()
        self.ends = dict(zip((1, 2), pair(SMALL), strict=True))
        self.now = 0.0
        self.sent: dict[int, list[list[bytes]]] = {1: [], 2: []}
        self.got: dict[int, list[list[bytes]]] = {1: [], 2: []}
        self.flying: list[Wire] = []
        self.seen: deque[Wire] = deque(maxlen=64)

    def put(self) -> None:
        for session in self.ends.values():
            self.flying += session.outgoing(self.now)

    def arrive(self, wire: Wire) -> None:
        self.seen.append(wire)
        to = wire[0].receiver
        self.got[to] += feed(self.ends[to], [wire], self.now)

    @rule(end=st.sampled_from((1, 2)), sizes=st.lists(st.integers(0, 13), min_size=1, max_size=3))
    def send(self, end: int, sizes: list[int]) -> None:
        message = [bytes([len(self.sent[end]) % 256]) * size for size in sizes]
        try:
            self.ends[end].send(message)
        except BacklogError:
            return
        self.sent[end].append(message)
        self.put()

    @rule(seconds=st.sampled_from((0.01, 0.1, 0.6, 5.0)))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.put()

    @rule(at=st.integers(0, 1 << 16))
    def deliver_any(self, at: int) -> None:
        if self.flying:
            self.arrive(self.flying.pop(at % len(self.flying)))

    @rule()
    def deliver_all(self) -> None:
        wires, self.flying = self.flying, []
        for wire in wires:
            self.arrive(wire)
        self.put()

    @rule(at=st.integers(0, 1 << 16))
    def repeat(self, at: int) -> None:
        if self.flying:
            self.flying.append(self.flying[at % len(self.flying)])

    @rule(at=st.integers(0, 1 << 16))
    def lose(self, at: int) -> None:
        if self.flying:
            self.flying.pop(at % len(self.flying))

    @rule()
    def cut(self) -> None:
        self.flying.clear()

    @rule(at=st.integers(0, 1 << 16))
    def replay(self, at: int) -> None:
        if self.seen:
            self.arrive(self.seen[at % len(self.seen)])

    @rule(at=st.integers(0, 1 << 16), field=st.sampled_from(("mesh", "sender", "receiver")))
    def forge(self, at: int, field: str) -> None:
        if not self.seen:
            return
        envelope, frames = self.seen[at % len(self.seen)]
        changed = msgspec.structs.replace(envelope, **{field: b"?" * 16 if field == "mesh" else 99})
        for end in self.ends.values():
            with pytest.raises(ProtocolError):
                end.receive(changed, list(frames), self.now)

    @invariant()
    def delivered_once_and_in_order(self) -> None:
        for end, other in ((1, 2), (2, 1)):
            assert self.got[other] == self.sent[end][: len(self.got[other])]

    @invariant()
    def memory_is_bounded(self) -> None:
        for end in self.ends.values():
            assert len(end._unacked) <= SMALL.window_messages and len(end._held) <= SMALL.window_messages
            assert end.backlog_bytes() <= SMALL.backlog_bytes
            assert end.backlog_bytes() == sum(item.size for item in (*end._unacked, *end._waiting))

    def teardown(self) -> None:
        messages = sum(map(len, self.sent.values()))
        for _ in range(200 + 40 * messages):
            if all(self.got[other] == self.sent[end] for end, other in ((1, 2), (2, 1))) and not any(
                end.backlog_bytes() for end in self.ends.values()
            ):
                break
            self.deliver_all()
            self.now = max(self.now, min(end.next_wake() for end in self.ends.values()))
            self.put()
        for end, other in ((1, 2), (2, 1)):
            assert self.got[other] == self.sent[end]
            assert self.ends[end].backlog_bytes() == 0 and not self.ends[end]._held


TestNetwork = Network.TestCase
TestNetwork.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)


def test_link_times_are_one_table() -> None:
    times = Timeouts()
    assert times.link_ack < times.link_resend < times.beat < times.link_resend_at_most
    assert times.link_resend_at_most < times.link_connection < times.unreachable < times.lost < times.lease
    assert 8 < times.unreachable  # a cut of eight seconds costs nothing
    assert replace(times, beat=2.0).beat == 2.0
