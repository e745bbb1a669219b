from __future__ import annotations

import logging
import os
import pickle
import time
from collections.abc import Iterator

import cloudpickle
import msgspec
import pytest
import zmq

from monarch_lab.errors import BacklogError, ClosedError, PayloadTooLarge, UsageValueError
from monarch_lab.transport.dialer import Dialer
from monarch_lab.transport.dialing import DialState
from monarch_lab.transport.directory import address, make_directory, remove_directory
from monarch_lab.transport.events import Fenced, Joined, Refused
from monarch_lab.transport.hub import Hub
from monarch_lab.transport.keys import make_pair
from monarch_lab.wire.link import Versions
from tests.transport.link_pump import LIMITS, MESH, TIMES, Pump, dial, hub_at


@pytest.fixture
def zmq_context() -> Iterator[zmq.Context]:  # playwright has a fixture named context
    made = zmq.Context()
    yield made
    made.destroy(linger=0)


@pytest.fixture(params=["unix", "tcp"])
def hub(request: pytest.FixtureRequest, zmq_context: zmq.Context) -> Iterator[Hub]:
    path = make_directory()
    with hub_at(zmq_context, address(path, "hub") if request.param == "unix" else "tcp://127.0.0.1:*") as hub:
        yield hub
    remove_directory(path)


def test_messages_go_both_ways_in_order_and_large_ones_whole(hub: Hub, zmq_context: zmq.Context) -> None:
    invitation = hub.invite()
    pump = Pump(hub, [dial(zmq_context, invitation)])
    (dialer,) = pump.dialers
    large = os.urandom(5 << 20)
    dialer.send([b"early"], time.monotonic())
    pump.until_joined()
    joined = next(e for e in pump.hub_events if isinstance(e, Joined))
    assert isinstance(joined, Joined) and joined.peer == invitation.peer and joined.hello.pid == os.getpid()
    for n in range(200):
        hub.send(invitation.peer, [b"order", b"%d" % n], time.monotonic())
        dialer.send([b"report", b"%d" % n], time.monotonic())
    hub.send(invitation.peer, [b"large", large, b""], time.monotonic())
    dialer.send([b"large", memoryview(large)], time.monotonic())
    pump.until(lambda: len(pump.heard()) == 201 and len(pump.received()) == 202)
    assert pump.heard() == [*([b"order", b"%d" % n] for n in range(200)), [b"large", large, b""]]
    assert pump.received() == [[b"early"], *([b"report", b"%d" % n] for n in range(200)), [b"large", large]]
    pump.until(lambda: not hub.backlog_bytes(invitation.peer) and not dialer.backlog_bytes())
    dialer.close()


def test_a_silent_link_is_heard_each_beat_and_a_dead_one_is_not(hub: Hub, zmq_context: zmq.Context) -> None:
    invitation = hub.invite()
    assert hub.silent_for(invitation.peer, time.monotonic()) == float("inf")
    pump = Pump(hub, [dial(zmq_context, invitation)])
    pump.until_joined()
    before = hub.stats().frames_in
    pump.until(lambda: hub.stats().frames_in >= before + 3)
    assert hub.silent_for(invitation.peer, time.monotonic()) < 5
    assert pump.dialers[0].silent_for(time.monotonic()) < 5
    pump.dialers.pop().close()
    pump.until(lambda: hub.silent_for(invitation.peer, time.monotonic()) > 3 * TIMES.beat)
    hub.send(invitation.peer, [b"to nobody"], time.monotonic())  # costs nothing but memory
    assert hub.backlog_bytes(invitation.peer) > 0


def test_a_connection_that_is_made_anew_costs_nothing(hub: Hub, zmq_context: zmq.Context) -> None:
    invitation = hub.invite()
    pump = Pump(hub, [dial(zmq_context, invitation)])
    (dialer,) = pump.dialers
    pump.until_joined()
    for round_ in range(10):
        for n in range(100):
            hub.send(invitation.peer, [b"%d %d" % (round_, n)], time.monotonic())
            dialer.send([b"%d %d" % (round_, n)], time.monotonic())
            if n == 50:
                # zmq drops what is queued for the connection, on both ends.
                dialer.socket.disconnect(invitation.address)
                dialer.socket.connect(invitation.address)
        pump.turn()
    expected = [[b"%d %d" % (round_, n)] for round_ in range(10) for n in range(100)]
    pump.until(lambda: len(pump.heard()) >= 1000 and len(pump.received()) >= 1000)
    assert pump.heard() == pump.received() == expected
    assert sum(isinstance(e, Joined) for e in pump.hub_events) == 1
    dialer.close()


def test_a_fenced_agent_is_told_and_joins_anew_only_where_it_may(hub: Hub, zmq_context: zmq.Context) -> None:
    invitation = hub.invite()
    pump = Pump(hub, [dial(zmq_context, invitation)])
    (dialer,) = pump.dialers
    pump.until_joined()
    hub.fence(invitation.peer, "silent for 15 s", False)
    pump.until(lambda: Refused("silent for 15 s", False) in pump.events)
    with pytest.raises(ClosedError):
        hub.send(invitation.peer, [b"x"], time.monotonic())
    dialer.rejoin(time.monotonic())
    dialer.send([b"anew"], time.monotonic())
    pump.until(lambda: pump.received() == [[b"anew"]])
    hub.fence(invitation.peer, "stopped", True)
    pump.until(lambda: Refused("stopped", True) in pump.events)
    assert dialer.state is DialState.ENDED
    with pytest.raises(ClosedError):
        dialer.rejoin(time.monotonic())
    again = dial(zmq_context, invitation)
    pump.dialers.append(again)
    pump.until(lambda: again.state is DialState.ENDED)
    for one in pump.dialers:
        one.close()


def test_an_agent_started_again_with_its_invitation_takes_the_place_of_the_first(
    hub: Hub, zmq_context: zmq.Context
) -> None:
    invitation = hub.invite()
    pump = Pump(hub, [dial(zmq_context, invitation)])
    pump.until_joined()
    pump.dialers.append(dial(zmq_context, invitation))
    pump.until_joined(2)
    assert any(isinstance(e, Fenced) for e in pump.hub_events)
    pump.until(lambda: pump.dialers[0].state is DialState.ENDED)
    pump.dialers[1].send([b"second"], time.monotonic())
    pump.until(lambda: pump.received() == [[b"second"]])
    for one in pump.dialers:
        one.close()


def test_a_wrong_key_is_met_with_silence_and_other_versions_with_a_reason(hub: Hub, zmq_context: zmq.Context) -> None:
    right = hub.invite()
    wrong = dial(zmq_context, msgspec.structs.replace(hub.invite(), key=b"x" * 32))
    pump = Pump(hub, [wrong])
    pump.until(lambda: hub.stats().strangers >= 2)
    assert wrong.state is DialState.CALLING and pump.events == []
    old = Dialer(zmq_context, right, Versions("3.10.1", "", "0.1.0"), time.monotonic())
    pump.dialers = [old]
    pump.until(lambda: old.state is DialState.ENDED)
    (refused,) = pump.events
    assert isinstance(refused, Refused) and "Python is 3.11.2 here and 3.10.1 on" in refused.reason
    assert [type(e) for e in pump.hub_events] == []
    for one in (wrong, old):
        one.close()


def test_too_much_at_once_and_too_much_in_all_are_refused_before_sending(zmq_context: zmq.Context) -> None:
    path = make_directory()
    with hub_at(zmq_context, address(path, "hub"), message_bytes=1000, backlog_bytes=5000) as hub:
        invitation = hub.invite()
        pump = Pump(hub, [dial(zmq_context, invitation)])
        pump.until_joined()
        with pytest.raises(PayloadTooLarge):
            hub.send(invitation.peer, [bytes(1001)], time.monotonic())
        with pytest.raises(BacklogError):
            for _ in range(5):
                hub.send(invitation.peer, [bytes(1000)], time.monotonic())
        pump.until(lambda: len(pump.heard()) == 4)
        pump.dialers[0].close()
    remove_directory(path)


def test_a_forwarded_socket_is_dialled_where_the_invitation_says(zmq_context: zmq.Context) -> None:
    path = make_directory()
    with hub_at(zmq_context, address(path, "hub")) as hub:
        os.symlink(f"{path}/hub.ipc", f"{path}/far.ipc")
        pump = Pump(hub, [dial(zmq_context, hub.invite(address(path, "far")))])
        pump.until_joined()
        pump.dialers[0].close()
    remove_directory(path)


def test_an_address_that_is_none_of_ours_is_refused_and_nothing_stays_open(zmq_context: zmq.Context) -> None:
    with pytest.raises(UsageValueError, match="inproc://x"):
        hub_at(zmq_context, "inproc://x").open()


def test_what_strangers_send_is_dropped_counted_and_told_once(
    hub: Hub, zmq_context: zmq.Context, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def opened(*_: object) -> None:
        raise AssertionError("a stranger's bytes were unpickled")

    for module in (pickle, cloudpickle):
        monkeypatch.setattr(module, "loads", opened)
    invitation = hub.invite()
    pump = Pump(hub, [dial(zmq_context, invitation)])
    pump.until_joined()
    # On TCP strangers of this kind hold a listed key, or nothing of theirs would come as far as this.
    stranger = zmq_context.socket(zmq.DEALER)
    stranger.setsockopt(zmq.LINGER, 0)
    if invitation.server is not None:
        own = hub.invite().own
        assert own is not None
        stranger.curve_publickey, stranger.curve_secretkey, stranger.curve_serverkey = (
            own.public,
            own.secret,
            invitation.server,
        )
    stranger.connect(hub.address)
    for message in (
        [b""],
        [b"\0" * 54],
        [pickle.dumps(print)],
        [b"mlab" + bytes(50), b"x"],
        [bytes(1 << 20)],
        [b""] * 9,
    ):
        stranger.send_multipart(message)
    with caplog.at_level(logging.WARNING):
        pump.until(lambda: hub.stats().strangers >= 6)
    assert len([r for r in caplog.records if "is refused" in r.getMessage()]) == 1
    stranger.send(bytes(LIMITS.piece_bytes + 5000))  # above what is taken in: the connection is closed
    pump.dialers[0].send([b"still heard"], time.monotonic())
    pump.until(lambda: pump.received() == [[b"still heard"]])
    stranger.close()
    pump.dialers[0].close()


def test_one_agents_keys_do_not_speak_for_another(zmq_context: zmq.Context) -> None:
    with hub_at(zmq_context, "tcp://127.0.0.1:*") as hub:
        first, second = hub.invite(), hub.invite()
        impostor = dial(zmq_context, msgspec.structs.replace(first, own=second.own))
        pump = Pump(hub, [impostor])
        pump.until(lambda: hub.stats().strangers >= 1)
        assert impostor.state is DialState.CALLING
        impostor.close()


def test_a_revoked_invitation_is_refused_at_the_handshake(zmq_context: zmq.Context) -> None:
    with hub_at(zmq_context, "tcp://127.0.0.1:*") as hub:
        invitation = hub.invite()
        hub.revoke(invitation.peer)
        pump = Pump(hub, [dial(zmq_context, invitation)])
        pump.until(lambda: hub.stats().refused_keys >= 1)
        assert hub.stats().frames_in == 0
        pump.dialers[0].close()


def test_a_tcp_invitation_without_keys_is_refused_here(zmq_context: zmq.Context) -> None:
    with hub_at(zmq_context, "tcp://127.0.0.1:*") as hub:
        with pytest.raises(UsageValueError, match="needs the server's key"):
            dial(zmq_context, msgspec.structs.replace(hub.invite(), own=None))
        assert hub.address.startswith("tcp://127.0.0.1:") and not hub.address.endswith("*")
    assert make_pair() != make_pair() and len(MESH) == 16
