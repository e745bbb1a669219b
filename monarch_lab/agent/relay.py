"""The agent's connections to the processes it started. Bytes pass through: nothing is unpickled here.

Runs on: the agent's only thread.
"""

from __future__ import annotations

import hmac
import logging
import os
import socket
from collections.abc import Callable, Collection

from monarch_lab.errors import ProtocolError
from monarch_lab.transport.child_link import (
    Connection,
    Kind,
    listen,
    number_of,
    pack_frame,
    pack_number,
    user_of_peer,
)
from monarch_lab.wire.codec import Decoder
from monarch_lab.wire.hosts import ChildHello

log = logging.getLogger("monarch_lab.agent")
_decode_hello = Decoder(ChildHello)
_MAX_STRANGERS = 64


class Relay:
    """``on_frame(process, kind, body)`` for what a process says; HELLO is told with an empty body, once it has the key.

    ``live`` are the processes that may connect.
    """

    def __init__(
        self,
        directory: str,
        key: bytes,
        largest_bytes: int,
        live: Collection[int],
        on_frame: Callable[[int, Kind, bytes], None],
    ) -> None:
        self._key = key
        self._largest = largest_bytes
        self._live = live
        self._on_frame = on_frame
        self._listener = listen(directory, key)
        self._strangers: dict[int, Connection] = {}  # by descriptor, until they have said hello
        self._by_fd: dict[int, int] = {}
        self._by_process: dict[int, Connection] = {}
        self._refused = 0
        self.fd = self._listener.fileno()

    def sources(self, paused: Collection[int]) -> list[tuple[int, bool, bool]]:
        """(descriptor, read it, write it) of each connection, to be polled."""
        found = [(fd, True, False) for fd in self._strangers]
        for process, connection in self._by_process.items():
            found.append((connection.fd, process not in paused, connection.wants_to_write))
        return found

    def accept(self) -> None:
        """Take in who waits at the door."""
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:  # nobody, or no descriptor is left for them
                return
            if user_of_peer(sock) not in (None, os.getuid()):
                self._refuse(sock, "it is another user's")
                continue
            if len(self._strangers) >= _MAX_STRANGERS:
                # Those that stay silent must not keep out one of ours, which says hello at once.
                self._drop_stranger(next(iter(self._strangers.values())))
                self._count_refusal("it has not said who it is")
            connection = Connection(sock)
            self._strangers[connection.fd] = connection
            self._read_stranger(connection)

    def read(self, fd: int) -> None:
        if fd in self._strangers:
            self._read_stranger(self._strangers[fd])
        elif fd in self._by_fd:
            process = self._by_fd[fd]
            self._read_process(process, self._by_process[process])

    def flush(self, fd: int) -> None:
        if fd in self._by_fd:
            self._by_process[self._by_fd[fd]].flush()

    def write(self, process: int, kind: Kind, body: bytes) -> None:
        connection = self._by_process.get(process)
        if connection is not None:
            connection.write(pack_frame(kind, body))

    def write_number(self, process: int, kind: Kind, number: int) -> None:
        connection = self._by_process.get(process)
        if connection is not None:
            connection.write(pack_number(kind, number))

    def drain(self, process: int) -> None:
        """Everything an ended process has said, one that came and went between two rounds included; then forget it."""
        self.accept()
        connection = self._by_process.get(process)
        while connection is not None and connection.has_more():
            self._read_process(process, connection)
            connection = self._by_process.get(process)
        self._forget(process)

    def close(self) -> None:
        self._listener.close()
        for connection in [*self._strangers.values(), *self._by_process.values()]:
            connection.close()

    # --- one connection

    def _read_stranger(self, connection: Connection) -> None:
        alive = connection.read()
        try:
            frame = connection.reader.next()
            if frame is None:
                if not alive:
                    self._drop_stranger(connection)
                return
            process = self._identify(*frame)
        except ProtocolError as e:
            self._drop_stranger(connection)
            self._count_refusal(str(e))
            return
        del self._strangers[connection.fd]
        self._by_fd[connection.fd] = process
        self._by_process[process] = connection
        connection.reader.largest = self._largest
        connection.write(pack_frame(Kind.WELCOME, self._key))
        self._on_frame(process, Kind.HELLO, b"")
        self._cut(process, connection)

    def _identify(self, kind: Kind, body: bytes) -> int:
        if kind is not Kind.HELLO:
            raise ProtocolError(f"{kind.name} before hello")
        hello = _decode_hello(body)
        if not hmac.compare_digest(hello.key, self._key):
            raise ProtocolError("a wrong key")
        if hello.process not in self._live:
            raise ProtocolError(f"process {hello.process} does not run here")
        if hello.process in self._by_process:
            raise ProtocolError(f"process {hello.process} is connected already")
        return int(hello.process)

    def _read_process(self, process: int, connection: Connection) -> None:
        alive = connection.read()
        self._cut(process, connection)
        if not alive:
            self._forget(process)

    def _cut(self, process: int, connection: Connection) -> None:
        try:
            while (frame := connection.reader.next()) is not None:
                kind, body = frame
                if kind is Kind.TOOK:
                    number_of(body)
                elif kind is not Kind.LETTER:
                    raise ProtocolError(f"{kind.name} from a process")
                self._on_frame(process, kind, body)
        except ProtocolError as e:
            log.warning("process %d is not listened to any more: %s", process, e)
            self._forget(process)

    def _forget(self, process: int) -> None:
        connection = self._by_process.pop(process, None)
        if connection is not None:
            del self._by_fd[connection.fd]
            connection.close()

    def _drop_stranger(self, connection: Connection) -> None:
        del self._strangers[connection.fd]
        connection.close()

    def _refuse(self, sock: socket.socket, why: str) -> None:
        sock.close()
        self._count_refusal(why)

    def _count_refusal(self, why: str) -> None:
        self._refused += 1
        if self._refused & (self._refused - 1) == 0:  # the first, second, fourth ...: a flood is a few lines
            log.warning("refused %d connections so far, the last because: %s", self._refused, why)
