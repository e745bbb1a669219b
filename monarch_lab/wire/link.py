"""The envelope of every message between the supervisor and a host's agent, and the link's own messages.

A message is one header frame of fixed size, then the frames it carries. The layout of the header and of the three
messages of the handshake stay as they are in every version, so that unequal versions can tell each other so.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from enum import IntEnum
from typing import TypeAlias

import msgspec

from monarch_lab.config import Link, Timeouts
from monarch_lab.errors import ProtocolError
from monarch_lab.wire.codec import Decoder

VERSION = 1
_MAGIC = b"mlab"
_HEADER = struct.Struct("!4sBB16sQQQQIQ")
HEADER_BYTES = _HEADER.size
MESH_BYTES = 16
# The first message of a peer holds a key and a few words: a longer one is not decoded at all.
HELLO_BYTES = 4096

Frame: TypeAlias = bytes | memoryview


class Kind(IntEnum):
    HELLO = 1  # LinkHello
    WELCOME = 2  # LinkWelcome
    REFUSED = 3  # LinkRefused
    DATA = 4  # a whole message
    PIECE = 5  # a piece of a large one: a mark, then bytes
    BARE = 6  # nothing but the header: an ack, a beat


class Envelope(msgspec.Struct, frozen=True):
    """Who speaks to whom, and how far they have come. ``receiver`` 0: not known yet."""

    kind: Kind
    mesh: bytes
    sender: int
    receiver: int
    seq: int = 0
    ack: int = 0  # every message up to it has been delivered at the sender
    version: int = VERSION


def pack_envelope(envelope: Envelope, frames: Sequence[Frame] = ()) -> bytes:
    """The header of a message of ``frames``: how many, and how many bytes, are in it, so that none is lost unseen."""
    return _HEADER.pack(
        _MAGIC,
        envelope.version,
        envelope.kind,
        envelope.mesh,
        envelope.sender,
        envelope.receiver,
        envelope.seq,
        envelope.ack,
        len(frames),
        sum(map(size_of, frames)),
    )


def unpack_envelope(frame: Frame, frames: Sequence[Frame] = ()) -> Envelope:
    """Raises ProtocolError for anything that is no header of ours, or not of these ``frames``."""
    if len(frame) != HEADER_BYTES:
        raise ProtocolError(f"a header has {HEADER_BYTES} bytes, not {len(frame)}")
    magic, version, kind, mesh, sender, receiver, seq, ack, count, size = _HEADER.unpack(frame)
    if magic != _MAGIC:
        raise ProtocolError("this is no message of monarch_lab")
    if count != len(frames) or size != sum(map(size_of, frames)):
        raise ProtocolError(f"a message of {count} frames and {size} bytes is not whole")
    try:
        return Envelope(Kind(kind), mesh, sender, receiver, seq, ack, version)
    except ValueError:
        raise ProtocolError(f"there is no message of kind {kind}") from None


def size_of(frame: Frame) -> int:
    return len(frame) if isinstance(frame, bytes) else frame.nbytes


class LinkHello(msgspec.Struct, frozen=True, tag=True):
    """Agent to supervisor, until it is answered. Answered by LinkWelcome or LinkRefused; without the key by nothing."""

    key: bytes
    peer: int
    python: str
    torch: str  # "" where none is known
    version: str  # of monarch_lab
    pid: int
    hostname: str

    def __repr__(self) -> str:
        return f"LinkHello(peer={self.peer}, pid={self.pid}, hostname={self.hostname!r})"


class LinkWelcome(msgspec.Struct, frozen=True, tag=True):
    """Supervisor to agent. Any frame that names the supervisor's number confirms it, and then the agent has joined."""

    key: bytes
    python: str
    torch: str
    version: str
    pid: int
    hostname: str

    def __repr__(self) -> str:
        return f"LinkWelcome(pid={self.pid}, hostname={self.hostname!r})"


class LinkRefused(msgspec.Struct, frozen=True, tag=True):
    """Supervisor to an agent that holds the key. ``final``: it must end; else it may join with a new incarnation."""

    reason: str
    final: bool


decode_hello = Decoder(LinkHello)
decode_welcome = Decoder(LinkWelcome)
decode_refused = Decoder(LinkRefused)


class LinkTimes(msgspec.Struct, frozen=True):
    """Both ends of a link keep the supervisor's times. Seconds."""

    beat: float  # at the latest, something is said
    ack: float  # at the latest, what was heard is acknowledged
    resend: float  # at the earliest, what was not acknowledged is sent again
    resend_at_most: float  # and the longest pause between two tries
    handshake: float  # a connection that has not proved itself by then is closed
    connection: float  # a TCP connection that moves nothing for so long is made anew


class LinkLimits(msgspec.Struct, frozen=True):
    """Bytes and messages that one link may hold."""

    message_bytes: int
    piece_bytes: int  # larger messages travel in pieces
    window_bytes: int  # under way and not acknowledged
    window_messages: int
    backlog_bytes: int  # under way or waiting


def link_times(timeouts: Timeouts) -> LinkTimes:
    return LinkTimes(
        timeouts.beat,
        timeouts.link_ack,
        timeouts.link_resend,
        timeouts.link_resend_at_most,
        timeouts.link_handshake,
        timeouts.link_connection,
    )


def link_limits(link: Link) -> LinkLimits:
    return LinkLimits(link.message_bytes, link.piece_bytes, link.window_bytes, link.window_messages, link.backlog_bytes)


class Versions(msgspec.Struct, frozen=True):
    """What one side runs; "" for what it does not."""

    python: str
    torch: str
    monarch_lab: str


def explain_difference(ours: Versions, theirs: Versions, where: str) -> str:
    """Why the two cannot work together, both named; "" where they can. Patch levels may differ."""
    found = []
    for what, here, there in (
        ("Python", ours.python, theirs.python),
        ("torch", ours.torch, theirs.torch),
        ("monarch_lab", ours.monarch_lab, theirs.monarch_lab),
    ):
        if here and there and _minor(here) != _minor(there):
            found.append(f"{what} is {here} here and {there} on {where}")
    return "; ".join(found) + ": install the same there" if found else ""


def _minor(version: str) -> Sequence[str]:
    return version.split("+")[0].split(".")[:2]
