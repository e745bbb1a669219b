"""What a Context gives beside the cases: environment, logs, names, calls, back-pressure, TCP, status."""

from __future__ import annotations

import asyncio
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import monarch_lab as ml
from monarch_lab.errors import DeviceException, UsageError, UsageTypeError, UsageValueError
from monarch_lab.supervisor import (
    Context,
    FunctionCall,
    HostConnected,
    ProcessExited,
    ProcessList,
    ProcessStarted,
    Status,
    UnreadableMessage,
    get_message_queue,
)
from monarch_lab.transport import platform
from tests.supervisor import context_kit as kit
from tests.supervisor.context_kit import PATIENCE_S, receive_exits
from tests.supervisor.recorder import ROOT, wait_until

pytestmark = pytest.mark.skipif(not platform.LINUX, reason="pidfd, subreaper and /proc")

PYTHON = [sys.executable, "-S", "-c"]


@pytest.fixture(scope="module")
def ctx(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Context]:
    """One context with logs and two hosts, for tests that leave it as it is."""
    logs = tmp_path_factory.mktemp("logs")
    with Context(log_format=f"{logs}/deep/er/{{name}}.log", log_interval=0) as ctx:
        ctx.hosts = ctx.request_hosts(2)  # type: ignore[attr-defined]
        ctx.logs = logs / "deep" / "er"  # type: ignore[attr-defined]
        kit.wait_connected(ctx, 2)
        yield ctx


@pytest.fixture(autouse=True)
def drained(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "ctx" in request.fixturenames:
        request.getfixturevalue("ctx").recvready()


def environment_of(ctx: Any, process: Any, *names: str) -> dict[str, str]:
    found = ctx.messagefilter(lambda x: x.sender is process and isinstance(x.message, dict)).recv(PATIENCE_S).message
    return {name: found[name] for name in names} if names else found


IDENTITY = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


def test_identity_variables_win_over_the_users_and_the_inherited(ctx: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    call = FunctionCall(kit.send_environment, *IDENTITY, "MINE", "CUDA_VISIBLE_DEVICES", "MONARCH_LAB_MARK")
    env = {
        "RANK": "99",
        "LOCAL_RANK": "7",
        "MINE": "$RANK of ${WORLD_SIZE}, $HOME $$x",
        "CUDA_VISIBLE_DEVICES": "$LOCAL_RANK",
        "MONARCH_LAB_MARK": "not mine",
    }
    group = ctx.create_process_group(ctx.hosts, call, 2, env=env)
    for rank, process in enumerate(group):
        found = environment_of(ctx, process)
        assert [found[name] for name in IDENTITY] == [str(rank), "4", str(rank % 2), "2"]
        assert found["MINE"] == f"{rank} of 4, $HOME $x"
        assert found["CUDA_VISIBLE_DEVICES"] == str(rank % 2)
        assert found["MONARCH_LAB_MARK"] != "not mine"
    receive_exits(ctx, group)


def test_output_goes_to_a_file_of_the_process_in_order_and_for_its_user_alone(ctx: Any) -> None:
    code = "import os; os.write(1, b'out\\n'); os.write(2, b'err\\n'); os.write(1, b'end\\n')"
    group = ctx.create_process_group(ctx.hosts, [*PYTHON, code], 6, name="log{rank}")
    ends = receive_exits(ctx, group)
    assert [p.name for p in group] == [f"log{rank:02}" for rank in range(12)]
    for process in group:
        path = Path(process.logfile)
        assert path == ctx.logs / f"{process.name}.log"
        assert path.read_text() == "out\nerr\nend\n"
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert ends[process].message.endswith("exited with code 0\nout\nerr\nend")


def test_a_log_is_appended_to(ctx: Any) -> None:
    for _ in range(2):
        process = ctx.hosts[0].create_process(["echo", "line"], name="twice")
        receive_exits(ctx, [process])
    assert Path(process.logfile).read_text() == "line\nline\n"


def test_a_log_that_cannot_be_written_is_told_and_the_process_runs(ctx: Any, caplog: pytest.LogCaptureFixture) -> None:
    (ctx.logs / "taken.log").mkdir()
    process = ctx.hosts[0].create_process(["true"], name="taken")
    assert receive_exits(ctx, [process])[process].result == 0
    assert "taken.log cannot be written (Is a directory)" in caplog.text
    assert "process taken (rank 0 of 1" in caplog.text


def test_names_without_one_count_up(ctx: Any) -> None:
    first, second = (ctx.create_process_group(ctx.hosts[:1], ["true"])[0] for _ in range(2))
    assert first.name[:2] == second.name[:2] == "pg"
    assert int(second.name[2:]) == int(first.name[2:]) + 1
    receive_exits(ctx, [first, second])


def test_a_group_is_a_tuple_whose_slices_can_be_sent_to(ctx: Any) -> None:
    group = ctx.create_process_group(ctx.hosts, FunctionCall(kit.echo_for_ever), 2)
    assert isinstance(group, ProcessList) and isinstance(group[1:3], ProcessList)
    assert [p.rank for p in group] == [0, 1, 2, 3] and group[3].host is ctx.hosts[1]
    group[1:3].send("some")
    group[0].send("one")
    found = {ctx.messagefilter(str).recv(PATIENCE_S) for _ in range(3)}
    assert found == {(group[0], "one"), (group[1], "some"), (group[2], "some")}
    group.signal(signal.SIGKILL)
    assert {end.result for end in receive_exits(ctx, group).values()} == {-9}
    group.send("nobody is there")
    assert group[0].returncode == -9 and "exited" in repr(group[0])


def test_a_signal_reaches_the_whole_group_or_the_process_alone(ctx: Any) -> None:
    process = ctx.hosts[0].create_process(FunctionCall(kit.send_family))
    _, child, _ = kit.read_pids(ctx, 1)
    process.signal(signal.SIGUSR1, group=False)
    assert receive_exits(ctx, [process])[process].result == -signal.SIGUSR1
    wait_until(lambda: not platform.is_alive(child))
    other = ctx.hosts[0].create_process(["sh", "-c", "sleep 600; true"])
    ctx.messagefilter(ProcessStarted).recv(PATIENCE_S)
    other.signal()
    assert receive_exits(ctx, [other])[other].result == -signal.SIGTERM


def test_a_function_of_a_file_and_its_classes_arrive_here(ctx: Any, tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("VALUE = 5\n")
    (tmp_path / "entry.py").write_text(
        "import monarch_lab as ml\nimport beside\n"
        "class Result:\n    def __init__(self, x): self.x = x\n"
        "def main(x, *, y): ml.supervisor.get_message_queue().send(Result(x + y + beside.VALUE))\n"
    )
    process = ctx.hosts[0].create_process(FunctionCall(f"{tmp_path}/entry.py:main", 1, y=2))
    letter = ctx.messagefilter(lambda x: type(x.message).__name__ == "Result").recv(PATIENCE_S)
    assert (letter.sender, letter.message.x) == (process, 8)
    assert receive_exits(ctx, [process])[process].result == 0


def test_a_failing_function_ends_its_process_with_its_traceback(ctx: Any) -> None:
    process = ctx.hosts[0].create_process(FunctionCall("json.loads", "{"))
    exited = receive_exits(ctx, [process])[process]
    assert exited.result == 1
    assert "JSONDecodeError: Expecting property name" in exited.message


def test_a_message_that_cannot_be_opened_here_arrives_as_one_that_says_so(ctx: Any, tmp_path: Path) -> None:
    (tmp_path / "only_there.py").write_text("class Thing: pass\n")
    (tmp_path / "entry.py").write_text(
        "import monarch_lab as ml\nimport only_there\n"
        "def main():\n    q = ml.supervisor.get_message_queue()\n    q.send(only_there.Thing())\n    q.send('next')\n"
    )
    process = ctx.hosts[0].create_process(FunctionCall(f"{tmp_path}/entry.py:main"))
    mine = ctx.messagefilter(lambda x: x.sender is process and not isinstance(x.message, ProcessStarted))
    found = mine.recv(PATIENCE_S).message
    assert isinstance(found, UnreadableMessage)
    assert (found.type_name, found.text) == ("ModuleNotFoundError", "No module named 'only_there'")
    assert mine.recv(PATIENCE_S).message == "next"
    receive_exits(ctx, [process])


NOTEBOOK = """
import monarch_lab as ml
class Point:
    def __init__(self, x): self.x = x
factor = 3
def scale(point):
    q = ml.supervisor.get_message_queue()
    q.send(Point(point.x * factor))
    assert isinstance(q.recv(30).message, Point)
with ml.supervisor.Context() as ctx:
    (host,) = ctx.request_hosts(1)
    process = host.create_process(ml.supervisor.FunctionCall(scale, Point(14)))
    found = ctx.messagefilter(Point).recv(30).message
    process.send(found)
    assert ctx.messagefilter(ml.supervisor.ProcessExited).recv(30).message.result == 0
    print(type(found) is Point, found.x)
"""


@pytest.mark.parametrize("how", ["script", "no file"])
def test_functions_and_classes_without_a_module_travel_by_value(how: str, tmp_path: Path) -> None:
    """As in a notebook, where __main__ has no file; the class that comes back is the one that was sent."""
    (tmp_path / "script.py").write_text(NOTEBOOK)
    args = [str(tmp_path / "script.py")] if how == "script" else ["-c", NOTEBOOK]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, *args], env=env, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr, done.returncode) == ("True 42\n", "", 0)


def test_arguments_of_a_call_are_in_no_command_line(ctx: Any) -> None:
    process = ctx.hosts[0].create_process(
        FunctionCall(kit.send_family.__module__ + ".send_command_lines", "s3cret-arg")
    )
    lines = ctx.messagefilter(tuple).recv(PATIENCE_S).message
    assert lines and not [line for line in lines if b"s3cret-arg" in line]
    receive_exits(ctx, [process])


def test_waiting_works_in_an_event_loop(ctx: Any) -> None:
    async def talk() -> object:
        process = ctx.hosts[0].create_process(FunctionCall(kit.echo_for_ever))
        process.send("hello")
        letter = await ctx.messagefilter(str).recv_async(PATIENCE_S)
        process.signal(signal.SIGKILL)
        await ctx.messagefilter(ProcessExited).recv_async(PATIENCE_S)
        return letter.message

    assert asyncio.run(talk()) == "hello"


def test_a_process_that_does_not_read_stops_its_sender_and_nothing_grows(
    ctx: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ctx._backlog, "_window", 1 << 20)
    monkeypatch.setattr(ctx, "_settings", _with_letter_taken(ctx._settings, 0.1))
    process = ctx.hosts[0].create_process(FunctionCall(kit.read_when_told))
    with pytest.raises(DeviceException, match="1 of 1 processes do not read"):
        for _ in range(100):
            process.send(b"x" * 100_000)
    assert ctx._backlog.unread_bytes(0) <= 1 << 20
    os.kill(ctx.messagefilter(ProcessStarted).recv(PATIENCE_S).message.pid, 0)
    monkeypatch.undo()
    Path(ctx.logs / "go").touch()
    process.send("end")
    assert ctx.messagefilter(int).recv(PATIENCE_S).message >= 9
    receive_exits(ctx, [process])


def _with_letter_taken(settings: Any, seconds: float) -> Any:
    from dataclasses import replace

    return replace(settings, timeouts=replace(settings.timeouts, letter_taken=seconds))


def test_a_sender_that_nobody_reads_waits_and_goes_on_when_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MONARCH_LAB_LETTERS_WINDOW_BYTES", str(1 << 20))
    with Context() as ctx:
        (host,) = ctx.request_hosts(1)
        process = host.create_process(FunctionCall(kit.flood, 50, 100_000))
        stuck = ctx.messagefilter(str).recv(PATIENCE_S).message
        assert "has not read" in stuck and len(ctx._inbox) < 20
        received = 0
        while not isinstance((message := ctx.recv(PATIENCE_S).message), ProcessExited):
            received += isinstance(message, bytes)
        assert (message.result, process.returncode) == (0, 0)
        assert received == 50


def test_the_status_counts(ctx: Any) -> None:
    told: list[Status] = []
    status = ctx.status()
    assert status.states == {"ATTACHED": 2}
    assert status.launches >= status.starts >= 0 and status.exits == status.process_deletions
    assert (status.hosts_waiting, status.connections_waiting) == (0, 0)
    assert 0 < status.heartbeat_ttl_minimum <= status.heartbeat_ttl_average <= 15
    assert status.percent_polling + status.percent_active == pytest.approx(100)
    assert 0 < status.loop_time_mean <= status.loop_time_max
    assert "2 attached" in str(status) and told == []


def test_the_status_is_told_now_and_then_and_a_hook_that_fails_hurts_nothing(caplog: pytest.LogCaptureFixture) -> None:
    ctx = Context(log_interval=0.01)
    told: list[Status] = []

    def hook(status: Status) -> None:
        told.append(status)
        raise ValueError("my own mistake")

    ctx.log_status = hook
    with ctx:
        ctx.request_hosts(1)
        kit.wait_connected(ctx)
        wait_until(lambda: bool(told) and told[-1].states == {"ATTACHED": 1})
    assert "my own mistake" in caplog.text


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (dict(listen="udp"), 'listen is "ipc", "tcp" or "tcp://ADDRESS"'),
        (dict(listen="tcp://"), 'listen is "ipc", "tcp" or "tcp://ADDRESS"'),
        (dict(launcher="slurm"), 'launcher is "local" or None'),
        (dict(log_format="/tmp/log"), "a path with {name} and no other field"),
        (dict(log_format="/tmp/{name}{rank}"), "a path with {name} and no other field"),
        (dict(log_format="/tmp/{name"), "is no path with {name}"),
        (dict(log_interval=-1), "log_interval is seconds"),
        (dict(heartbeat_interval=20), "must be shorter than unreachable_after"),
        (dict(lost_after=1000), "and that than the lease"),
    ],
)
def test_a_wrong_option_is_refused_in_one_sentence_and_nothing_is_started(options: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageValueError) as error:
        Context(**options)
    assert text in str(error.value)


@pytest.mark.parametrize(
    ("options", "kind", "text"),
    [
        (dict(args="echo hello"), UsageTypeError, "args is a sequence of strings"),
        (dict(args=[]), UsageValueError, "args is empty"),
        (dict(args=["echo", 3]), UsageTypeError, "args holds 3"),
        (dict(args=["echo", "\0"]), UsageValueError, "zero byte"),
        (dict(args=["true"], processes_per_host=0), UsageValueError, "processes_per_host is a number above 0"),
        (dict(args=["true"], env={"A": 1}), UsageTypeError, "env maps strings to strings"),
        (dict(args=["true"], env={"A=B": "1"}), UsageValueError, "no environment can carry"),
        (dict(args=["true"], name=3), UsageTypeError, "name is a string"),
        (dict(args=["true"], hosts=[3]), UsageTypeError, "3 is no Host"),
    ],
)
def test_a_wrong_launch_is_refused_in_one_sentence(
    ctx: Any, options: dict[str, Any], kind: type[UsageError], text: str
) -> None:
    with pytest.raises(kind, match=text):
        ctx.create_process_group(**{"hosts": ctx.hosts, **options})


def test_hosts_of_other_contexts_and_named_twice_are_refused(ctx: Any) -> None:
    with pytest.raises(UsageValueError, match="belongs to another context"):
        Context().return_hosts(ctx.hosts[0])
    with pytest.raises(UsageValueError, match="named twice"):
        ctx.create_process_group([ctx.hosts[0]] * 2, ["true"])
    with pytest.raises(UsageValueError, match="takes a number of hosts"):
        ctx.request_hosts(-1)
    with pytest.raises(UsageValueError, match="no signal of this system"):
        ProcessList([ctx.create_process_group(ctx.hosts[0], ["true"])[0]]).signal(9999)


def test_a_process_that_no_supervisor_started_has_no_queue() -> None:
    with pytest.raises(UsageError, match="no supervisor started this process"):
        get_message_queue()


def test_the_names_users_need_are_in_ml_supervisor() -> None:
    for name in (
        "Context Host Process ProcessList FunctionCall Letter HostConnected HostDisconnected ProcessStarted"
        " ProcessExited ProcessFailedToStart Status TTL get_message_queue Filter"
    ).split():
        assert name in ml.supervisor.__all__ and getattr(ml.supervisor, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nope'"):
        _ = ml.supervisor.nope
    assert HostConnected("a") == HostConnected("a")


def test_what_the_link_loses_doubles_and_turns_round_costs_no_letter(monkeypatch: pytest.MonkeyPatch) -> None:
    faults = " ".join(f"{end}.{way}:{what}@0.05" for end in ("hub", "dialer") for way in ("send", "receive")
                      for what in ("drop", "duplicate", "reorder"))  # fmt: skip
    monkeypatch.setenv("MONARCH_LAB_FAULTS", f"{faults} seed=3")
    monkeypatch.setenv("MONARCH_LAB_TIMEOUTS_LINK_RESEND", "0.05")
    with Context() as ctx:
        group = ctx.create_process_group(ctx.request_hosts(2), FunctionCall(kit.echo_for_ever))
        echoes = ctx.messagefilter(int)
        for number in range(200):
            group.send(number)
        found: dict[Any, list[int]] = {process: [] for process in group}
        for _ in range(400):
            letter = echoes.recv(PATIENCE_S)
            found[letter.sender].append(letter.message)
        assert list(found.values()) == [list(range(200))] * 2


def test_a_fork_that_fails_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MONARCH_LAB_FAULTS", "agent.fork:drop#1")
    with Context() as ctx:
        first, second = ctx.create_process_group(ctx.request_hosts(1), ["true"], 2)
        ends = receive_exits(ctx, [first, second])
        assert "on purpose" in str(ends[first].result) and ends[second].result == 0


def test_without_a_log_the_last_lines_are_told_and_the_user_sees_them(capfd: pytest.CaptureFixture[str]) -> None:
    with Context() as ctx:
        code = "import os; os.write(2, b'before\\nlast words\\n'); os.abort()"
        process = ctx.request_hosts(1)[0].create_process([*PYTHON, code])
        exited = receive_exits(ctx, [process])[process]
    assert exited.result == -signal.SIGABRT
    assert exited.message.endswith("was killed by SIGABRT\nbefore\nlast words")
    assert "last words" in capfd.readouterr().err
