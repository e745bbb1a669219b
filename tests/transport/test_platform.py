from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from monarch_lab.transport import platform

SLEEP = [sys.executable, "-S", "-c", "import time; print(flush=True); time.sleep(600)"]
Spawn = Callable[..., subprocess.Popen[bytes]]

pytestmark = pytest.mark.skipif(not platform.LINUX, reason="pidfd and /proc")


@pytest.fixture
def spawn() -> Iterator[Spawn]:
    children: list[subprocess.Popen[bytes]] = []

    def start(argv: list[str] = SLEEP, **env: str) -> subprocess.Popen[bytes]:
        child = subprocess.Popen(argv, stdout=subprocess.PIPE, env={**os.environ, **env})
        children.append(child)
        assert child.stdout is not None
        child.stdout.readline()  # exec is behind it: its environment can be seen
        return child

    yield start
    for child in children:
        child.kill()
        child.wait()
        child.stdout.close()  # type: ignore[union-attr]


def test_only_what_carries_the_mark_is_killed(spawn: Spawn) -> None:
    ours, longer, other = spawn(LAB_TEST="abc"), spawn(LAB_TEST="abcd"), spawn()
    assert platform.marked("LAB_TEST", "abc") == [ours.pid]
    assert platform.kill_marked("LAB_TEST", "abc") == 1
    assert ours.wait() == -signal.SIGKILL
    assert longer.poll() is None and other.poll() is None


def test_a_process_that_is_not_recognised_once_pinned_is_spared(spawn: Spawn) -> None:
    child = spawn()
    assert not platform.kill_checked(child.pid, lambda: False)
    assert child.poll() is None


def test_descendants_are_killed_but_the_spared(spawn: Spawn) -> None:
    parent = spawn([sys.executable, "-S", "-c", f"import subprocess, time; subprocess.run({SLEEP!r}); time.sleep(600)"])
    spared = spawn()
    (below,) = platform.descendants(parent.pid)
    mine = [pid for pid in platform.descendants(os.getpid()) if pid not in (parent.pid, below)]
    assert platform.kill_descendants(os.getpid(), spare=mine) == 2
    assert parent.wait() == -signal.SIGKILL
    assert spared.poll() is None


def test_a_zombie_is_not_alive_and_keeps_its_number_until_it_is_collected(spawn: Spawn) -> None:
    child = spawn()
    fd = os.pidfd_open(child.pid)
    child.kill()
    platform.wait_for_end((child.pid,), (fd,))
    os.close(fd)
    assert not platform.is_alive(child.pid)
    assert platform.peek_ended_child() == child.pid
    assert platform.collect_child(child.pid) == (child.pid, -signal.SIGKILL)
    assert platform.usage(child.pid) is None
    child.returncode = -signal.SIGKILL


def test_usage_is_told_of_a_running_process() -> None:
    used = platform.usage(os.getpid())
    assert used is not None
    rss, cpu_s, state = used
    assert rss > 1 << 20 and cpu_s >= 0 and state in "RSD"


def test_a_process_that_ignores_a_signal_is_known_and_its_start_lies_on_the_same_clock(spawn: Spawn) -> None:
    before = platform.ticks_now()
    child = spawn()
    assert before <= (platform.start_time(child.pid) or 0) <= platform.ticks_now()
    assert not platform.ignores(child.pid, signal.SIGINT) and platform.ignores(os.getpid(), signal.SIGPIPE)


def test_memory_kills_are_counted_or_not_told() -> None:
    count = platform.count_out_of_memory_kills()
    assert count is None or count >= 0


def test_own_sockets_are_told_from_later_ones_of_their_number() -> None:
    first, second = socket.socketpair()
    with open(os.devnull) as other:
        before = platform.own_sockets()
        assert {first.fileno(), second.fileno()} <= before.keys() and other.fileno() not in before
    number, third = first.fileno(), socket.socket()
    first.close()
    assert number not in platform.own_sockets()
    with second, third:
        os.dup2(third.fileno(), number)
        assert platform.own_sockets()[number] != before[number]
        os.close(number)
