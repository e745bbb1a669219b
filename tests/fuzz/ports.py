"""Every socket that we bind, with a good peer on it: what strangers do to it must not matter to that one."""

from __future__ import annotations

import os
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import zmq

from monarch_lab.supervisor import Supervisor
from monarch_lab.transport.curve import as_client
from monarch_lab.transport.directory import address, make_directory, remove_directory
from monarch_lab.transport.door import show_keys
from monarch_lab.transport.keys import make_pair
from monarch_lab.wire import link, supervision
from monarch_lab.wire.codec import encode
from tests.fuzz.inputs import NASTY, damaged, envelopes, samples_of
from tests.supervisor.recorder import SETTINGS, Recorder, key_of, launch_of
from tests.transport.link_pump import MESH, Pump, dial, hub_at

_hellos = samples_of(supervision.AgentHello | supervision.WorkerHello | link.LinkHello)
_others = samples_of(supervision.FromAgent | link.LinkWelcome)
_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32)


@dataclass
class Port:
    addresses: list[str]
    key_holder: Callable[[zmq.Socket, str], None]  # lets a stranger past the door, where there is one
    ask: Callable[[], float]  # one round trip of the good peer; seconds
    replays: list[list[bytes]]  # right messages, of somebody else
    dropped: Callable[[], int]  # messages
    refused: Callable[[], int]  # handshakes
    server: bytes = b""  # public key, on TCP

    def wait_settled(self) -> None:
        """What strangers sent before has been read."""
        for _ in range(3):
            self.ask()


@contextmanager
def hub_port(where: str) -> Iterator[Port]:
    context, path = zmq.Context(), make_directory()
    with hub_at(context, address(path, "hub") if where == "unix" else "tcp://127.0.0.1:*") as hub:
        invitation, other = hub.invite(), hub.invite()
        pump = Pump(hub, [dial(context, invitation)])
        pump.until_joined()

        def ask() -> float:
            began = time.monotonic()
            pump.hub_events.clear()
            pump.dialers[0].send([b"asked"], began)
            pump.until(lambda: pump.received() == [[b"asked"]])
            return time.monotonic() - began

        def hold(stranger: zmq.Socket, _: str) -> None:
            if other.own is not None and other.server is not None:
                as_client(stranger, other.own, other.server)

        rules = pump.dialers[0]._rules
        session = rules.session
        data = link.Envelope(link.Kind.DATA, MESH, session.own, session.peer, 1, 0)
        stale = link.Envelope(link.Kind.DATA, MESH, session.own ^ 1, session.peer, 1, 0)
        hello = link.Envelope(link.Kind.HELLO, MESH, 5, 0)
        replays = [[link.pack_envelope(e), b"again"] for e in (data, stale)]
        replays.append([link.pack_envelope(hello), damaged(rules._hello, random.Random(3))])
        yield Port(
            [hub.address],
            hold,
            ask,
            replays,
            lambda: hub.stats().strangers,
            lambda: hub.stats().refused_keys,
            invitation.server or b"",
        )
        pump.dialers[0].close()
    context.destroy(linger=0)
    remove_directory(path)


@contextmanager
def mesh_port(where: str) -> Iterator[Port]:
    recorder = Recorder()
    supervisor = Supervisor(launch_of(socket_type=where), SETTINGS, recorder)
    with supervisor:
        supervisor.wait_ready(60)
        loop = supervisor._loop
        assert loop is not None
        spec = loop._spec

        def ask() -> float:
            began = time.monotonic()
            supervisor.send(None, b"echo asked")
            assert [recorder.wait_report(rank) for rank in (0, 1)] == [[b"echo asked"]] * 2
            return time.monotonic() - began

        def hold(stranger: zmq.Socket, at: str) -> None:
            show_keys(stranger, at, key_of(supervisor), spec.curve)

        hello = encode(supervision.WorkerHello(key_of(supervisor), 0, 0, 1, ""))
        replays = [[hello], [hello, b"x"], [encode(supervision.StopAgent(0.0))]]
        yield Port(
            [spec.reports, spec.orders],
            hold,
            ask,
            replays,
            lambda: loop._roll.refused,
            lambda: loop._door.refused,
            spec.curve.server if spec.curve is not None else b"",
        )
        assert recorder.lost == [] and recorder.reports == []


PORTS: dict[str, Callable[[], AbstractContextManager[Port]]] = {
    "hub, unix": lambda: hub_port("unix"),
    "hub, tcp": lambda: hub_port("tcp"),
    "mesh, unix": lambda: mesh_port("unix"),
    "mesh, tcp": lambda: mesh_port("tcp"),
}


def message(rng: random.Random, port: Port) -> list[bytes]:
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
            return [envelopes(rng), _hellos(rng)]
        case 5:
            return [damaged(envelopes(rng), rng), _others(rng)]
        case 6:
            return rng.choice(port.replays)
        case _:
            return [_others(rng), rng.randbytes(rng.choice((0, 1000, 100_000)))]


def flood(port: Port, count: int, seed: int) -> None:
    """``count`` messages of key holders under random names, to each address; the good peer is asked meanwhile."""
    rng = random.Random(seed)
    context = zmq.Context()
    try:
        for at in port.addresses:
            for start in range(0, count, 200):
                kind = rng.choice((zmq.DEALER, zmq.XSUB)) if at == port.addresses[-1] else zmq.DEALER
                stranger = context.socket(kind)
                stranger.setsockopt(zmq.LINGER, 1_000)
                if kind == zmq.DEALER and rng.random() < 0.8:
                    name = rng.choice((rng.randbytes(rng.randrange(1, 200)), b"a0", b"w0", b"w9"))
                    stranger.setsockopt(zmq.IDENTITY, name if name[0] else b"n" + name)
                port.key_holder(stranger, at)
                stranger.connect(at)
                for _ in range(min(200, count - start)):
                    if kind == zmq.XSUB:
                        stranger.send(rng.choice((b"\1", b"\0", b"")) + rng.randbytes(rng.randrange(200)))
                    else:
                        stranger.send_multipart(message(rng, port))
                stranger.close()  # what it has said may still leave
                port.ask()
    finally:
        context.destroy(linger=0)


def knock(port: Port, count: int, seed: int) -> None:
    """``count`` raw connections that speak no ZMTP, or half of it, and hang up or stay silent."""
    rng = random.Random(seed)
    silent: list[socket.socket] = []
    for at in port.addresses:
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
                        continue
            except OSError:
                pass  # it has hung up on us
            raw.close()
        port.ask()
    for raw in silent:
        raw.close()


def connect_raw(at: str) -> socket.socket:
    if at.startswith("ipc://"):
        raw = socket.socket(socket.AF_UNIX)
        raw.connect(at.removeprefix("ipc://"))
        return raw
    host, _, number = at.removeprefix("tcp://").rpartition(":")
    return socket.create_connection((host, int(number)))


def refuse_at_handshake(port: Port, count: int) -> list[float]:
    """``count`` CURVE clients whose keys are not listed; how long the good peer waited each time it was asked."""
    waits: list[float] = []
    context = zmq.Context()
    pair = make_pair()
    for at in port.addresses:
        for start in range(0, count, 100):
            strangers = []
            before = port.refused()
            for _ in range(min(100, count - start)):
                stranger = context.socket(zmq.DEALER)
                stranger.setsockopt(zmq.LINGER, 0)
                as_client(stranger, pair, port.server)
                stranger.connect(at)
                strangers.append(stranger)
            while port.refused() < before + len(strangers):
                waits.append(port.ask())
            for stranger in strangers:
                stranger.close()
    context.destroy(linger=0)
    return waits


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def wait_open_files(at_most: int) -> int:
    """libzmq closes what hung up in its own time."""
    pause = threading.Event()
    deadline = time.monotonic() + 30
    while (count := open_files()) > at_most and time.monotonic() < deadline:
        pause.wait(0.01)
    return count
