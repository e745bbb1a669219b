"""Who belongs to the mesh, and who has proved it. Pure: frames and facts in, verdicts out.

A peer is let in by its first message, a hello with the mesh's key. Anything else from it is refused and told once.
"""

from __future__ import annotations

import hmac
import logging
from dataclasses import dataclass, field

from monarch_lab.errors import ProtocolError
from monarch_lab.wire.codec import Decoder, encode
from monarch_lab.wire.engine import control_topic, topic
from monarch_lab.wire.supervision import AgentHello, WorkerHello

log = logging.getLogger(__name__)
AGENT = b"a0"
# A hello is a key and a few words: a longer first message is not decoded at all.
_HELLO_BYTES = 4096
_MAX_TOLD = 64
_decode_hello = Decoder(AgentHello | WorkerHello)


def worker_identity(process: int) -> bytes:
    """The name of its report socket."""
    return b"w%d" % process


@dataclass(slots=True)
class Entry:
    """What is still missing before a rank may be told of work."""

    rank: int
    process: int
    said_hello: bool = False
    pid: int = 0
    topics: set[bytes] = field(default_factory=set)

    def missing_topics(self) -> set[bytes]:
        return {topic(self.rank), control_topic(self.rank)} - self.topics

    def is_greeted(self) -> bool:
        return self.said_hello and not self.missing_topics()


class Roll:
    def __init__(self, key: bytes) -> None:
        self._key = key
        self._by_identity: dict[bytes, Entry] = {}
        self._by_topic: dict[bytes, Entry] = {}
        self._proven: dict[bytes, int] = {}  # identity -> rank
        self._agent_proven = False
        self._told: set[bytes] = set()
        self.refused = 0  # messages

    def expect(self, rank: int, process: int) -> None:
        entry = Entry(rank, process)
        self._by_identity[worker_identity(process)] = entry
        self._by_topic[topic(rank)] = self._by_topic[control_topic(rank)] = entry

    def rank_of(self, identity: bytes) -> int | None:
        """The rank of a worker that has proved itself; None for anyone else."""
        return self._proven.get(identity)

    def is_agent(self, identity: bytes) -> bool:
        return identity == AGENT and self._agent_proven

    def admit(self, identity: bytes, frames: int, first: bytes | memoryview) -> AgentHello | Entry | None:
        """Judge the first message of a peer. None: refused, and logged."""
        reason = "it has not said hello"
        if frames == 1 and len(first) <= _HELLO_BYTES:
            try:
                hello = _decode_hello(first)
            except ProtocolError:
                pass
            else:
                if not hmac.compare_digest(hello.key, self._key):
                    reason = "it does not hold the mesh's key"
                elif isinstance(hello, AgentHello):
                    if identity == AGENT:
                        self._agent_proven = True
                        return hello
                    reason = "the mesh has its agent"
                else:
                    entry = self._by_identity.get(identity)
                    if entry is not None and (entry.process, entry.rank) == (hello.process, hello.rank):
                        entry.said_hello = True
                        entry.pid = hello.pid
                        self._proven[identity] = entry.rank
                        return entry
                    reason = f"it is not expected as rank {hello.rank}"
        self.refuse(identity, reason)
        return None

    def subscribe(self, name: bytes) -> Entry | None:
        """A subscription came in; the entry it belongs to."""
        entry = self._by_topic.get(name)
        if entry is not None:
            entry.topics.add(name)
        return entry

    def is_greeted(self, process: int) -> bool:
        entry = self._by_identity.get(worker_identity(process))
        return entry is not None and entry.is_greeted()

    def strike(self, process: int) -> None:
        """The process has ended: nothing more is read under its name."""
        entry = self._by_identity.pop(worker_identity(process), None)
        self._proven.pop(worker_identity(process), None)
        if entry is not None:
            for name in (topic(entry.rank), control_topic(entry.rank)):
                if self._by_topic.get(name) is entry:
                    del self._by_topic[name]

    def refuse(self, identity: bytes, reason: str) -> None:
        self.refused += 1
        if identity not in self._told and len(self._told) < _MAX_TOLD:
            self._told.add(identity)
            log.warning("peer %r is refused: %s", identity, reason)


def is_hello(frame: bytes | memoryview) -> bool:
    """Whether a proven worker's message is a second hello; as cheap as can be, for it is asked of every report."""
    return bytes(frame[: len(_HELLO_START)]) == _HELLO_START


def _hello_start() -> bytes:
    encoded = encode(WorkerHello(b"", 0, 0, 0, ""))
    tag = b"WorkerHello"
    return encoded[: encoded.index(tag) + len(tag)]


_HELLO_START = _hello_start()
