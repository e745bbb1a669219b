"""CURVE on TCP sockets, and the list of the keys that are let in.

Without a handler of ZAP requests whoever knows the server's public key is in; with ours, only listed keys are, and
each message carries the number of its peer as its User-Id. There is no way to do without.

Runs on: whoever calls; the gatekeeper answers on a thread of its own, which libzmq waits for at each handshake.
"""

from __future__ import annotations

import threading

import zmq
from zmq.utils import z85

from monarch_lab.errors import InternalError, UsageError
from monarch_lab.transport.doorbell import Doorbell
from monarch_lab.transport.keys import KeyPair

_ZAP = "inproc://zeromq.zap.01"
_VERSION = b"1.0"
_DOMAIN = b"monarch_lab"
_REQUEST_FRAMES = 7  # with the credentials of CURVE


def check_available() -> None:
    if not zmq.has("curve"):
        raise UsageError(
            "this installation's libzmq has no CURVE, and nothing of a mesh goes over TCP without it: "
            'install the pyzmq wheel from PyPI, or use socket_type="unix"'
        )


class Gatekeeper:
    """One for each zmq.Context that has CURVE servers; started before the first of them binds."""

    def __init__(self, context: zmq.Context) -> None:
        self._context = context
        self._lock = threading.Lock()  # guards the list
        self._users: dict[bytes, bytes] = {}  # public key, raw -> User-Id
        self.refused = 0
        self._doorbell = Doorbell()
        self._socket: zmq.Socket | None = None
        self._thread = threading.Thread(target=self._run, name="gatekeeper", daemon=True)

    def start(self) -> None:
        check_available()
        self._socket = self._context.socket(zmq.REP)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(_ZAP)
        self._thread.start()

    def allow(self, public: bytes, user: int) -> None:
        with self._lock:
            self._users[z85.decode(public)] = b"%d" % user

    def strike(self, public: bytes) -> None:
        """For handshakes from now on; a connection that is made already stays: forget its peer as well."""
        with self._lock:
            self._users.pop(z85.decode(public), None)

    def close(self) -> None:
        """After the context's servers. Ends the thread."""
        self._doorbell.ring()
        if self._thread.ident is not None:
            self._thread.join()
        if self._socket is not None:
            self._socket.close()
        self._doorbell.close()

    def _run(self) -> None:
        assert self._socket is not None
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._doorbell.fd, zmq.POLLIN)
        while self._doorbell.fd not in dict(poller.poll()):
            request = self._socket.recv_multipart()
            self._socket.send_multipart(self._answer(request))

    def _answer(self, request: list[bytes]) -> list[bytes]:
        ident = request[1] if len(request) > 1 else b""
        user = self._user(request)
        if user is None:
            self.refused += 1
            return [_VERSION, ident, b"400", b"no", b"", b""]
        return [_VERSION, ident, b"200", b"", user, b""]

    def _user(self, request: list[bytes]) -> bytes | None:
        if len(request) != _REQUEST_FRAMES or request[0] != _VERSION or request[5] != b"CURVE":
            return None
        with self._lock:
            return self._users.get(request[6])


def as_server(socket: zmq.Socket, pair: KeyPair, handshake_s: float) -> None:
    """Before bind. The context must have a started Gatekeeper."""
    check_available()
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_SECRETKEY, pair.secret)
    socket.setsockopt(zmq.CURVE_PUBLICKEY, pair.public)
    socket.setsockopt(zmq.ZAP_DOMAIN, _DOMAIN)
    socket.setsockopt(zmq.HANDSHAKE_IVL, int(handshake_s * 1000))


def as_client(socket: zmq.Socket, pair: KeyPair, server: bytes, handshake_s: float) -> None:
    """Before connect; ``server`` is the public key of the only server that is believed."""
    check_available()
    socket.setsockopt(zmq.CURVE_SECRETKEY, pair.secret)
    socket.setsockopt(zmq.CURVE_PUBLICKEY, pair.public)
    socket.setsockopt(zmq.CURVE_SERVERKEY, server)
    socket.setsockopt(zmq.HANDSHAKE_IVL, int(handshake_s * 1000))


def user_of(frame: zmq.Frame) -> int | None:
    """The peer number that the gatekeeper gave with the connection; None where there was no CURVE."""
    try:
        text = frame.get("User-Id")
    except zmq.ZMQError:
        return None
    if not isinstance(text, str) or not text.isdecimal():
        raise InternalError(f"a User-Id that is none of ours: {text!r}")
    return int(text)
