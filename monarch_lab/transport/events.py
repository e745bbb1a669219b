"""What the owner of one end of a link hears of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from monarch_lab.wire.link import Frame, LinkHello, LinkWelcome


@dataclass(frozen=True, slots=True)
class Joined:
    """The other end has proved itself. At the agent: ``peer`` 0, the supervisor."""

    peer: int
    incarnation: int
    hello: LinkHello | LinkWelcome


@dataclass(frozen=True, slots=True)
class Received:
    """A message, header first: once, in the order it was sent. Large frames are views."""

    peer: int
    frames: list[Frame]


@dataclass(frozen=True, slots=True)
class Fenced:
    """At the hub: an incarnation is over without the owner's word. A later one came, or it broke the rules."""

    peer: int
    incarnation: int
    reason: str


@dataclass(frozen=True, slots=True)
class Refused:
    """At the agent: this incarnation is not heard again. ``final``: end; else ``rejoin`` may be tried."""

    reason: str
    final: bool


LinkEvent: TypeAlias = Joined | Received | Fenced | Refused
