"""CURVE key pairs, and all that a host needs to join: an invitation. It travels by a private channel or a 0600 file."""

from __future__ import annotations

import os
import stat

import msgspec
import zmq

from monarch_lab.errors import LaunchError, ProtocolError
from monarch_lab.wire.codec import Decoder, encode
from monarch_lab.wire.keys import KeyPair
from monarch_lab.wire.link import LinkLimits, LinkTimes

KEY_BYTES = 32
# An invitation is a few hundred bytes; nothing longer is read.
_LONGEST = 1 << 16


class Invitation(msgspec.Struct, frozen=True):
    """What lets one agent join, once at a time. ``own`` and ``server`` are for TCP, where CURVE is spoken."""

    address: str
    mesh: bytes
    key: bytes
    peer: int
    times: LinkTimes
    limits: LinkLimits
    server: bytes | None = None
    own: KeyPair | None = None

    def __repr__(self) -> str:
        return f"Invitation(peer {self.peer} to {self.address})"


decode_invitation = Decoder(Invitation)


def make_pair() -> KeyPair:
    return KeyPair(*zmq.curve_keypair())


def write_invitation(path: str, invitation: Invitation) -> None:
    """A new file for its owner alone; FileExistsError when there is one. Put it in a 0700 directory."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    with open(fd, "wb") as file:
        os.fchmod(fd, 0o600)
        file.write(encode(invitation))


def read_invitation(path: str) -> Invitation:
    """LaunchError where others could have read it, or it is none."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as e:
        raise LaunchError(f"the invitation {path} cannot be read: {e.strerror}") from e
    with open(fd, "rb") as file:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
            raise LaunchError(
                f"the invitation {path} is not a file of this user's alone (0600): others may know the key; start anew"
            )
        data = file.read(_LONGEST + 1)
    try:
        return decode_invitation(data[:_LONGEST])
    except ProtocolError as e:
        raise LaunchError(f"{path} is not an invitation: {e}") from None
