"""Nobody is left, whoever is killed: with grandchildren in sessions of their own and daemons among them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from monarch_lab.config import MARK_VARIABLE
from monarch_lab.supervisor import ProcessState
from monarch_lab.transport import platform
from tests.supervisor.conftest import StartMesh
from tests.supervisor.recorder import (
    PATIENCE_S,
    ROOT,
    agent_pid_of,
    command_of,
    guard_pid_of,
    mark_of,
    wait_until,
    zygote_pid_of,
)

pytestmark = pytest.mark.skipif(not platform.LINUX, reason="pidfd, subreaper and /proc")

Facts = dict[str, object]


@pytest.fixture
def kernel() -> Iterator[tuple[subprocess.Popen[str], Facts]]:
    stand_in = subprocess.Popen(
        [sys.executable, "-m", "tests.agent.stand_in_kernel"], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert stand_in.stdout is not None
    yield stand_in, json.loads(stand_in.stdout.readline())
    stand_in.kill()
    stand_in.wait()
    stand_in.stdout.close()


def is_swept(facts: Facts) -> bool:
    pids = [facts["agent"], *facts["workers"], *facts["family"]]  # type: ignore[misc]
    return (
        not platform.marked(MARK_VARIABLE, str(facts["mark"]))
        and not any(platform.is_alive(pid) for pid in pids)
        and not os.path.exists(str(facts["directory"]))
    )


def guards_of(facts: Facts) -> list[int]:
    everyone = (int(name) for name in os.listdir("/proc") if name.isdigit())
    return [pid for pid in everyone if str(facts["mark"]).encode() in command_of(pid)]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_outlives_the_kernel(kernel: tuple[subprocess.Popen[str], Facts], how: int) -> None:
    stand_in, facts = kernel
    assert len(guards_of(facts)) == 1
    stand_in.send_signal(how)
    wait_until(lambda: is_swept(facts) and not guards_of(facts))


def test_a_kernel_that_returns_without_stop_ends_at_once_and_leaves_nothing(
    kernel: tuple[subprocess.Popen[str], Facts],
) -> None:
    stand_in, facts = kernel
    stand_in.send_signal(signal.SIGUSR1)
    assert stand_in.wait(PATIENCE_S) == 0
    wait_until(lambda: is_swept(facts) and not guards_of(facts))


def test_nothing_outlives_a_kernel_whose_agent_cannot_react(kernel: tuple[subprocess.Popen[str], Facts]) -> None:
    stand_in, facts = kernel
    os.kill(facts["agent"], signal.SIGSTOP)  # type: ignore[arg-type]
    stand_in.kill()
    wait_until(lambda: is_swept(facts) and not guards_of(facts))


def test_nothing_outlives_a_kernel_whose_guard_was_killed_as_well(
    kernel: tuple[subprocess.Popen[str], Facts],
) -> None:
    stand_in, facts = kernel
    os.kill(guards_of(facts)[0], signal.SIGKILL)
    stand_in.kill()
    wait_until(lambda: is_swept(facts) and not guards_of(facts))


def test_a_stopped_kernel_loses_nothing(kernel: tuple[subprocess.Popen[str], Facts]) -> None:
    stand_in, facts = kernel
    stand_in.send_signal(signal.SIGSTOP)
    wait_until(lambda: (platform.usage(stand_in.pid) or (0, 0, ""))[2] == "T")
    assert all(platform.is_alive(pid) for pid in facts["workers"])  # type: ignore[attr-defined]
    stand_in.send_signal(signal.SIGCONT)


def test_a_killed_agent_takes_all_with_it_and_the_kernel_is_told(start_mesh: StartMesh) -> None:
    supervisor, recorder = start_mesh()
    supervisor.send(None, b"family")
    family = [int(pid) for rank in (0, 1) for pid in recorder.wait_report(rank)[0].split()]
    agent = agent_pid_of(supervisor)
    os.kill(agent, signal.SIGKILL)
    recorder.wait(lambda: recorder.lost != [])
    assert recorder.lost == [f"the agent (pid {agent}) was killed by SIGKILL"]
    assert {info.state for info in supervisor.processes.values()} == {ProcessState.LOST}
    wait_until(lambda: not platform.marked(MARK_VARIABLE, mark_of(supervisor)))
    wait_until(lambda: not any(platform.is_alive(pid) for pid in family))
    supervisor.stop()
    assert not os.path.exists(supervisor.directory)


def test_agent_and_guard_killed_at_once_leave_nothing_after_stop(start_mesh: StartMesh) -> None:
    supervisor, recorder = start_mesh()
    supervisor.send(None, b"family")
    family = [int(pid) for rank in (0, 1) for pid in recorder.wait_report(rank)[0].split()]
    agent = agent_pid_of(supervisor)
    guard = guard_pid_of(agent)
    assert guard is not None
    os.kill(agent, signal.SIGSTOP)  # so that it cannot start another guard
    os.kill(guard, signal.SIGKILL)
    os.kill(agent, signal.SIGKILL)
    recorder.wait(lambda: recorder.lost != [])
    supervisor.stop()
    wait_until(lambda: not any(platform.is_alive(pid) for pid in family))
    assert not os.path.exists(supervisor.directory)


def test_a_killed_guard_is_replaced(start_mesh: StartMesh) -> None:
    supervisor, recorder = start_mesh()
    agent = agent_pid_of(supervisor)
    first = guard_pid_of(agent)
    assert first is not None
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: guard_pid_of(agent) not in (None, first))
    supervisor.send(None, b"echo on")
    assert recorder.wait_report(0) == [b"echo on"]


def test_workers_live_on_without_their_zygote(start_mesh: StartMesh) -> None:
    supervisor, recorder = start_mesh()
    zygote = zygote_pid_of(supervisor)
    os.kill(zygote, signal.SIGKILL)
    wait_until(lambda: not platform.is_alive(zygote))
    supervisor.send(None, b"echo on")
    assert [recorder.wait_report(rank) for rank in (0, 1)] == [[b"echo on"], [b"echo on"]]


def test_what_a_worker_started_in_its_group_goes_with_it(start_mesh: StartMesh) -> None:
    supervisor, recorder = start_mesh()
    supervisor.send([0], b"family")
    plain = int(recorder.wait_report(0)[0].split()[0])
    supervisor.signal([0], signal.SIGKILL)
    recorder.wait_exit(0)
    wait_until(lambda: not platform.is_alive(plain))
    assert platform.is_alive(supervisor.processes[1].pid)


def test_stop_leaves_nobody_of_the_family(start_mesh: StartMesh) -> None:
    supervisor, recorder = start_mesh()
    supervisor.send(None, b"family")
    family = [int(pid) for rank in (0, 1) for pid in recorder.wait_report(rank)[0].split()]
    assert all(platform.is_alive(pid) for pid in family)
    agent = agent_pid_of(supervisor)
    guard = guard_pid_of(agent)
    assert guard is not None
    supervisor.stop()
    assert not any(platform.is_alive(pid) for pid in [agent, guard, *family])
