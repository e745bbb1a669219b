"""What users send and receive: letters, what the supervisor itself writes, and the one place that pickles.

Pickles are made on the sending user's thread and opened on the receiving one, never on a thread of ours, and only
where the peer has proved that it holds a key.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from monarch_lab.errors import UsageTypeError, UsageValueError


class Letter(NamedTuple):
    """``sender`` is a Host, a Process, or None in a process that hears from its supervisor."""

    sender: Any
    message: Any


@dataclass(frozen=True, slots=True)
class HostConnected:
    hostname: str


@dataclass(frozen=True, slots=True)
class HostDisconnected:
    """The last letter of a host. ``time`` is the supervisor's monotonic clock, ``reason`` "" where we gave it back."""

    time: float
    reason: str = ""


@dataclass(frozen=True, slots=True)
class ProcessStarted:
    pid: int


@dataclass(frozen=True, slots=True)
class ProcessExited:
    """The last letter of a process: its exit code, minus the signal, or why nobody knows (an exception).

    ``message`` says who ended how, with the last lines of its stderr.
    """

    result: int | Exception
    message: str = field(default="", compare=False)


class ProcessFailedToStart(Exception):
    """``ProcessExited.result`` of a process that never ran; the text is the far side's own traceback."""


@dataclass(frozen=True, slots=True)
class UnreadableMessage:
    """Stands for a message that could not be unpickled here."""

    type_name: str  # of the error
    text: str
    size_bytes: int


def pack_letter(message: object, largest_bytes: int) -> bytes:
    """Pickled, functions and classes of a notebook by value. UsageTypeError or UsageValueError: nothing was sent."""
    # Heavy, and a process that only listens never needs it.
    import cloudpickle

    try:
        data: bytes = cloudpickle.dumps(message)
    except Exception as e:
        raise UsageTypeError(
            f"a message of type {type(message).__name__} cannot be pickled: {type(e).__name__}: {e}; nothing was sent"
        ) from e
    if len(data) > largest_bytes:
        raise UsageValueError(
            f"a message of {len(data):,} bytes is more than the {largest_bytes:,} that can be sent; put it into a file"
            " and send its path"
        )
    return data


def open_letter(data: bytes) -> object:
    """The message, or an UnreadableMessage that says why not. Runs the sender's code: on the user's thread only."""
    try:
        return pickle.loads(data)
    except Exception as e:
        return UnreadableMessage(type(e).__name__, str(e), len(data))
