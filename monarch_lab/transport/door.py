"""The kernel's sockets of one mesh: who may connect, and whose word is whose.

Unix sockets ask for the mesh's key, TCP ones for a listed key pair (curve.py). Runs on: the supervisor's thread, but
for ``guard`` and ``close``.
"""

from __future__ import annotations

import zmq

from monarch_lab.errors import ProtocolError
from monarch_lab.transport.curve import (
    Gatekeeper,
    as_client,
    as_private_client,
    as_private_server,
    as_server,
    check_available,
    user_of,
)
from monarch_lab.transport.directory import bind_private
from monarch_lab.transport.keys import make_pair
from monarch_lab.transport.link_socket import is_tcp
from monarch_lab.wire.keys import CurveKeys, KeyPair


class Door:
    def __init__(self, context: zmq.Context, key: bytes, handshake_s: float) -> None:
        self._gatekeeper = Gatekeeper(context, key)
        self._handshake_s = handshake_s
        self._pair: KeyPair | None = None
        self._public: dict[bytes, bytes] = {}  # identity -> public key

    def open(self) -> None:
        self._gatekeeper.start()

    def bind(self, socket: zmq.Socket, where: str) -> str:
        """Bind for those who may; the address that was bound. UsageError for TCP where libzmq has no CURVE."""
        if is_tcp(where):
            check_available()
            self._pair = self._pair or make_pair()
            as_server(socket, self._pair, self._handshake_s)
            socket.bind(where)
        else:
            as_private_server(socket, self._handshake_s)
            bind_private(socket, where)
        return socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def make_keys(self, identity: bytes) -> CurveKeys | None:
        """For one peer that connects as ``identity``; None where the sockets are Unix ones."""
        if self._pair is None:
            return None
        own = make_pair()
        self._gatekeeper.allow(own.public, identity)
        self._public[identity] = own.public
        return CurveKeys(self._pair.public, own)

    def strike(self, identity: bytes) -> None:
        """The peer has ended: its key opens nothing more."""
        public = self._public.pop(identity, None)
        if public is not None:
            self._gatekeeper.strike(public)

    def is_from(self, frame: zmq.Frame, identity: bytes) -> bool:
        """Whether the connection was opened by who speaks. On Unix sockets all hold one key, and this tells nothing."""
        return self._pair is None or user_of(frame) == identity

    @property
    def refused(self) -> int:
        return self._gatekeeper.refused

    def close(self) -> None:
        """After the sockets."""
        self._gatekeeper.close()


def show_keys(socket: zmq.Socket, where: str, key: bytes, curve: CurveKeys | None) -> None:
    """Before ``socket.connect(where)``: ``key`` to a Unix socket, ``curve`` to a TCP one."""
    if not is_tcp(where):
        as_private_client(socket, key)
    elif curve is None:
        raise ProtocolError(f"{where} is a TCP address, and there are no keys for it")
    else:
        as_client(socket, curve.own, curve.server)
