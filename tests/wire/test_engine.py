"""Messages of the op stream: what arrives is what was sent, and nothing else is understood."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from monarch_lab.errors import ProtocolError
from monarch_lab.wire import engine as wire
from monarch_lab.wire.codec import Decoder, encode

_META = wire.TensorMeta((2, 3), (3, 1), "float32", "strided", "cpu", True, False)
_FAILURE = wire.Failure("ValueError", "text", [("file", 3, "f", "line")], b"\x00\xff")

_ORDERS: list[Any] = [
    wire.Define([]),
    wire.Define([wire.AmbientDef(1, {"grad": True, "dtype": "float32"}), wire.MeshDef(1, ["a"], [2], [0, 1])]),
    wire.Define([wire.RecordingDef(9, 1, 1, [2], [1], [16, 1, 0, 1, 2], [0.5])]),
    wire.Fetch(3, [1, -(5 << 20)]),
    wire.Poison([1, 2], _FAILURE),
    wire.Place([7]),
    wire.Exit(),
]


def _batch(numbers: list[Any]) -> wire.Batch:
    given = {"code": [16, 1, 2], "numbers": numbers, "report": True}
    return wire.Batch(**{name: given.get(name, 0) for name in wire.Batch.__struct_fields__})


def _order(message: Any) -> Any:
    return Decoder(wire.Order)(encode(message))


@pytest.mark.parametrize("message", _ORDERS, ids=lambda m: type(m).__name__)
def test_an_order_arrives_as_it_was(message: Any) -> None:
    assert _order(message) == message


def test_numbers_of_a_batch_keep_their_kind_and_value() -> None:
    numbers = [1, 1.0, -0.0, 5e-324, 1e308, math.inf, -(1 << 63), (1 << 63) - 1, 0]
    got = _order(_batch(numbers)).numbers
    assert [(type(x), math.copysign(1, x), x) for x in got] == [(type(x), math.copysign(1, x), x) for x in numbers]
    assert math.isnan(_order(_batch([math.nan])).numbers[0])


def test_metadata_is_equal_by_value_and_usable_as_a_key() -> None:
    again = msgspec.structs.replace(_META)
    assert again == _META and hash(again) == hash(_META) and {_META: 1}[again] == 1
    assert msgspec.structs.replace(_META, stride=(1, 2)) != _META


@pytest.mark.parametrize("frame", [b"", b"\x00", b"\xc1", b"not a message", encode(_FAILURE), b"\x92\x01\x02"])
def test_what_is_no_message_is_a_protocol_error(frame: bytes) -> None:
    with pytest.raises(ProtocolError):
        Decoder(wire.Order)(frame)


def test_a_report_is_no_order() -> None:
    with pytest.raises(ProtocolError):
        _order(wire.Output(1, "stdout", "text"))


def test_instructions_and_entries_do_not_share_numbers() -> None:
    assert max(wire.Op) < wire.FIRST_ENTRY


def test_topics_of_ranks_are_no_prefixes_of_one_another() -> None:
    topics = [wire.topic(r) for r in range(200)] + [wire.control_topic(r) for r in range(200)]
    topics += [wire.ALL, wire.CONTROL_ALL]
    assert len(set(topics)) == len(topics)
    for a in topics:
        assert [b for b in topics if b.startswith(a)] == [a]
