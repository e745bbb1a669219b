from __future__ import annotations

import pytest

from monarch_lab.errors import ProtocolError
from monarch_lab.wire.link import (
    HEADER_BYTES,
    Envelope,
    Kind,
    LinkHello,
    LinkWelcome,
    Versions,
    explain_difference,
    pack_envelope,
    unpack_envelope,
)


@pytest.mark.parametrize("kind", Kind)
def test_an_envelope_survives_the_wire(kind: Kind) -> None:
    envelope = Envelope(kind, b"m" * 16, 2**64 - 1, 0, 5, 2**63)
    frames = [b"one", memoryview(bytes(2))]
    assert unpack_envelope(pack_envelope(envelope, frames), frames) == envelope
    assert len(pack_envelope(envelope)) == HEADER_BYTES


@pytest.mark.parametrize(
    "frame", [b"", bytes(HEADER_BYTES), bytes(HEADER_BYTES + 1), b"mlab\1\0" + bytes(HEADER_BYTES - 6)]
)
def test_what_is_no_header_is_refused(frame: bytes) -> None:
    with pytest.raises(ProtocolError):
        unpack_envelope(frame)


@pytest.mark.parametrize("frames", [[], [b"one"], [b"one", b"tw"], [b"one", b"two", b""]])
def test_a_message_that_has_lost_something_is_refused(frames: list[bytes]) -> None:
    header = pack_envelope(Envelope(Kind.DATA, b"m" * 16, 1, 2, 1), [b"one", b"two"])
    with pytest.raises(ProtocolError, match="2 frames and 6 bytes is not whole"):
        unpack_envelope(header, frames)


def test_versions_that_differ_are_all_named() -> None:
    ours, theirs = Versions("3.11.2", "2.13.0+cpu", "0.1.0"), Versions("3.13.0", "2.6.0", "0.1.3")
    text = explain_difference(ours, theirs, "h2 (pid 7)")
    assert text == (
        "Python is 3.11.2 here and 3.13.0 on h2 (pid 7); torch is 2.13.0+cpu here and 2.6.0 on h2 (pid 7): "
        "install the same there"
    )
    assert explain_difference(ours, ours, "h2") == ""


def test_no_key_is_shown() -> None:
    key = b"secret"
    for message in (LinkHello(key, 1, "", "", "", 2, "h"), LinkWelcome(key, "", "", "", 2, "h")):
        assert "secret" not in repr(message)
