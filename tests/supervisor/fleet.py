"""A supervisor of many hosts, most of them simulated, some with real agents; and what it does with them, timed."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from monarch_lab.supervisor import Context, FunctionCall, HostConnected, ProcessExited, ProcessStarted
from monarch_lab.transport.stream import pack
from monarch_lab.wire.codec import encode
from tests.supervisor.recorder import ROOT
from tests.supervisor.simulated_hosts import raise_descriptor_limit

PATIENCE_S = 120.0
BROADCAST_BYTES = 1024


@dataclass(slots=True)
class Figures:
    start_s: float = 0.0  # from the launch of the groups until every process has started
    broadcast_s: list[float] | None = None  # from the send until the last process had it
    idle_cpu: float = 0.0  # share of a core, while nothing but heartbeats happens
    exit_s: float = 0.0
    work_cpu_s: float = 0.0  # of start, broadcasts and exit
    lost: int = 0


def answer_letters() -> None:
    """What a real process does: tell when it had each letter."""
    import monarch_lab as ml

    queue = ml.supervisor.get_message_queue()
    while True:
        queue.recv()
        queue.send(time.monotonic())


@contextmanager
def fleet(hosts: int, real: int, crowd: int = 250) -> Iterator[tuple[Context, Any]]:
    """(context, its hosts, real ones first); ``crowd`` simulated ones share a process."""
    raise_descriptor_limit()
    with Context(launcher="local", log_interval=0) as ctx:
        asked = ctx.request_hosts(real) if real else ()
        connected = ctx.messagefilter(HostConnected)
        for _ in asked:
            connected.recv(PATIENCE_S)
        crowds = []
        for first in range(0, hosts - real, crowd):
            invitations = [ctx.invitation() for _ in range(min(crowd, hosts - real - first))]
            command = [sys.executable, "-m", "tests.supervisor.simulated_hosts"]
            process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE)
            assert process.stdin is not None
            process.stdin.write(b"".join(pack(encode(invitation)) for invitation in invitations))
            process.stdin.close()
            crowds.append(process)
        try:
            deadline = time.monotonic() + PATIENCE_S
            while ctx.status().connections_waiting < hosts - real:
                assert time.monotonic() < deadline, "the simulated hosts did not join"
                time.sleep(0.05)
            # Those that wait are taken: none is started.
            rest = ctx.request_hosts(hosts - real)
            for _ in rest:
                connected.recv(PATIENCE_S)
            yield ctx, (*asked, *rest)
        finally:
            ctx.shutdown()
            for process in crowds:
                process.wait(PATIENCE_S)


def run(hosts: int, real: int, per_host: int, *, idle_s: float, broadcasts: int, crowd: int = 250) -> Figures:
    figures = Figures(broadcast_s=[])
    assert figures.broadcast_s is not None
    with fleet(hosts, real, crowd) as (ctx, asked):
        started, exited = ctx.messagefilter(ProcessStarted), ctx.messagefilter(ProcessExited)
        times = ctx.messagefilter(float)
        began, cpu = time.monotonic(), time.process_time()
        group = ctx.create_process_group(asked, FunctionCall(answer_letters), per_host)
        for _ in group:
            started.recv(PATIENCE_S)
        figures.start_s = time.monotonic() - began
        # Each real process answers, and of each simulated host the one that had the letter last.
        answers = real * per_host + hosts - real
        for number in range(broadcasts + 1):
            sent = time.monotonic()
            group.send(bytes([number]) * BROADCAST_BYTES)
            last = max(times.recv(PATIENCE_S).message for _ in range(answers))
            if number:  # the first waits for the real processes' imports
                figures.broadcast_s.append(last - sent)
        figures.work_cpu_s = time.process_time() - cpu
        began, cpu = time.monotonic(), time.process_time()
        time.sleep(idle_s)
        figures.idle_cpu = (time.process_time() - cpu) / (time.monotonic() - began)
        figures.lost = hosts - ctx.status().states.get("ATTACHED", 0)
        began, cpu = time.monotonic(), time.process_time()
        group.signal(9)
        for _ in group:
            exited.recv(PATIENCE_S)
        figures.exit_s = time.monotonic() - began
        figures.work_cpu_s += time.process_time() - cpu
    return figures


if __name__ == "__main__":
    numbers = [int(text) for text in sys.argv[1:]]
    print(run(*numbers, idle_s=5, broadcasts=5))
