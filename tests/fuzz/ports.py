"""Every socket that we bind, with a good peer on it: what strangers do to it must not matter to that one."""

from __future__ import annotations

import multiprocessing
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import zmq

from monarch_lab.supervisor import Supervisor
from monarch_lab.transport.directory import address, make_directory, remove_directory
from monarch_lab.wire import link, supervision
from monarch_lab.wire.codec import encode
from monarch_lab.wire.keys import CurveKeys
from tests.fuzz.inputs import damaged
from tests.fuzz.strangers import Target
from tests.supervisor.recorder import SETTINGS, Recorder, key_of, launch_of
from tests.transport.link_pump import MESH, Pump, dial, hub_at


@dataclass
class Port:
    target: Target
    ask: Callable[[], float]  # one round trip of the good peer; seconds
    dropped: Callable[[], int]  # messages of strangers
    refused: Callable[[], int]  # handshakes of strangers

    def meet(self, strangers: Callable[..., None], *args: object) -> list[float]:
        """Let strangers loose in a process of their own; how long the good peer waited, each time it was asked."""
        waits = []
        process = multiprocessing.get_context("spawn").Process(target=strangers, args=(self.target, *args))
        process.start()
        while process.is_alive():
            waits.append(self.ask())
        process.join()
        assert process.exitcode == 0
        process.close()
        for _ in range(3):  # what they have sent is read
            self.ask()
        return waits


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

        rules = pump.dialers[0]._rules
        session = rules.session
        data = link.Envelope(link.Kind.DATA, MESH, session.own, session.peer, 1, 0)
        stale = link.Envelope(link.Kind.DATA, MESH, session.own ^ 1, session.peer, 1, 0)
        hello = link.Envelope(link.Kind.HELLO, MESH, 5, 0)
        replays = [[link.pack_envelope(e, [b"again"]), b"again"] for e in (data, stale)]
        for said in (rules._hello, damaged(rules._hello, random.Random(3))):
            replays.append([link.pack_envelope(hello, [said]), said])
        curve = CurveKeys(other.server, other.own) if other.server and other.own else None
        target = Target([hub.address], None, curve, replays)
        yield Port(target, ask, lambda: hub.stats().strangers, lambda: hub.stats().refused_keys)
        pump.dialers[0].close()
    context.destroy(linger=0)
    remove_directory(path)


@contextmanager
def mesh_port(where: str) -> Iterator[Port]:
    recorder = Recorder()
    with Supervisor(launch_of(socket_type=where), SETTINGS, recorder) as supervisor:
        supervisor.wait_ready(60)
        loop = supervisor._loop
        assert loop is not None
        spec = loop._spec

        def ask() -> float:
            began = time.monotonic()
            supervisor.send(None, b"echo asked")
            assert [recorder.wait_report(rank) for rank in (0, 1)] == [[b"echo asked"]] * 2
            recorder.events.clear()
            return time.monotonic() - began

        hello = encode(supervision.WorkerHello(key_of(supervisor), 0, 0, 1, ""))
        replays = [[hello], [hello, b"x"], [encode(supervision.StopAgent(0.0))]]
        target = Target([spec.reports, spec.orders], key_of(supervisor), spec.curve, replays)
        yield Port(target, ask, lambda: loop._roll.refused, lambda: loop._door.refused)
        assert recorder.lost == [] and recorder.reports == []


PORTS: dict[str, Callable[[], AbstractContextManager[Port]]] = {
    "hub, unix": lambda: hub_port("unix"),
    "hub, tcp": lambda: hub_port("tcp"),
    "mesh, unix": lambda: mesh_port("unix"),
    "mesh, tcp": lambda: mesh_port("tcp"),
}


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def wait_open_files(at_most: int) -> int:
    """libzmq closes what hung up in its own time."""
    pause = threading.Event()
    deadline = time.monotonic() + 30
    while (count := open_files()) > at_most and time.monotonic() < deadline:
        pause.wait(0.01)
    return count
