"""F3: hosts that are cut off, for a while or for good, and those that lose their power; TCP with CURVE between them."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.netlab import Lab
from tests.supervisor.recorder import ROOT

pytestmark = [pytest.mark.netlab, pytest.mark.timeout(240)]

PYTHON = ["env", f"PYTHONPATH={ROOT}", sys.executable]
LOST_S = 15.0
LITTLE_S = 3.0


class Remote:
    """The controller on h0, and agents on the other hosts."""

    def __init__(self, lab: Lab, directory: Path) -> None:
        self.lab = lab
        self._directory = directory
        self._agents: list[subprocess.Popen[str]] = []
        self._count = 0
        command = [*lab.enter("h0"), *PYTHON, "-m", "tests.supervisor.lab_controller"]
        self._controller = subprocess.Popen(
            [*command, f"tcp://{lab.address('h0')}"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self, verb: str, *args: Any) -> Any:
        assert self._controller.stdin is not None and self._controller.stdout is not None
        self._controller.stdin.write(json.dumps([verb, *args]) + "\n")
        self._controller.stdin.flush()
        return json.loads(self._controller.stdout.readline())

    def start_agent(self, host: str) -> subprocess.Popen[str]:
        self._count += 1
        path = self._directory / f"invitation{self._count}"
        self.ask("invite", str(path))
        command = [*self.lab.enter(host), *PYTHON, "-m", "monarch_lab.agent", "host", str(path)]
        self._agents.append(subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True))
        return self._agents[-1]

    def wait(self, *wanted: Any, within_s: float = 30.0) -> list[Any]:
        """Letters up to the first one like this, [who, what ...], that one last."""
        deadline = time.monotonic() + within_s
        letters: list[Any] = []
        while (left := deadline - time.monotonic()) > 0:
            letter = self.ask("receive", left)
            if letter is not None:
                letters.append(letter)
                if letter[1 : 1 + len(wanted)] == list(wanted):
                    return letters
        raise AssertionError(f"{wanted} did not come: {letters[-20:]}")

    def processes_on(self, host: str) -> int:
        """How many there are beside its init, our look and what it runs in."""
        done = subprocess.run([*self.lab.enter(host), "sh", "-c", "ls -d /proc/[0-9]*"], capture_output=True, text=True)
        return len(done.stdout.split()) - 3

    def close(self) -> None:
        self._controller.kill()
        self._controller.communicate()
        for agent in self._agents:
            agent.kill()
            agent.communicate()


@pytest.fixture
def remote(tmp_path: Path) -> Iterator[Remote]:
    lab = Lab(tmp_path, hosts=3)
    remote = None
    try:
        remote = Remote(lab, tmp_path)
        yield remote
    finally:
        lab.down()  # first: it ends what runs there, of which we hold only the door
        if remote is not None:
            remote.close()


def start_echo(remote: Remote) -> None:
    remote.start_agent("h1")
    remote.ask("request", 1)
    remote.ask("launch", 0, "echo_for_ever")
    remote.ask("send", 0, "up")
    remote.wait("process 0", "says", "up")


def test_a_cut_of_eight_seconds_loses_and_repeats_nothing(remote: Remote) -> None:
    start_echo(remote)
    healed = threading.Timer(8.0, remote.lab.heal, ("h1",))
    numbers = 0
    remote.ask("send", 0, -1)
    remote.lab.cut("h1")
    healed.start()
    while healed.is_alive():
        remote.ask("send", 0, numbers)
        numbers += 1
        healed.join(0.02)
    remote.ask("send", 0, "end")
    letters = remote.wait("process 0", "says", "end")
    assert [letter[3] for letter in letters] == [*range(-1, numbers), "end"]
    assert remote.ask("states") == ["attached"]


def test_a_host_cut_off_for_good_is_lost_once_and_healed_comes_back_as_another(remote: Remote) -> None:
    start_echo(remote)
    agent = remote.start_agent("h2")
    remote.ask("request", 1)
    remote.wait("host 1", "connected")
    remote.ask("launch", 0, "send_family")
    remote.wait("process 1", "says")
    began = time.monotonic()
    remote.lab.cut("h1")
    letters = remote.wait("host 0", "disconnected", within_s=LOST_S + LITTLE_S)
    assert LOST_S - 2 < letters[-1][0] - began < LOST_S + LITTLE_S
    assert [letter[1:] for letter in letters[:-1]] == [
        ["process 0", "exited", "ConnectionAbortedError"],
        ["process 1", "exited", "ConnectionAbortedError"],
    ]
    assert remote.ask("states") == ["lost", "attached"]
    remote.ask("request", 1)
    remote.start_agent("h2")  # a replacement joins
    remote.wait("host 2", "connected", "h2")
    remote.lab.heal("h1")
    deadline = time.monotonic() + 30
    while remote.ask("waiting") != 1 or remote.processes_on("h1") > 2:  # agent and guard alone
        assert time.monotonic() < deadline
        assert remote.ask("states") == ["lost", "attached", "attached"]
    remote.ask("request", 1)
    remote.wait("host 3", "connected", "h1")
    remote.ask("launch", 3, "echo_for_ever")
    remote.ask("send", 2, "again")
    rest = remote.wait("process 2", "says", "again")
    assert [letter[1] for letter in rest if letter[1] in ("host 0", "process 0", "process 1")] == []
    remote.ask("shutdown")
    assert agent.wait(30) == 0


def test_a_host_without_power_is_lost_in_time_and_another_takes_its_place(remote: Remote) -> None:
    start_echo(remote)
    began = time.monotonic()
    remote.lab.power_off("h1")
    letters = remote.wait("host 0", "disconnected", within_s=LOST_S + LITTLE_S)
    assert letters[-1][0] - began < LOST_S + LITTLE_S
    remote.start_agent("h2")
    remote.ask("request", 1)
    remote.ask("launch", 1, "echo_for_ever")
    remote.ask("send", 1, "here")
    remote.wait("process 1", "says", "here")
    assert remote.ask("states") == ["lost", "attached"]
