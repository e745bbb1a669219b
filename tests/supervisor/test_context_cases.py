"""The supervision library with real agents and processes: cases S1 to S13. Nothing is left after any of them."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from monarch_lab.errors import ClosedError
from monarch_lab.supervisor import (
    Context,
    FunctionCall,
    HostConnected,
    HostDisconnected,
    ProcessExited,
    ProcessFailedToStart,
    ProcessStarted,
)
from monarch_lab.supervisor.child_queue import PIPE_VARIABLE
from monarch_lab.transport import platform
from monarch_lab.transport.keys import write_invitation
from tests.supervisor import context_kit as kit
from tests.supervisor.context_kit import PATIENCE_S, QUICK, all_gone, of, receive_exits, receive_until, repeated
from tests.supervisor.recorder import ROOT, wait_until

pytestmark = pytest.mark.skipif(not platform.LINUX, reason="pidfd, subreaper and /proc")

MakeContext = Callable[..., Context]


@pytest.fixture
def make_context() -> Iterator[MakeContext]:
    before = kit.forbid_children()
    made: list[Context] = []

    def make(**options: Any) -> Context:
        made.append(Context(**options))
        return made[-1]

    yield make
    for ctx in made:
        ctx.shutdown()
    wait_until(lambda: kit.forbid_children() <= before)


def start_agent(invitation_path: str, **options: Any) -> subprocess.Popen[str]:
    """By hand, as a user on another machine would."""
    command = [sys.executable, "-m", "monarch_lab.agent", "host", invitation_path]
    return subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, **options)


@pytest.fixture
def join(tmp_path: Any) -> Iterator[Callable[[Context], subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []

    def join(ctx: Context) -> subprocess.Popen[str]:
        path = str(tmp_path / f"invitation{len(started)}")
        write_invitation(path, ctx.invitation())
        started.append(start_agent(path))
        return started[-1]

    yield join
    for agent in started:
        agent.kill()
        agent.communicate()


@repeated
def test_s1_hosts_and_agents_are_matched_whoever_came_first(turn: int, make_context: MakeContext, join: Any) -> None:
    ctx = make_context(launcher=None)
    early = ctx.request_hosts(1)
    process = early[0].create_process(FunctionCall(kit.echo_for_ever), name="early")
    process.send("queued")
    agents = [join(ctx)]
    letters = receive_until(ctx, lambda found: bool(found) and found[-1].message == "queued")
    assert [type(m) for m in of(early[0], letters) + of(process, letters)[:1]] == [HostConnected, ProcessStarted]
    agents.append(join(ctx))
    wait_until(lambda: ctx.status().connections_waiting == 1)
    late = ctx.request_hosts(1)
    assert ctx.recv(PATIENCE_S).sender is late[0]
    late[0].create_process([sys.executable, "-c", "print('hello')"])
    assert isinstance(ctx.messagefilter(ProcessExited).recv(PATIENCE_S).message, ProcessExited)
    ctx.shutdown()
    assert [agent.wait(PATIENCE_S) for agent in agents] == [0, 0]


@repeated
def test_s2_a_filtered_read_leaves_the_order_of_the_rest(turn: int, make_context: MakeContext) -> None:
    ctx = make_context()
    process = ctx.request_hosts(1)[0].create_process(FunctionCall(kit.send_and_exit, 10))
    exited = ctx.messagefilter(lambda letter: isinstance(letter.message, ProcessExited) or letter.message == 5)
    assert exited.recv(PATIENCE_S).message == 5
    assert exited.recv(PATIENCE_S).message.result == 3
    rest = [letter.message for letter in ctx.recvready()]
    assert [type(m) for m in rest[:2]] == [HostConnected, ProcessStarted]
    assert rest[2:] == [0, 1, 2, 3, 4, 6, 7, 8, 9]
    assert process.returncode == 3


@repeated
def test_s3_a_thousand_letters_precede_the_end_of_a_process_that_leaves_at_once(
    turn: int, make_context: MakeContext
) -> None:
    ctx = make_context()
    processes = ctx.create_process_group(ctx.request_hosts(1), FunctionCall(kit.send_and_exit, 1000), 2)
    ended: set[object] = set()

    def both_ended(found: list[Any]) -> bool:
        ended.update(x.sender for x in found[-1:] if isinstance(x.message, ProcessExited))
        return len(ended) == 2

    letters = receive_until(ctx, both_ended)
    for process in processes:
        told = of(process, letters)
        assert told[1:-1] == list(range(1000))
        assert told[-1].result == 3
    assert ctx.status().responses == 2000


@repeated
def test_s4_a_stopped_agent_is_lost_and_comes_back_as_another_host(turn: int, make_context: MakeContext) -> None:
    ctx = make_context(**QUICK)
    (host,) = ctx.request_hosts(1)
    process = host.create_process(FunctionCall(kit.send_family))
    family = kit.read_pids(ctx, 1)
    (agent,) = kit.agent_pids(ctx)
    os.kill(agent, signal.SIGSTOP)
    letters = receive_until(ctx, lambda found: bool(found) and isinstance(found[-1].message, HostDisconnected))
    assert isinstance(of(process, letters)[-1].result, ConnectionAbortedError)
    assert (host.state, process.state) == ("lost", "lost")
    assert "nothing was heard" in host.reason
    os.kill(agent, signal.SIGCONT)
    wait_until(lambda: all_gone(family))
    wait_until(lambda: ctx.status().connections_waiting == 1)
    (again,) = ctx.request_hosts(1)
    assert isinstance(ctx.recv(PATIENCE_S).message, HostConnected)
    assert kit.agent_pids(ctx) == [agent]
    other = again.create_process(["true"])
    assert receive_exits(ctx, [other])[other].result == 0
    assert ctx.recvready() == []
    assert host.state == "lost"


STAND_IN = """
import sys, time
from monarch_lab.supervisor import Context, FunctionCall
from tests.supervisor import context_kit as kit
ctx = Context()
ctx.create_process_group(ctx.request_hosts(2), FunctionCall(kit.send_family), 2)
family = kit.read_pids(ctx, 4)
print(*kit.agent_pids(ctx), *family, flush=True)
{then}
"""


@repeated
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, None], ids=["SIGKILL", "SIGTERM", "returns"])
def test_s5_nothing_outlives_the_supervisor(turn: int, how: int | None) -> None:
    """S13 as well: a context whose owner is gone is reaped, whatever way it went."""
    code = STAND_IN.format(then="time.sleep(600)" if how else "")
    owner = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert owner.stdout is not None
    pids = [int(pid) for pid in owner.stdout.readline().split()]
    assert len(pids) == 2 + 4 * 3
    if how:
        assert not all_gone(pids)
        owner.send_signal(how)
    began = time.monotonic()
    assert owner.wait(PATIENCE_S) == (-how if how else 0)
    wait_until(lambda: all_gone(pids))
    owner.stdout.close()
    assert time.monotonic() - began < PATIENCE_S


@repeated
def test_s6_a_killed_agent_takes_its_processes_with_it_and_its_host_is_told_lost(
    turn: int, make_context: MakeContext
) -> None:
    ctx = make_context()
    (host,) = ctx.request_hosts(1)
    process = host.create_process(FunctionCall(kit.send_family))
    family = kit.read_pids(ctx, 1)
    (agent,) = kit.agent_pids(ctx)
    os.kill(agent, signal.SIGKILL)
    letters = receive_until(ctx, lambda found: bool(found) and isinstance(found[-1].message, HostDisconnected))
    assert f"its agent (pid {agent}) was killed by signal 9" in letters[-1].message.reason
    assert isinstance(of(process, letters)[-1].result, ConnectionAbortedError)
    wait_until(lambda: all_gone(family))
    assert ctx.recvready() == []


@repeated
def test_s7_a_process_that_ignores_sigterm_is_killed_after_the_grace_and_not_before(
    turn: int, make_context: MakeContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    grace = 0.6
    monkeypatch.setenv("MONARCH_LAB_TIMEOUTS_STOP_GRACE", str(grace))
    ctx = make_context()
    (host,) = ctx.request_hosts(1)
    host.create_process(FunctionCall(kit.ignore_sigterm))
    (pid,) = kit.read_pids(ctx, 1)
    fd = platform.open_pidfd(pid)
    assert fd is not None
    try:
        began = time.monotonic()
        ctx.return_hosts(host)
        platform.wait_for_end([], [fd])
        assert grace <= time.monotonic() - began < PATIENCE_S
    finally:
        os.close(fd)


@repeated
def test_s8_what_a_process_started_goes_with_it(turn: int, make_context: MakeContext) -> None:
    ctx = make_context()
    process = ctx.request_hosts(1)[0].create_process(FunctionCall(kit.send_family))
    own, child, daemon = kit.read_pids(ctx, 1)
    os.kill(own, signal.SIGKILL)
    exited = receive_exits(ctx, [process])[process]
    assert exited.result == -9
    assert f"(rank 0 of 1, {socket.gethostname()}, pid {own}) was killed by SIGKILL" in exited.message
    wait_until(lambda: not platform.is_alive(child))
    assert platform.is_alive(daemon)  # it left the group; the agent ends it with the host
    ctx.shutdown()
    wait_until(lambda: all_gone([daemon]))


@repeated
def test_s9_what_cannot_start_is_told_and_hurts_no_other(turn: int, make_context: MakeContext) -> None:
    ctx = make_context()
    (host,) = ctx.request_hosts(1)
    bad = host.create_process(["/no/such/file"])
    nowhere = host.create_process(["true"], cwd="/no/such/directory")
    good = host.create_process(["true"])
    ends = receive_exits(ctx, [bad, nowhere, good])
    assert isinstance(ends[bad].result, ProcessFailedToStart)
    assert "Traceback" in str(ends[bad].result) and "'/no/such/file'" in str(ends[bad].result)
    assert "'/no/such/directory'" in str(ends[nowhere].result)
    assert ends[good].result == 0
    assert (bad.state, good.state) == ("not_started", "exited")


@repeated
def test_s10_a_replaced_host_gets_the_later_launches_and_the_old_is_told_once(
    turn: int, make_context: MakeContext
) -> None:
    ctx = make_context()
    old = ctx.request_hosts(2)
    busy = ctx.create_process_group(old, FunctionCall(kit.echo_for_ever), 2)
    busy.send("first")
    echoes = ctx.messagefilter(str)
    for _ in busy:
        echoes.recv(PATIENCE_S)
    for number in range(200):
        busy.send(number)
    fresh = ctx.replace_hosts(old[:1])
    late = ctx.create_process_group(fresh, ["true"], 2)
    refused = old[0].create_process(["true"])
    busy[2:].send("still here")
    letters = receive_until(
        ctx,
        lambda found: (
            sum(x.message == "still here" for x in found) == 2
            and {*late, *busy[:2], refused} <= {x.sender for x in found if isinstance(x.message, ProcessExited)}
        ),
    )
    for process in (*busy[:2], refused):
        ends = [m for m in of(process, letters) if isinstance(m, ProcessExited)]
        assert len(ends) == 1 and isinstance(ends[0].result, ConnectionAbortedError)
    assert [m.result for p in late for m in of(p, letters) if isinstance(m, ProcessExited)] == [0, 0]
    assert [m for m in of(busy[2], letters) if isinstance(m, int)] == list(range(200))
    assert sum(isinstance(m, HostDisconnected) for m in of(old[0], letters)) == 1
    assert old[1].state == "attached" == fresh[0].state


@repeated
def test_s11_who_holds_no_key_is_not_heard_and_nothing_of_it_is_opened(
    turn: int, make_context: MakeContext, tmp_path: Any
) -> None:
    import pickle

    import zmq

    ctx = make_context()
    (host,) = ctx.request_hosts(1)
    process = host.create_process(FunctionCall(kit.send_environment, PIPE_VARIABLE))
    pipe = ctx.messagefilter(dict).recv(PATIENCE_S).message[PIPE_VARIABLE]
    receive_exits(ctx, [process])
    trap = tmp_path / "opened"
    bomb = pickle.dumps(_Bomb(str(trap)))
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.linger = 0
        stranger.connect(ctx.invitation().address)
        for message in ([b"garbage"], [bomb], [b"", bomb], [bomb] * 5):
            stranger.send_multipart(message)
        for data in (bomb, b"\1" + bomb, b"\4" + len(bomb).to_bytes(8, "big") + bomb, b"\xff" * 1000):
            with socket.socket(socket.AF_UNIX) as child:
                child.connect(pipe.removeprefix("ipc://"))
                child.sendall(data)
                child.settimeout(0.2)
                try:
                    assert child.recv(1) == b""
                except (TimeoutError, ConnectionResetError):
                    pass
        good = host.create_process(FunctionCall(kit.send_and_exit, 1))
        assert receive_exits(ctx, [good])[good].result == 3
        assert not stranger.poll(0)
    assert not trap.exists()
    assert host.state == "attached"


class _Bomb:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return open, (self.path, "w")


@repeated
def test_s12_a_thousand_simulated_processes_start_and_end_without_a_fork(turn: int, make_context: MakeContext) -> None:
    ctx = make_context()
    (host,) = ctx.request_hosts(1)
    kit.wait_connected(ctx)
    processes = ctx.create_process_group(host, ["false"], 1000, simulate=True)
    below = kit.forbid_children()
    letters = receive_until(ctx, lambda found: len(found) == 2000)
    assert kit.forbid_children() == below
    for process in processes:
        started, exited = of(process, letters)
        assert (started, exited.result) == (ProcessStarted(2), 0)
    assert len({letter.sender for letter in letters}) == 1000


def test_a_context_ends_twice_and_then_nothing_can_be_asked_of_it(make_context: MakeContext) -> None:
    ctx = make_context()
    (host,) = ctx.request_hosts(1)
    process = host.create_process(FunctionCall(kit.echo_for_ever))
    ctx.messagefilter(ProcessStarted).recv(PATIENCE_S)
    ctx.shutdown()
    ctx.shutdown()
    exited = ctx.messagefilter(ProcessExited).recv(0).message
    assert isinstance(exited.result, ConnectionAbortedError)
    assert ctx.messagefilter(HostDisconnected).recv(0).message.reason == ""
    for ask in (lambda: ctx.request_hosts(1), lambda: process.send(1), ctx.status, ctx.invitation, lambda: ctx.recv()):
        with pytest.raises(ClosedError, match="shut down"):
            for _ in range(10):  # letters that came before can still be received
                ask()


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_of_two_hundred_random_kills_none_leaves_a_process() -> None:
    """Supervisor, agent, guard or process, one after the other until it is the supervisor's turn."""
    code = STAND_IN.format(then="time.sleep(600)")
    chance = random.Random(0)
    for _ in range(200):
        owner = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=ROOT)
        assert owner.stdout is not None
        pids = [int(pid) for pid in owner.stdout.readline().split()]
        everyone = [owner.pid, *platform.descendants(owner.pid)]
        for pid in chance.sample(everyone, chance.randint(1, 4)):
            if platform.is_alive(pid) and pid != owner.pid:
                os.kill(pid, signal.SIGKILL)
        owner.kill()
        owner.communicate()
        wait_until(lambda everyone=everyone, pids=pids: all_gone([*everyone, *pids]))  # type: ignore[misc]


ASLEEP = """
import os
from monarch_lab.supervisor import Context, HostDisconnected, ProcessExited
from tests.supervisor import context_kit as kit
with Context(**kit.QUICK) as ctx:
    hosts = ctx.request_hosts(2)
    kit.wait_connected(ctx, 2)
    me = os.getpid()
    group = ctx.create_process_group(hosts[:1], ["sh", "-c", f"kill -STOP {me}; sleep 2.6; kill -CONT {me}"])
    print(kit.receive_exits(ctx, group)[group[0]].result)
    again = ctx.create_process_group(hosts, ["true"])
    print([end.result for end in kit.receive_exits(ctx, again).values()], *(host.state for host in hosts))
    assert ctx.messagefilter(HostDisconnected).recvready() == []
"""


@repeated
def test_f9_a_supervisor_that_was_stopped_for_long_loses_nothing(turn: int) -> None:
    done = subprocess.run([sys.executable, "-c", ASLEEP], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("0\n[0, 0] attached attached\n", "")
