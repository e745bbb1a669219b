"""What strangers do to a port, from a process of their own."""

from __future__ import annotations

import random
import socket
from dataclasses import dataclass

import zmq

from monarch_lab.transport.door import show_keys
from monarch_lab.transport.keys import make_pair
from monarch_lab.wire import link, supervision
from monarch_lab.wire.keys import CurveKeys
from tests.fuzz.inputs import NASTY, damaged, envelopes, samples_of

_hellos = samples_of(supervision.AgentHello | supervision.WorkerHello | link.LinkHello)
_others = samples_of(supervision.FromAgent | link.LinkWelcome)
_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32)
_TAKEN = (b"a0", b"w0")  # names of peers that are there: zmq hears no second one
_BATCH = 200


@dataclass(frozen=True)
class Target:
    addresses: list[str]
    key: bytes | None  # what a key holder among them knows; None: there is no door
    curve: CurveKeys | None
    replays: list[list[bytes]]  # right messages, of somebody else


def message(rng: random.Random, target: Target) -> list[bytes]:
    """What a key holder that is broken, or means ill, may say."""
    match rng.randrange(8):
        case 0:
            return [rng.randbytes(rng.randrange(100)) for _ in range(rng.randrange(1, 5))]
        case 1:
            return [rng.choice(NASTY)]
        case 2:
            return [_hellos(rng)]
        case 3:
            return [damaged(_hellos(rng), rng), b"more"]
        case 4:
            said = _hellos(rng)
            return [link.pack_envelope(link.unpack_envelope(envelopes(rng)), [said]), said]
        case 5:
            return [damaged(envelopes(rng), rng), _others(rng)]
        case 6:
            return rng.choice(target.replays)
        case _:
            return [_others(rng), rng.randbytes(rng.choice((0, 1000, 100_000)))]


def flood(target: Target, count: int, seed: int) -> None:
    """``count`` messages of key holders under random names, to each address."""
    rng = random.Random(seed)
    context = zmq.Context()
    for at in target.addresses:
        for start in range(0, count, _BATCH):
            subscribes = at.endswith("orders.ipc") or (len(target.addresses) > 1 and at == target.addresses[1])
            kind = zmq.XSUB if subscribes and rng.random() < 0.7 else zmq.DEALER
            stranger = context.socket(kind)
            stranger.setsockopt(zmq.LINGER, 1_000)
            if kind == zmq.DEALER and start and rng.random() < 0.8:
                name = rng.choice(_TAKEN) if rng.random() < 0.1 else b"n" + rng.randbytes(rng.randrange(1, 200))
                stranger.setsockopt(zmq.IDENTITY, name)
            if target.curve is not None or target.key is not None:
                show_keys(stranger, at, target.key or b"", target.curve)
            stranger.connect(at)
            for _ in range(min(_BATCH, count - start)):
                if kind == zmq.XSUB:
                    stranger.send(rng.choice((b"\1", b"\0", b"")) + rng.randbytes(rng.randrange(200)))
                else:
                    stranger.send_multipart(message(rng, target))
            stranger.close()
            # Or what is sent would be the client's memory and not the port's.
            if start % (20 * _BATCH) == 0:
                context.term()
                context = zmq.Context()
    context.term()


def knock(target: Target, count: int, seed: int) -> None:
    """``count`` raw connections that speak no ZMTP, or half of it, and hang up or stay silent."""
    rng = random.Random(seed)
    for at in target.addresses:
        silent: list[socket.socket] = []
        for _ in range(count):
            raw = connect_raw(at)
            try:
                match rng.randrange(5):
                    case 0:
                        raw.sendall(rng.randbytes(rng.randrange(1, 300)))
                    case 1:
                        raw.sendall(_GREETING + rng.randbytes(rng.randrange(300)))
                    case 2:
                        raw.sendall(_GREETING[: rng.randrange(1, 64)])
                    case 3:
                        raw.sendall(_GREETING + b"\x06" + (1 << 40).to_bytes(8, "big") + bytes(100))
                    case _:
                        silent.append(raw)
                        if len(silent) > 50:
                            silent.pop(0).close()
                        continue
            except OSError:
                pass  # it has hung up on us
            raw.close()
        for raw in silent:
            raw.close()


def connect_raw(at: str) -> socket.socket:
    if at.startswith("ipc://"):
        raw = socket.socket(socket.AF_UNIX)
        raw.connect(at.removeprefix("ipc://"))
        return raw
    host, _, number = at.removeprefix("tcp://").rpartition(":")
    return socket.create_connection((host, int(number)))


def be_refused(target: Target, count: int) -> None:
    """``count`` CURVE clients whose keys are not listed, to each address."""
    assert target.curve is not None
    for at in target.addresses:
        for start in range(0, count, 50):
            context = zmq.Context()
            strangers = []
            for _ in range(min(50, count - start)):
                stranger = context.socket(zmq.DEALER)
                stranger.setsockopt(zmq.LINGER, 0)
                show_keys(stranger, at, b"", CurveKeys(target.curve.server, make_pair()))
                monitor = stranger.get_monitor_socket(zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_DISCONNECTED)
                stranger.connect(at)
                strangers.append((stranger, monitor))
            for stranger, monitor in strangers:
                assert monitor.poll(30_000), "a handshake had no end"
                stranger.disable_monitor()
                monitor.close(0)
                stranger.close()
            context.term()
