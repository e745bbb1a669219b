"""Bytes that a decoder or a socket may be given: noise, right messages, and right messages that were damaged."""

from __future__ import annotations

import ctypes
import os
import pickle
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, get_args

from msgspec import inspect as mi

from monarch_lab.errors import ProtocolError
from monarch_lab.transport import child_link
from monarch_lab.transport.keys import Invitation, decode_invitation
from monarch_lab.transport.stream import MessageReader
from monarch_lab.wire import engine, hosts, link, record, snapshot, supervision
from monarch_lab.wire.codec import Decoder, TextDecoder, encode, encode_text

Decode = Callable[[bytes], Any]


@dataclass(frozen=True)
class Target:
    name: str
    decode: Decode
    samples: Callable[[random.Random], bytes]

    def __str__(self) -> str:
        return self.name


def samples_of(
    types: Any, *, many: bool = False, encoder: Callable[[Any], bytes] = encode
) -> Callable[[random.Random], bytes]:
    members = get_args(types) or (types,)
    infos = [mi.type_info(member) for member in members]

    def sample(rng: random.Random) -> bytes:
        values = [value_of(rng.choice(infos), rng) for _ in range(rng.randrange(3) if many else 1)]
        return encoder(values if many else values[0])

    return sample


def value_of(info: mi.Type, rng: random.Random, depth: int = 0) -> Any:
    """Something that fits the type."""
    match info:
        case mi.StructType():
            return info.cls(**{f.name: value_of(f.type, rng, depth + 1) for f in info.fields})
        case mi.BoolType():
            return rng.random() < 0.5
        case mi.IntType():
            return rng.choice((0, 1, -1, 1 << 20, (1 << 63) - 1, -(1 << 63)))
        case mi.FloatType():
            return rng.choice((0.0, -1.5, 1e300))
        case mi.StrType():
            return rng.choice(("", "x", "ä" * 40, "\0"))
        case mi.BytesType():
            return rng.randbytes(rng.choice((0, 1, 32, 200)))
        case mi.NoneType():
            return None
        case mi.LiteralType():
            return rng.choice(info.values)
        case mi.EnumType():
            return rng.choice(list(info.cls))
        case mi.ListType() | mi.VarTupleType() | mi.SetType() | mi.FrozenSetType() | mi.CollectionType():
            values = [value_of(info.item_type, rng, depth + 1) for _ in range(rng.randrange(3) if depth < 6 else 0)]
            return tuple(values) if isinstance(info, mi.VarTupleType) else values
        case mi.TupleType():
            return tuple(value_of(item, rng, depth + 1) for item in info.item_types)
        case mi.DictType():
            return {value_of(info.key_type, rng): value_of(info.value_type, rng, depth + 1) for _ in range(2)}
        case mi.UnionType():
            return value_of(rng.choice(info.types), rng, depth + 1)
        case mi.AnyType():
            return rng.choice((None, 1, "x", [1, [2]], {"a": 1.5}, b"\0"))
    raise AssertionError(f"no sample for {info}")


def envelopes(rng: random.Random) -> bytes:
    numbers = [rng.choice((0, 1, 7, 1000, (1 << 64) - 1)) for _ in range(4)]
    return link.pack_envelope(link.Envelope(rng.choice(list(link.Kind)), rng.randbytes(16), *numbers))


def streams(rng: random.Random) -> bytes:
    return b"".join(len(m).to_bytes(4, "big") + m for m in (rng.randbytes(rng.randrange(40)) for _ in range(3)))


def frames_of_a_process(rng: random.Random) -> bytes:
    kinds = list(child_link.Kind)
    return b"".join(child_link.pack_frame(rng.choice(kinds), rng.randbytes(rng.randrange(40))) for _ in range(3))


def read_frames(data: bytes) -> list[object]:
    reader = child_link.FrameReader(1000)
    found: list[object] = []
    for part in (data[: len(data) // 2], data[len(data) // 2 :]):
        reader.feed(part)
        while (frame := reader.next()) is not None:
            found.append(frame)
    return found


def read_stream(data: bytes) -> list[bytes]:
    reader = MessageReader()
    half = len(data) // 2
    return [*reader.feed(data[:half]), *reader.feed(data[half:])]


def _target(name: str, types: Any, decode: Decode | None = None) -> Target:
    return Target(name, decode or Decoder(types), samples_of(types))


TARGETS = [
    _target("orders of the agent", supervision.ToAgent),
    _target("reports of the agent", supervision.FromAgent),
    _target("hellos", supervision.AgentHello | supervision.WorkerHello),
    _target("a welcome", supervision.Welcome),
    _target("orders of the zygote", supervision.ToZygote),
    _target("answers of the zygote", supervision.FromZygote),
    _target("the spec of an agent", supervision.AgentSpec),
    _target("the spec of a worker", supervision.WorkerSpec),
    _target("orders of a worker", engine.Order),
    _target("control of a worker", engine.Control),
    _target("reports of a worker", engine.Report),
    _target("a snapshot", snapshot.KernelSnapshot),
    _target("the link's hello", link.LinkHello, link.decode_hello),
    _target("the link's welcome", link.LinkWelcome, link.decode_welcome),
    _target("the link's refusal", link.LinkRefused, link.decode_refused),
    _target("an invitation", Invitation, decode_invitation),
    Target("orders of a host", Decoder(list[hosts.Order]), samples_of(hosts.Order, many=True)),
    Target("reports of a host", Decoder(list[hosts.Report]), samples_of(hosts.Report, many=True)),
    _target("the hello of a process", hosts.ChildHello),
    _target("the owner of an agent", hosts.LocalOwner),
    Target("a record of a mesh", TextDecoder(record.MeshRecord), samples_of(record.MeshRecord, encoder=encode_text)),
    Target("frames of a process", read_frames, frames_of_a_process),
    Target("an envelope", link.unpack_envelope, envelopes),
    Target("a stream", read_stream, streams),
]

# Whole inputs that break naive decoders: depth, announced lengths, wrong text, tags of no type, pickles.
NASTY = [
    b"",
    b"\x91" * 5000,
    b"\x81\xa1a" * 3000,
    b"\x81\xa4type" * 3000,
    b"\xdd\xff\xff\xff\xff",
    b"\xdf\xff\xff\xff\xff",
    b"\xc6\xff\xff\xff\xff",
    b"\xdb\xff\xff\xff\xff",
    b"\xa2\xff\xfe",
    b"\x81\xa4type\xa2\xff\xfe",
    b"\x81\xa4type\xc0",
    b"\x81\xa4type\xa6__init",
    b"\x81\xff\x00",
    b"\xc1",
    b"\xd4\x01\x00",
    b"\xd7\xff" + bytes(8),
    b"\xcf" + b"\xff" * 8,
    b"\xff\xff\xff\xff",
    b"\x01\x00\x00\x01",
    pickle.dumps(print),
    bytes(100_000),
]


def damaged(data: bytes, rng: random.Random) -> bytes:
    """As a bad wire or a bad peer would leave it."""
    out = bytearray(data)
    for _ in range(rng.randrange(1, 4)):
        at = rng.randrange(len(out) + 1)
        match rng.randrange(7):
            case 0 if out:
                out[at % len(out)] ^= 1 << rng.randrange(8)
            case 1 if out:
                out[at % len(out)] = rng.randrange(256)
            case 2:
                del out[at:]
            case 3:
                out[at:at] = rng.randbytes(rng.randrange(1, 9))
            case 4:
                end = min(len(out), at + rng.randrange(1, 30))
                out[at:at] = out[at:end]
            case 5:
                del out[at : at + rng.randrange(1, 9)]
            case _:
                out[at:at] = rng.choice(NASTY)[:200]
    return bytes(out)


def inputs(target: Target, rng: random.Random) -> Iterator[bytes]:
    """For ever."""
    yield from NASTY
    while True:
        sample = target.samples(rng)
        yield sample
        yield damaged(sample, rng)
        yield damaged(sample, rng)
        yield rng.randbytes(rng.randrange(80))


def decodes_or_refuses(target: Target, data: bytes) -> bool:
    """Whether it was understood. Anything but ProtocolError goes through."""
    try:
        target.decode(data)
    except ProtocolError:
        return False
    return True


def resident_bytes() -> int:
    """What is in use: what was given back to malloc is first given back to the system."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
