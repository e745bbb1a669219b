"""What opens a socket of ours. Travels over private channels only, and is never shown."""

from __future__ import annotations

import msgspec


class KeyPair(msgspec.Struct, frozen=True):
    """Of CURVE, as libzmq writes them: 40 printable bytes each."""

    public: bytes
    secret: bytes

    def __repr__(self) -> str:
        return f"KeyPair({self.public.decode()}, secret)"


class CurveKeys(msgspec.Struct, frozen=True):
    """What a peer needs to connect by TCP: the public key of the only server to believe, and a pair of its own."""

    server: bytes
    own: KeyPair
