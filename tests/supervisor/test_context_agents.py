"""The agents of a Context: over TCP with keys, let go, left alone, that cannot start."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from monarch_lab.supervisor import (
    Context,
    FunctionCall,
    HostDisconnected,
)
from monarch_lab.transport import platform
from monarch_lab.transport.keys import write_invitation
from tests.supervisor import context_kit as kit
from tests.supervisor.context_kit import PATIENCE_S, QUICK, receive_exits
from tests.supervisor.recorder import ROOT, wait_until

pytestmark = pytest.mark.skipif(not platform.LINUX, reason="pidfd, subreaper and /proc")

PYTHON = [sys.executable, "-S", "-c"]


def test_agents_come_over_tcp_with_keys_and_only_once_invited(tmp_path: Path) -> None:
    with Context("tcp", launcher=None) as ctx:
        invitation = ctx.invitation()
        assert invitation.address.startswith("tcp://127.0.0.1:") and invitation.own is not None
        path = str(tmp_path / "invitation")
        write_invitation(path, invitation)
        (host,) = ctx.request_hosts(1)
        with open(path, "rb") as file:
            command = [sys.executable, "-m", "monarch_lab.agent", "host"]
            agent = subprocess.Popen(command, stdin=file, cwd=ROOT, stderr=subprocess.PIPE, text=True)
        process = host.create_process(FunctionCall(kit.send_and_exit, 3))
        assert receive_exits(ctx, [process])[process].result == 3
        ctx.return_hosts(host, error="enough")
        _, stderr = agent.communicate(timeout=PATIENCE_S)
        assert agent.returncode == 1 and "ending: enough" in stderr


def test_an_agent_that_is_let_go_exits_with_zero(tmp_path: Path) -> None:
    with Context(launcher=None) as ctx:
        path = str(tmp_path / "invitation")
        write_invitation(path, ctx.invitation())
        command = [sys.executable, "-m", "monarch_lab.agent", "host", path]
        agent = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
        ctx.request_hosts(1)
        kit.wait_connected(ctx)
    _, stderr = agent.communicate(timeout=PATIENCE_S)
    assert (agent.returncode, stderr) == (0, "")


@pytest.mark.parametrize(
    ("args", "code", "text"),
    [
        (["/no/such/invitation"], 1, "cannot be read"),
        (["a", "b"], 2, "usage"),
        (["--nope"], 2, "usage"),
        (["--help"], 0, "usage"),
        ([], 1, "not understood"),
    ],
)
def test_an_agent_without_a_right_invitation_says_what_is_wrong(args: list[str], code: int, text: str) -> None:
    command = [sys.executable, "-m", "monarch_lab.agent", "host", *args]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=60)
    assert done.returncode == code
    assert text in done.stdout + done.stderr and "Traceback" not in done.stderr


def test_an_agent_lives_no_longer_than_its_lease_without_its_supervisor(tmp_path: Path) -> None:
    ctx = Context(launcher=None, lease=2.5, **QUICK)
    path = str(tmp_path / "invitation")
    write_invitation(path, ctx.invitation())
    command = [sys.executable, "-m", "monarch_lab.agent", "host", path]
    agent = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    (host,) = ctx.request_hosts(1)
    host.create_process(FunctionCall(kit.send_family))
    family = kit.read_pids(ctx, 1)
    loop: Any = ctx._loop
    loop.call(lambda: setattr(loop, "_is_over", lambda: True), PATIENCE_S)  # gone without a word
    _, stderr = agent.communicate(timeout=PATIENCE_S)
    assert agent.returncode == 1 and "nothing was heard of the supervisor for 2.5 s" in stderr
    wait_until(lambda: kit.all_gone(family))
    ctx.shutdown()


def test_an_agent_that_cannot_start_is_told_with_what_it_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    from monarch_lab.supervisor import local_hosts

    monkeypatch.setattr(local_hosts, "_CODE", "import no_such_module")
    with Context() as ctx:
        (host,) = ctx.request_hosts(1)
        process = host.create_process(["true"])
        exited = receive_exits(ctx, [process])[process]
        assert isinstance(exited.result, ConnectionAbortedError)
        reason = ctx.messagefilter(HostDisconnected).recv(PATIENCE_S).message.reason
        assert "exited with code 1" in reason and "No module named 'no_such_module'" in reason
        assert host.reason == reason


def test_nothing_of_the_callers_descriptors_and_signals_is_touched() -> None:
    """T24: what the caller's stdout and stderr are, they stay; and nothing is left open."""

    def facts() -> Any:
        fds = {fd: os.readlink(f"/proc/self/fd/{fd}") for fd in map(int, os.listdir("/proc/self/fd")) if fd < 3}
        return fds, [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)]

    def count() -> int:
        return len(os.listdir("/proc/self/fd"))

    def cycle() -> None:
        with Context(log_format="/tmp/ml-no/{name}") as ctx:
            ctx.request_hosts(1)
            kit.wait_connected(ctx)
            assert facts() == before

    before = facts()
    cycle()
    opened = count()
    cycle()
    assert facts() == before
    assert count() == opened
