from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import zmq
from zmq.utils.monitor import recv_monitor_message

from monarch_lab.errors import UsageError
from monarch_lab.transport import curve
from monarch_lab.transport.curve import Gatekeeper, as_client, as_server, check_available, user_of
from monarch_lab.transport.keys import KeyPair, make_pair

HANDSHAKE_S = 5.0
SERVER = make_pair()


@pytest.fixture
def zmq_context() -> Iterator[zmq.Context]:  # playwright has a fixture named context
    made = zmq.Context()
    yield made
    made.destroy(linger=0)


@pytest.fixture
def gate(zmq_context: zmq.Context) -> Iterator[tuple[Gatekeeper, zmq.Socket, str]]:
    gatekeeper = Gatekeeper(zmq_context)
    gatekeeper.start()
    server = zmq_context.socket(zmq.ROUTER)
    as_server(server, SERVER, HANDSHAKE_S)
    server.bind("tcp://127.0.0.1:*")
    yield gatekeeper, server, server.getsockopt_string(zmq.LAST_ENDPOINT)
    server.close(linger=0)
    gatekeeper.close()


def client(zmq_context: zmq.Context, pair: KeyPair | None, server: bytes = SERVER.public) -> zmq.Socket:
    socket = zmq_context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    if pair is not None:
        as_client(socket, pair, server)
    return socket


def watch_handshake(socket: zmq.Socket, where: str) -> int:
    """Connect, and how the first handshake ended."""
    with socket.get_monitor_socket() as monitor:
        socket.connect(where)
        while monitor.poll(30_000):
            event = recv_monitor_message(monitor)["event"]
            if event in ENDS:
                return int(event)
    raise AssertionError("the handshake had no end")


ENDS = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED,
    zmq.EVENT_HANDSHAKE_FAILED_AUTH,
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL,
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL,
    zmq.EVENT_DISCONNECTED,
)


def test_a_listed_key_is_let_in_and_names_its_peer(
    zmq_context: zmq.Context, gate: tuple[Gatekeeper, zmq.Socket, str]
) -> None:
    gatekeeper, server, where = gate
    pair = make_pair()
    gatekeeper.allow(pair.public, b"17")
    socket = client(zmq_context, pair)
    socket.connect(where)
    socket.send(b"hello")
    assert server.poll(30_000)
    frames = [server.recv(copy=False), server.recv(copy=False)]
    assert frames[1].bytes == b"hello" and user_of(frames[1]) == b"17"
    socket.close()


@pytest.mark.parametrize("case", ["unlisted", "null", "struck", "wrong server"])
def test_whoever_is_not_on_the_list_is_refused(
    zmq_context: zmq.Context, gate: tuple[Gatekeeper, zmq.Socket, str], case: str
) -> None:
    gatekeeper, server, where = gate
    pair = make_pair()
    if case in ("struck", "wrong server"):
        gatekeeper.allow(pair.public, b"1")
    if case == "struck":
        gatekeeper.strike(pair.public)
    socket = client(
        zmq_context,
        None if case == "null" else pair,
        make_pair().public if case == "wrong server" else SERVER.public,
    )
    assert watch_handshake(socket, where) != zmq.EVENT_HANDSHAKE_SUCCEEDED
    assert not server.poll(0)
    assert gatekeeper.refused >= (case in ("unlisted", "struck"))
    socket.close()


def test_a_socket_without_curve_in_the_same_context_is_not_the_gatekeepers(
    zmq_context: zmq.Context, gate: tuple[Gatekeeper, zmq.Socket, str], tmp_path: object
) -> None:
    plain = zmq_context.socket(zmq.ROUTER)
    plain.setsockopt(zmq.LINGER, 0)
    where = f"ipc://{tmp_path}/plain"
    plain.bind(where)
    socket = client(zmq_context, None)
    socket.connect(where)
    socket.send(b"hello")
    assert plain.poll(30_000)
    assert user_of([plain.recv(copy=False), plain.recv(copy=False)][1]) is None
    socket.close()


@pytest.mark.parametrize(
    "request_",
    [[], [b"1.0"], [b"1.0", b"1", b"", b"", b"", b"NULL"], [b"2.0", b"1", b"", b"", b"", b"CURVE", bytes(32)]],
)
def test_a_request_that_is_no_request_for_curve_is_denied(zmq_context: zmq.Context, request_: list[bytes]) -> None:
    gatekeeper = Gatekeeper(zmq_context)
    assert gatekeeper._answer(request_, 0.0)[2] == b"400"
    gatekeeper.close()


def test_without_curve_tcp_is_refused_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(curve.zmq, "has", lambda _: False)
    with pytest.raises(UsageError, match="no CURVE.*install the pyzmq wheel"):
        check_available()


def test_a_closed_gatekeeper_leaves_no_thread(zmq_context: zmq.Context) -> None:
    before = threading.active_count()
    gatekeeper = Gatekeeper(zmq_context)
    gatekeeper.start()
    gatekeeper.close()
    assert threading.active_count() == before
