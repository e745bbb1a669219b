from __future__ import annotations

import os

import pytest

from monarch_lab.errors import ProtocolError
from monarch_lab.transport.stream import MAX_BYTES, MessageReader, pack, read_message, write_message


def test_messages_come_out_as_they_went_in_however_they_are_cut() -> None:
    messages = [b"", b"a", b"long" * 1000]
    data = b"".join(map(pack, messages))
    for step in (1, 3, 7, len(data)):
        reader = MessageReader()
        out = [m for at in range(0, len(data), step) for m in reader.feed(data[at : at + step])]
        assert out == messages


def test_a_message_crosses_a_pipe_and_its_end_is_none() -> None:
    read_end, write_end = os.pipe()
    write_message(write_end, b"spec")
    os.write(write_end, pack(b"cut short")[:-2])
    os.close(write_end)
    assert read_message(read_end) == b"spec"
    assert read_message(read_end) is None
    os.close(read_end)


def test_an_announced_length_beyond_the_limit_is_refused_before_anything_is_kept() -> None:
    with pytest.raises(ProtocolError, match="announced"):
        MessageReader().feed(b"\xff\xff\xff\xff")
    with pytest.raises(ProtocolError, match="longer than"):
        pack(bytes(MAX_BYTES + 1))
