"""Contexts with short times and real agents, what they say, and what is left of them."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest

import monarch_lab as ml
from monarch_lab.supervisor import Context, HostConnected, HostDisconnected, Letter, Process, ProcessExited
from monarch_lab.transport import platform

PATIENCE_S = 30.0
# For tests of silence alone: on a machine that is busy, others would lose hosts for nothing.
QUICK: dict[str, Any] = dict(heartbeat_interval=0.1, unreachable_after=0.5, lost_after=2.0)

# Each case three times in `make test`, twenty in `make soak`.
repeated = pytest.mark.parametrize(
    "turn", [*range(3), *(pytest.param(turn, marks=pytest.mark.soak) for turn in range(3, 20))]
)


def receive_until(ctx: Any, done: Callable[[list[Letter]], bool]) -> list[Letter]:
    """Letters in the order they came, until ``done`` of them all."""
    letters: list[Letter] = []
    while not done(letters):
        letters.append(ctx.recv(PATIENCE_S))
    return letters


def receive_exits(ctx: Any, processes: Any) -> dict[Process, ProcessExited]:
    """Takes every letter until each of ``processes`` has ended."""
    wanted = set(processes)
    letters = receive_until(
        ctx, lambda found: wanted <= {x.sender for x in found if isinstance(x.message, ProcessExited)}
    )
    return {x.sender: x.message for x in letters if isinstance(x.message, ProcessExited)}


def of(sender: object, letters: list[Letter]) -> list[Any]:
    return [letter.message for letter in letters if letter.sender is sender]


def wait_connected(ctx: Context, count: int = 1) -> None:
    connected = ctx.messagefilter(HostConnected)
    for _ in range(count):
        connected.recv(PATIENCE_S)


def wait_disconnected(ctx: Context) -> Letter:
    return ctx.messagefilter(HostDisconnected).recv(PATIENCE_S)


def agent_pids(ctx: Context) -> list[int]:
    loop = ctx._loop
    assert loop is not None
    return [agent.pid for agent in loop._agents.values()]


def read_pids(ctx: Context, count: int) -> list[int]:
    """What processes send of themselves and theirs."""
    numbers = ctx.messagefilter(list)
    return [pid for _ in range(count) for pid in numbers.recv(PATIENCE_S).message]


def all_gone(pids: list[int]) -> bool:
    return not any(platform.is_alive(pid) for pid in pids)


def forbid_children() -> set[int]:
    """Processes below this one, now: to be compared with later."""
    return set(platform.descendants(os.getpid()))


# --- what processes run


def send_and_exit(count: int) -> None:
    queue = ml.supervisor.get_message_queue()
    for number in range(count):
        queue.send(number)
    os._exit(3)  # at once: what was sent has been sent


def echo_for_ever() -> None:
    queue = ml.supervisor.get_message_queue()
    while True:
        queue.send(queue.recv().message)


def send_family() -> None:
    """Tell our pid, a child's in our group, and that of a daemon in a session of its own; then sleep."""
    import subprocess
    import sys
    import time

    sleep = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]
    child = subprocess.Popen(sleep)
    code = f"import subprocess; print(subprocess.Popen({sleep!r}, start_new_session=True, stdout=-3, stderr=-3).pid)"
    daemon = int(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout)
    ml.supervisor.get_message_queue().send([os.getpid(), child.pid, daemon])
    time.sleep(600)


def ignore_sigterm() -> None:
    import signal
    import time

    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    ml.supervisor.get_message_queue().send([os.getpid()])
    time.sleep(600)


def send_environment(*names: str) -> None:
    ml.supervisor.get_message_queue().send({name: os.environ.get(name) for name in names})


def send_command_lines(_: str) -> None:
    """Those of this process and all above it."""
    lines = []
    pid = os.getpid()
    while pid > 1:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            lines.append(file.read())
        stat = platform.read_stat(pid)
        assert stat is not None
        pid = int(stat[1])
    ml.supervisor.get_message_queue().send(tuple(lines))


def read_when_told() -> None:
    """Reads nothing until there is a file "go" beside its log; then says how many letters came before "end"."""
    import time

    queue = ml.supervisor.get_message_queue()
    go = os.path.join(os.path.dirname(os.readlink("/proc/self/fd/1")), "go")
    while not os.path.exists(go):
        time.sleep(0.01)
    count = 0
    while queue.recv(PATIENCE_S).message != "end":
        count += 1
    queue.send(count)


def flood(count: int, size: int) -> None:
    """Send more than is read; say once that it does not go on, by a letter of another kind, and then wait."""
    queue = ml.supervisor.get_message_queue()
    sent = 0
    try:
        for _ in range(count):
            queue.send(b"x" * size, timeout=0.2)
            sent += 1
    except ml.DeviceException as e:
        queue.send(str(e)[:100])  # small enough for what is left
    for _ in range(count - sent):
        queue.send(b"x" * size)
