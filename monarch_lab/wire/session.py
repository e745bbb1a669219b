"""One end of one link between two incarnations: sequence numbers, acks, resending, order, and a bound on all of it.

Pure: no sockets, no clock. What is sent is delivered once and in order at the other end's incarnation, or never; a
transport below it may lose, delay, repeat and reorder whole messages as it likes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from monarch_lab.errors import BacklogError, PayloadTooLarge, ProtocolError
from monarch_lab.wire.link import Envelope, Frame, Kind, LinkLimits, LinkTimes, size_of

_NEVER = float("inf")
# How much is sent again at once, so that a long cut does not end in a storm: a round trip for each burst.
_BURST_MESSAGES = 64
_BURST_BYTES = 4 << 20
# A slow wire is not a lost message: each byte under way lengthens the wait for its ack as if it went at this pace.
_SLOWEST_BYTES_PER_S = 4 << 20
# At the latest after so many messages an ack is sent without a wait.
_ACK_EVERY = 32
# What keeping a message costs beside its bytes, so that a bound on bytes is one on small messages too.
_KEEPING_BYTES = 128
_FRAME_ENDS = b"\1"
_MESSAGE_ENDS = b"\3"
_GOES_ON = b"\0"


@dataclass(slots=True)
class _Item:
    kind: Kind
    frames: Sequence[Frame]
    size: int
    sent_at: float = 0.0
    resent: bool = False


class Session:
    def __init__(self, mesh: bytes, own: int, peer: int, times: LinkTimes, limits: LinkLimits, now: float) -> None:
        """``peer`` 0: not known yet; what is sent waits for ``meet``."""
        self.own = own
        self.peer = peer
        self.resends = 0
        self.duplicates = 0
        self._mesh = mesh
        self._times = times
        self._limits = limits
        # Sending. Item n of _unacked has number _acked + 1 + n.
        self._unacked: deque[_Item] = deque()
        self._waiting: deque[_Item] = deque()
        self._acked = 0
        self._unacked_bytes = 0
        self._waiting_bytes = 0
        self._round_trip = 0.0
        self._deviation = 0.0
        self._pause = times.resend
        self._resend_at = _NEVER
        self._burst_end = 0  # last number of the last burst that was sent again
        self._repair_to = 0  # last number that may have been lost with it
        # Receiving.
        self._delivered = 0
        self._held: dict[int, tuple[Kind, list[Frame], int]] = {}
        self._held_bytes = 0
        self._assembler = _Assembler(limits.message_bytes)
        self._acks_owed = 0
        self._ack_at = _NEVER
        self._beat_at = now

    def meet(self, peer: int) -> None:
        self.peer = peer

    def backlog_bytes(self) -> int:
        """What was sent and is not acknowledged, and a little for the keeping of each message."""
        return self._unacked_bytes + self._waiting_bytes

    def send(self, frames: Sequence[Frame]) -> None:
        """Take a message over; ``outgoing`` gives it to the wire. Nothing is taken where this raises."""
        size = sum(map(size_of, frames))
        limits = self._limits
        if size > limits.message_bytes:
            raise PayloadTooLarge(
                f"a message of {size} bytes is more than the {limits.message_bytes} that a link carries; "
                "send a large value as a tensor or write it to a file, or raise MONARCH_LAB_LINK_MESSAGE_BYTES"
            )
        if size <= limits.piece_bytes:
            items = [_Item(Kind.DATA, frames, size + _KEEPING_BYTES)]
        else:
            pieces = _split(frames, limits.piece_bytes)
            items = [_Item(Kind.PIECE, piece, len(piece[1]) + _KEEPING_BYTES) for piece in pieces]
        added = sum(item.size for item in items)
        if self.backlog_bytes() + added > limits.backlog_bytes:
            raise BacklogError(
                f"{self.backlog_bytes()} bytes wait for a host that does not take them, and {size} more were to be sent"
            )
        self._waiting += items
        self._waiting_bytes += added

    def receive(self, envelope: Envelope, frames: list[Frame], now: float) -> list[list[Frame]]:
        """The messages that can be delivered now, in order.

        ProtocolError when it is not of this mesh and these two incarnations (it changed nothing), or when the peer
        breaks the rules: end the session then.
        """
        if (envelope.mesh, envelope.sender, envelope.receiver) != (self._mesh, self.peer, self.own):
            raise ProtocolError("a message of another mesh or incarnation")
        if envelope.ack > self._acked + len(self._unacked):
            raise ProtocolError(f"message {envelope.ack} is acknowledged and was not sent")
        self._take_ack(envelope.ack, now)
        if envelope.kind is Kind.BARE:
            return []
        return self._take(envelope.seq, envelope.kind, frames, now)

    def outgoing(self, now: float) -> list[tuple[Envelope, Sequence[Frame]]]:
        """What is to be put on the wire now: lost messages again, new ones as the window lets them, an ack, a beat."""
        if not self.peer:
            return []
        out = []
        if now >= self._resend_at:
            out += self._resend(now)
        while self._waiting and self._has_room(self._waiting[0].size):
            item = self._waiting.popleft()
            item.sent_at = now
            self._waiting_bytes -= item.size
            self._unacked_bytes += item.size
            self._unacked.append(item)
            out.append((self._envelope(item.kind, self._acked + len(self._unacked)), item.frames))
        if self._unacked and self._resend_at == _NEVER:
            self._resend_at = now + self._patience()
        if not out and (now >= min(self._ack_at, self._beat_at) or self._acks_owed >= _ACK_EVERY):
            out.append((self._envelope(Kind.BARE, 0), ()))
        if out:  # each carries the ack
            self._acks_owed = 0
            self._ack_at = _NEVER
            self._beat_at = now + self._times.beat
        return out

    def next_wake(self) -> float:
        """When ``outgoing`` has something to say by itself."""
        if not self.peer:
            return _NEVER
        return min(self._resend_at, self._ack_at, self._beat_at)

    # --- sending

    def _envelope(self, kind: Kind, seq: int) -> Envelope:
        return Envelope(kind, self._mesh, self.own, self.peer, seq, self._delivered)

    def _has_room(self, size: int) -> bool:
        if not self._unacked:
            return True
        limits = self._limits
        return len(self._unacked) < limits.window_messages and self._unacked_bytes + size <= limits.window_bytes

    def _patience(self) -> float:
        return self._pause + self._unacked_bytes / _SLOWEST_BYTES_PER_S

    def _resend(self, now: float) -> list[tuple[Envelope, Sequence[Frame]]]:
        out: list[tuple[Envelope, Sequence[Frame]]] = []
        size = 0
        for number, item in enumerate(self._unacked, self._acked + 1):
            if out and (len(out) >= _BURST_MESSAGES or size + item.size > _BURST_BYTES):
                break
            item.resent = True
            size += item.size
            out.append((self._envelope(item.kind, number), item.frames))
        self.resends += len(out)
        self._burst_end = self._acked + len(out)
        self._repair_to = max(self._repair_to, self._acked + len(self._unacked))
        self._pause = min(2 * self._pause, self._times.resend_at_most)
        self._resend_at = now + self._patience() if out else _NEVER
        return out

    def _take_ack(self, ack: int, now: float) -> None:
        if ack <= self._acked:
            return
        while self._acked < ack:
            item = self._unacked.popleft()
            self._acked += 1
            self._unacked_bytes -= item.size
        if not item.resent:
            self._measure(now - item.sent_at)
        wait = self._round_trip + 4 * self._deviation
        self._pause = min(max(wait, self._times.resend), self._times.resend_at_most)
        if not self._unacked:
            self._resend_at = _NEVER
        elif self._acked >= self._burst_end and self._acked < self._repair_to:
            self._resend_at = now  # the burst has arrived: what was lost behind it is next
        else:
            self._resend_at = now + self._patience()

    def _measure(self, sample: float) -> None:
        if not self._round_trip:
            self._round_trip, self._deviation = sample, sample / 2
            return
        self._deviation += (abs(sample - self._round_trip) - self._deviation) / 4
        self._round_trip += (sample - self._round_trip) / 8

    # --- receiving

    def _take(self, seq: int, kind: Kind, frames: list[Frame], now: float) -> list[list[Frame]]:
        if seq <= self._delivered or seq in self._held:
            self.duplicates += 1
            self._ack_at = now  # its ack was lost, or is late
            return []
        size = sum(map(size_of, frames))
        limits = self._limits
        if seq > self._delivered + 1 and (
            len(self._held) >= limits.window_messages or self._held_bytes + size > limits.window_bytes
        ):
            return []  # beyond what may be under way: it comes again
        self._held[seq] = (kind, frames, size)
        self._held_bytes += size
        messages = []
        while (found := self._held.pop(self._delivered + 1, None)) is not None:
            self._held_bytes -= found[2]
            self._delivered += 1
            message = self._assembler.feed(found[0], found[1])
            if message is not None:
                messages.append(message)
        self._acks_owed += 1
        # A gap asks for its repair at once.
        self._ack_at = now if self._held else min(self._ack_at, now + self._times.ack)
        return messages


class _Assembler:
    """Puts the pieces of a large message together."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._frames: list[Frame] = []
        self._parts: list[Frame] = []
        self._size = 0

    def feed(self, kind: Kind, frames: list[Frame]) -> list[Frame] | None:
        """The message that is whole now. ProtocolError where the pieces make none."""
        if kind is Kind.DATA:
            if self._parts or self._frames:
                raise ProtocolError("a message begins inside another")
            return frames
        if kind is not Kind.PIECE or len(frames) != 2:
            raise ProtocolError("a piece of a message is a mark and its bytes")
        mark = bytes(frames[0])
        if mark not in (_GOES_ON, _FRAME_ENDS, _MESSAGE_ENDS):
            raise ProtocolError("a piece of a message has an unknown mark")
        self._size += size_of(frames[1])
        if self._size > self._limit:
            raise ProtocolError(f"a message is longer than {self._limit} bytes")
        self._parts.append(frames[1])
        if mark != _GOES_ON:
            self._frames.append(self._parts[0] if len(self._parts) == 1 else b"".join(self._parts))
            self._parts = []
        if mark != _MESSAGE_ENDS:
            return None
        whole, self._frames, self._size = self._frames, [], 0
        return whole


def _split(frames: Sequence[Frame], piece_bytes: int) -> list[tuple[bytes, Frame]]:
    pieces: list[tuple[bytes, Frame]] = []
    for frame in frames:
        view = memoryview(frame).cast("B")
        for start in range(0, max(1, view.nbytes), piece_bytes):
            end = start + piece_bytes
            pieces.append((_GOES_ON if end < view.nbytes else _FRAME_ENDS, view[start:end]))
    pieces[-1] = (_MESSAGE_ENDS, pieces[-1][1])
    return pieces
