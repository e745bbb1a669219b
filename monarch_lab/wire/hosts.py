"""Messages of the supervision library: supervisor and host agent, and an agent and the processes it started.

Between supervisor and agent a message is one header, a list of the structs below, and the payloads of those that
have one, in order. Payloads are pickles: nobody here opens them. Headers are decoded by type, refused whole.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from monarch_lab.errors import ProtocolError
from monarch_lab.wire.codec import Decoder, encode


class HostMessage(msgspec.Struct, frozen=True, tag=True, array_like=True):
    pass


# --- supervisor to agent


class HostTerms(HostMessage, frozen=True):
    """First order to an agent that joins: how long it lives without word of us, and how long a stop takes."""

    lease_s: float
    stop_grace_s: float


class LaunchProcesses(HostMessage, frozen=True):
    """Start ``len(names)`` processes, numbered from ``first``, their ranks from ``rank``.

    Each is answered by ChildStarted or ChildNotStarted. With ``argv`` empty a FunctionCall runs: it is the payload.
    """

    first: int
    rank: int
    world_size: int
    per_host: int
    names: list[str]
    logs: list[str]  # a path for stdout and stderr each, "" to inherit the agent's
    argv: list[str]
    env: dict[str, str]
    cwd: str
    simulate: bool
    window_bytes: int  # how much a process may have sent that nobody has read

    @property
    def is_call(self) -> bool:
        return not self.argv


class DeliverLetter(HostMessage, frozen=True):
    """Hand the payload to each of these processes; held until they connect."""

    processes: list[int]


class SignalProcesses(HostMessage, frozen=True):
    """Signal these processes (their groups where ``group``). Unknown or ended: ignored."""

    processes: list[int]
    signal: int
    group: bool


class GrantCredit(HostMessage, frozen=True):
    """So many bytes of this process's letters have been read: it may send as many more."""

    process: int
    size: int


class StopHost(HostMessage, frozen=True):
    """SIGTERM, SIGKILL after ``grace_s``, HostStopped, exit: with 0, or with ``error`` and 1."""

    grace_s: float
    error: str | None


Order = HostTerms | LaunchProcesses | DeliverLetter | SignalProcesses | GrantCredit | StopHost


# --- agent to supervisor


class ChildStarted(HostMessage, frozen=True):
    process: int
    pid: int


class ChildNotStarted(HostMessage, frozen=True):
    process: int
    text: str


class ChildLetter(HostMessage, frozen=True):
    """A process sent the payload."""

    process: int


class ChildTook(HostMessage, frozen=True):
    """A process has read so many bytes of letters."""

    process: int
    size: int


class ChildExited(HostMessage, frozen=True):
    """``code`` >= 0 is the exit code, < 0 the signal. Follows every letter of the process."""

    process: int
    code: int
    out_of_memory: bool
    last_lines: str


class ChildNote(HostMessage, frozen=True):
    """Something about a process that the user should know and that ends nothing: its log cannot be written."""

    process: int
    text: str


class HostStopped(HostMessage, frozen=True):
    """Nothing is left below the agent."""


Report = ChildStarted | ChildNotStarted | ChildLetter | ChildTook | ChildExited | ChildNote | HostStopped

_decode_orders = Decoder(list[Order])
_decode_reports = Decoder(list[Report])


def _has_payload(message: HostMessage) -> bool:
    match message:
        case LaunchProcesses():
            return message.is_call
        case DeliverLetter() | ChildLetter():
            return True
    return False


def pack_messages(messages: Sequence[tuple[HostMessage, bytes]]) -> list[bytes]:
    """Frames for one send. The payload of a message that has none is not looked at."""
    return [encode([m for m, _ in messages]), *(payload for m, payload in messages if _has_payload(m))]


def unpack_orders(frames: list[bytes]) -> list[tuple[Order, bytes]]:
    return _join(_decode_orders, frames)


def unpack_reports(frames: list[bytes]) -> list[tuple[Report, bytes]]:
    return _join(_decode_reports, frames)


def _join(decode: Decoder, frames: list[bytes]) -> list:
    if not frames:
        raise ProtocolError("a message without frames")
    messages = decode(frames[0])
    payloads = iter(frames[1:])
    joined = [(m, next(payloads, None) if _has_payload(m) else b"") for m in messages]
    if any(payload is None for _, payload in joined) or next(payloads, None) is not None:
        raise ProtocolError(f"{len(frames) - 1} payloads came with {len(messages)} messages that need another number")
    return joined


# --- agent and process, over a Unix socket: transport/child_link.py has the frames


class ChildHello(msgspec.Struct, frozen=True):
    """First frame of a process. Answered by the agent's key, or by the end of the connection."""

    key: bytes
    process: int
    pid: int


class LocalOwner(msgspec.Struct, frozen=True):
    """What an agent on the supervisor's own machine is told beside its invitation, on its stdin.

    ``*_fd`` are numbers of inherited descriptors, -1 where there is none.
    """

    invitation: bytes
    pid: int  # of the supervisor
    pid_fd: int
    stderr_fd: int  # what processes without a log file inherit
