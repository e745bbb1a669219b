"""What agent and workers say, read from the socket that all of them send to and sorted by who proved to be whom."""

from __future__ import annotations

import logging
from collections.abc import Callable

import zmq

from monarch_lab.errors import ProtocolError
from monarch_lab.supervisor.roll import AGENT, Entry, Roll, is_hello
from monarch_lab.transport.door import Door
from monarch_lab.transport.frames import configure, receive_frames, send_frames
from monarch_lab.wire.codec import Decoder, encode
from monarch_lab.wire.supervision import AgentHello, FromAgent, Message

log = logging.getLogger(__name__)
_decode_from_agent = Decoder(FromAgent)
_MESSAGES_A_ROUND = 256


class ReportSocket:
    """``on_report(rank, frames)`` gets what workers say, ``on_agent`` the agent's messages, and ``on_hello`` whom the
    roll admits: the agent, or a worker's entry. Runs on: the supervisor's thread, once it is open."""

    def __init__(
        self,
        roll: Roll,
        on_report: Callable[[int, list[bytes | memoryview]], None],
        on_agent: Callable[[Message], None],
        on_hello: Callable[[AgentHello | Entry], None],
    ) -> None:
        self._roll = roll
        self._on_report = on_report
        self._on_agent = on_agent
        self._on_hello = on_hello

    def open(self, context: zmq.Context[zmq.Socket[bytes]], door: Door, address: str) -> str:
        """Bind; the address that others reach it by."""
        self._door = door
        self.socket = context.socket(zmq.ROUTER)
        configure(self.socket, 0)
        return door.bind(self.socket, address)

    def close(self) -> None:
        self.socket.close(linger=0)

    def send_to_agent(self, message: Message) -> None:
        send_frames(self.socket, [AGENT, encode(message)])

    def read(self) -> bool:
        """Take in what is there, up to a round's worth; whether there was anything."""
        for count in range(_MESSAGES_A_ROUND):
            try:
                parts = receive_frames(self.socket, wait=False)
            except zmq.Again:
                return count > 0
            identity = parts[0].bytes
            if len(parts) == 1:
                continue
            if self._door.is_from(parts[-1], identity):
                self._sort(identity, parts[1:])
            else:
                self._roll.refuse(identity, "it holds another's key")
        return True

    def _sort(self, identity: bytes, parts: list[zmq.Frame]) -> None:
        rank = self._roll.rank_of(identity)
        if rank is not None:
            header = parts[0].bytes
            if is_hello(header):
                self._roll.refuse(identity, f"rank {rank} has said hello before")
            else:
                self._on_report(rank, [header, *(part.buffer for part in parts[1:])])
        elif self._roll.is_agent(identity):
            try:
                message = _decode_from_agent(parts[0].buffer)
            except ProtocolError as e:
                log.warning("a message of the agent is dropped: %s", e)
            else:
                self._on_agent(message)
        else:
            admitted = self._roll.admit(identity, len(parts), parts[0].buffer)
            if admitted is not None:
                self._on_hello(admitted)
