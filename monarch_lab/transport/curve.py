"""Who may connect: CURVE on TCP sockets with a list of the keys that are let in, a password on Unix ones.

Without a handler of ZAP requests whoever knows the server's public key is in; with ours, only listed keys are, and
each message carries the name of its peer as its User-Id. There is no way to do without. On a Unix socket, which only
this user can open at all, a peer shows the mesh's key: strangers get no word in, no subscription and no large frame.

Runs on: whoever calls; the gatekeeper answers on a thread of its own, which libzmq waits for at each handshake.
"""

from __future__ import annotations

import hmac
import logging
import threading
import time

import zmq
from zmq.utils import z85

from monarch_lab.errors import UsageError
from monarch_lab.transport.complaints import Complaints
from monarch_lab.transport.doorbell import Doorbell
from monarch_lab.wire.keys import KeyPair

log = logging.getLogger(__name__)
_ZAP = "inproc://zeromq.zap.01"
_VERSION = b"1.0"
_DOMAIN = b"monarch_lab"
_ANYBODY = b"mesh"
_CREDENTIALS = {b"CURVE": 1, b"PLAIN": 2}  # frames of them, after the six of a request
_BEFORE_CREDENTIALS = 6


def check_available() -> None:
    if not zmq.has("curve"):
        raise UsageError(
            "this installation's libzmq has no CURVE, and nothing of a mesh goes over TCP without it: "
            'install the pyzmq wheel from PyPI, or use socket_type="unix"'
        )


class Gatekeeper:
    """One for each zmq.Context whose servers ask for keys; started before the first of them binds.

    ``password`` opens those on Unix sockets; None: nothing does. libzmq's client tries no second time once it was
    refused, so a key is listed before its holder can know it.
    """

    def __init__(self, context: zmq.Context, password: bytes | None = None) -> None:
        self._password = password
        self._context = context
        self._lock = threading.Lock()  # guards the list
        self._users: dict[bytes, bytes] = {}  # public key, raw -> User-Id
        self.refused = 0
        self._complaints = Complaints()
        self._doorbell = Doorbell()
        self._socket: zmq.Socket | None = None
        self._thread = threading.Thread(target=self._run, name="gatekeeper", daemon=True)

    def start(self) -> None:
        self._socket = self._context.socket(zmq.REP)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(_ZAP)
        self._thread.start()

    def allow(self, public: bytes, user: bytes) -> None:
        with self._lock:
            self._users[z85.decode(public)] = user

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
            self._socket.send_multipart(self._answer(request, time.monotonic()))

    def _answer(self, request: list[bytes], now: float) -> list[bytes]:
        ident = request[1] if len(request) > 1 else b""
        user = self._user(request)
        if user is None:
            self.refused += 1
            where = request[3] if len(request) > 3 else b""
            if (line := self._complaints.note(where, "it holds no key that opens a socket here", now)) is not None:
                log.warning("%s", line)
            return [_VERSION, ident, b"400", b"", b"", b""]
        return [_VERSION, ident, b"200", b"", user, b""]

    def _user(self, request: list[bytes]) -> bytes | None:
        mechanism = request[5] if len(request) > 5 else b""
        if len(request) != _BEFORE_CREDENTIALS + _CREDENTIALS.get(mechanism, -1) or request[0] != _VERSION:
            return None
        if mechanism == b"PLAIN":
            is_right = self._password is not None and hmac.compare_digest(request[7], self._password)
            return _ANYBODY if is_right else None
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


def as_client(socket: zmq.Socket, pair: KeyPair, server: bytes) -> None:
    """Before connect; ``server`` is the public key of the only server that is believed."""
    check_available()
    socket.setsockopt(zmq.CURVE_SECRETKEY, pair.secret)
    socket.setsockopt(zmq.CURVE_PUBLICKEY, pair.public)
    socket.setsockopt(zmq.CURVE_SERVERKEY, server)


def as_private_server(socket: zmq.Socket, handshake_s: float) -> None:
    """For a Unix socket, before bind. The context must have a started Gatekeeper with the password."""
    socket.setsockopt(zmq.PLAIN_SERVER, 1)
    socket.setsockopt(zmq.ZAP_DOMAIN, _DOMAIN)
    socket.setsockopt(zmq.HANDSHAKE_IVL, int(handshake_s * 1000))


def as_private_client(socket: zmq.Socket, password: bytes) -> None:
    """For a Unix socket, before connect."""
    socket.setsockopt(zmq.PLAIN_USERNAME, _ANYBODY)
    socket.setsockopt(zmq.PLAIN_PASSWORD, password)


def user_of(frame: zmq.Frame) -> bytes | None:
    """The name that the gatekeeper gave with the connection; None where it was not asked."""
    try:
        text = frame.get("User-Id")
    except zmq.ZMQError:
        return None
    return text.encode() if isinstance(text, str) else bytes(text)
