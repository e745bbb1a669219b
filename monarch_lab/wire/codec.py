"""Structs to bytes and back. A message that does not fit its type is a ProtocolError, never half-read."""

from __future__ import annotations

from typing import Any

import msgspec

from monarch_lab.errors import ProtocolError

_encoder = msgspec.msgpack.Encoder()
encode = _encoder.encode
# For files that people and other versions read.
encode_text = msgspec.json.Encoder().encode


class Decoder:
    """Decodes one conversation's messages: ``Decoder(FromAgent)(frame)``."""

    def __init__(self, types: Any) -> None:
        self._decoder: msgspec.msgpack.Decoder[Any] | msgspec.json.Decoder[Any] = msgspec.msgpack.Decoder(types)

    def __call__(self, frame: bytes | memoryview) -> Any:
        try:
            return self._decoder.decode(frame)
        except (msgspec.MsgspecError, RecursionError) as e:  # a thousand lists in each other are no message of ours
            raise ProtocolError(f"a message of {len(frame)} bytes is not understood: {e}") from None


class TextDecoder(Decoder):
    """Of what ``encode_text`` wrote."""

    def __init__(self, types: Any) -> None:
        self._decoder = msgspec.json.Decoder(types)
