"""The whole chain with real processes: kernel, agent, zygote, workers. The workers are tests/agent/fake_worker.py."""

from __future__ import annotations

import base64
import os
import pickle
import signal
import stat
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import zmq

from monarch_lab.config import Settings, Timeouts
from monarch_lab.errors import ClosedError, LaunchError
from monarch_lab.supervisor import ProcessState, Supervisor
from monarch_lab.transport.directory import address
from monarch_lab.transport.door import show_keys
from monarch_lab.wire.codec import encode
from monarch_lab.wire.supervision import AgentHello, StopAgent, WorkerHello
from tests.supervisor.conftest import StartMesh
from tests.supervisor.recorder import SETTINGS, Recorder, key_of, launch_of, wait_until, zygote_pid_of

pytestmark = pytest.mark.skipif(os.name != "posix", reason="Unix sockets")


def test_orders_reach_all_or_the_ranks_named_and_payloads_come_back_whole(start_mesh: StartMesh) -> None:
    supervisor, recorder = start_mesh(hosts=2, per_host=2)
    large = os.urandom(1 << 20)
    supervisor.send(None, b"echo all", [large, memoryview(b"small")])
    for rank in range(4):
        assert recorder.wait_report(rank) == [b"echo all", large, b"small"]
    supervisor.send([1, 3], b"echo two")
    supervisor.send(None, b"echo end")
    for rank in range(4):
        expected = [b"echo two", b"echo end"] if rank in (1, 3) else [b"echo end"]
        assert [recorder.wait_report(rank)[0] for _ in expected] == expected


def test_control_messages_take_their_own_way(start_mesh: StartMesh) -> None:
    supervisor, recorder = start_mesh()
    supervisor.send_control([1], b"one")
    supervisor.send_control(None, b"all")
    assert recorder.wait_report(0) == [b"control all"]
    assert [recorder.wait_report(1) for _ in range(2)] == [[b"control one"], [b"control all"]]


def test_the_listener_hears_of_each_process_in_order(start_mesh: StartMesh) -> None:
    supervisor, recorder = start_mesh(hosts=2, per_host=1)
    assert [event for event in recorder.events if event.endswith(" 0")] == ["running 0", "ready 0"]
    assert [info.label for info in supervisor.processes.values()] == ["0.0", "1.0"]
    assert all(info.state is ProcessState.READY and info.pid > 0 for info in supervisor.processes.values())
    recorder.events.clear()
    wait_until(lambda: supervisor.processes[0].rss_bytes > 0)  # a beat has come


def test_a_worker_runs_where_and_as_it_was_told(start_mesh: StartMesh, tmp_path: Path) -> None:
    supervisor, recorder = start_mesh(env={"LAB_SETTING": "7"}, cwd=str(tmp_path))
    for name, values in {b"RANK": "01", b"WORLD_SIZE": "22", b"LAB_SETTING": "77"}.items():
        supervisor.send(None, b"env " + name)
        assert [recorder.wait_report(rank)[0].decode() for rank in (0, 1)] == list(values)
    supervisor.send([0], b"where")
    assert recorder.wait_report(0)[0].decode().split()[4] == str(tmp_path)
    supervisor.send([1], b"print hello")
    recorder.wait_report(1)
    info = supervisor.processes[1]
    assert Path(info.stdout_path).read_text() == Path(info.stderr_path).read_text() == "hello\n"


def test_a_killed_worker_is_told_with_its_signal_and_the_others_live(start_mesh: StartMesh) -> None:
    supervisor, recorder = start_mesh()
    supervisor.send([1], b"print last words")
    recorder.wait_report(1)
    supervisor.signal([1], signal.SIGKILL)
    info = recorder.wait_exit(1)
    assert info.code == -signal.SIGKILL and not info.out_of_memory
    assert info.obituary() == f"rank 1 (host 0, pid {info.pid}) was killed by SIGKILL\nlast words"
    assert supervisor.processes[1] == info
    supervisor.send(None, b"echo still here")
    assert recorder.wait_report(0) == [b"echo still here"]
    supervisor.signal([1], signal.SIGKILL)  # ended: passed over


def test_a_worker_that_raises_or_exits_tells_its_code_and_its_traceback(start_mesh: StartMesh) -> None:
    supervisor, recorder = start_mesh(per_host=3)
    supervisor.send([0], b"raise my mistake")
    supervisor.send([1], b"exit 3")
    supervisor.send([2], b"leave")
    first = recorder.wait_exit(0)
    assert first.code == 1 and "ValueError: my mistake" in first.last_lines
    assert [recorder.wait_exit(rank).code for rank in (1, 2)] == [3, 0]


def test_the_end_of_a_worker_is_told_after_its_last_report(start_mesh: StartMesh) -> None:
    supervisor, recorder = start_mesh()
    count = 500
    supervisor.send([1], b"burst %d" % count)
    recorder.wait_exit(1)
    told = [event for event in recorder.events if event in ("report 1", "exited 1")]
    assert told[-1] == "exited 1" and told.count("exited 1") == 1
    numbers = [int(frames[0]) for rank, frames in recorder.reports if rank == 1]
    # What zmq had not handed to the system when SIGKILL came is lost; what arrived is in order, and told before.
    assert numbers == list(range(len(numbers)))


class Trap:
    """Its unpickling leaves a trace."""

    def __init__(self, path: Path) -> None:
        self._path = str(path)

    def __reduce__(self) -> tuple[object, ...]:
        return open, (self._path, "w")


def test_strangers_are_refused_told_once_and_nothing_of_theirs_is_opened(
    start_mesh: StartMesh, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    supervisor, recorder = start_mesh()
    trap = pickle.dumps(Trap(tmp_path / "opened"))
    context = zmq.Context()
    where = address(supervisor.directory, "reports")

    def stranger(identity: bytes, *messages: list[bytes]) -> zmq.Socket:
        socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.IDENTITY, identity)
        # It holds what opens the socket, or nothing of it would come as far as the supervisor.
        show_keys(socket, where, key_of(supervisor), None)
        socket.connect(where)
        for message in messages:
            socket.send_multipart(message)
        return socket

    info = supervisor.processes[0]
    stranger(b"garbage", [b"\xff\xfe"], [b""], [b"", b"", b""], [trap], [trap])
    stranger(b"w9", [encode(WorkerHello(b"x" * 32, 9, 9, 1, ""))], [trap])
    stranger(b"twice", [encode(WorkerHello(key_of(supervisor), info.process, 0, 1, ""))], [b"echo", trap])
    stranger(b"a1", [encode(AgentHello(key_of(supervisor), "h", 1, "", ""))], [encode(StopAgent(0.0))])
    stranger(b"oversized", [bytes(1 << 22)])
    names = ("garbage", "w9", "twice", "a1", "oversized")

    def told() -> list[str]:
        return [record.getMessage() for record in caplog.records if "is refused" in record.getMessage()]

    wait_until(lambda: len(told()) >= len(names))
    supervisor.send(None, b"echo alive")
    assert [recorder.wait_report(rank) for rank in (0, 1)] == [[b"echo alive"], [b"echo alive"]]
    context.destroy(linger=0)
    assert recorder.reports == [] and recorder.lost == []
    assert sorted(told()) == sorted(line for name in names for line in told() if f"b'{name}'" in line)
    assert len(told()) == len(names)
    assert not (tmp_path / "opened").exists()


def test_a_proven_worker_that_says_hello_again_is_refused(
    start_mesh: StartMesh, caplog: pytest.LogCaptureFixture
) -> None:
    supervisor, recorder = start_mesh()
    hello = encode(WorkerHello(key_of(supervisor), 0, 0, 1, ""))
    supervisor.send([0], b"say", [hello])
    supervisor.send([0], b"echo after")
    assert recorder.wait_report(0) == [b"echo after"]
    assert [r.getMessage() for r in caplog.records] == ["peer b'w0' is refused: rank 0 has said hello before"]


def test_the_key_is_in_no_command_line_and_no_environment(start_mesh: StartMesh) -> None:
    supervisor, _ = start_mesh()
    key = key_of(supervisor)
    shapes = [key, key.hex().encode(), base64.b64encode(key)]
    for pid in filter(str.isdigit, os.listdir("/proc")):
        for name in ("cmdline", "environ"):
            try:
                text = Path(f"/proc/{pid}/{name}").read_bytes()
            except OSError:
                continue
            assert not any(shape in text for shape in shapes), (pid, name)


def test_the_directory_is_private_and_gone_afterwards(start_mesh: StartMesh) -> None:
    supervisor, _ = start_mesh()
    assert stat.S_IMODE(os.stat(supervisor.directory).st_mode) == 0o700
    supervisor.stop()
    assert not os.path.exists(supervisor.directory)
    assert all(not info.is_live for info in supervisor.processes.values())
    supervisor.stop()
    with pytest.raises(ClosedError):
        supervisor.send(None, b"echo late")
    with pytest.raises(ClosedError):
        supervisor.wait_ready()


def test_stop_ends_a_deaf_and_a_stopped_worker(start_mesh: StartMesh) -> None:
    supervisor, recorder = start_mesh(per_host=3)
    supervisor.send([0, 2], b"deaf")
    for rank in (0, 2):
        recorder.wait_report(rank)
    supervisor.signal([1, 2], signal.SIGSTOP)
    wait_until(lambda: all(supervisor.processes[rank].activity == "T" for rank in (1, 2)))
    supervisor.stop()
    assert [supervisor.processes[rank].code for rank in range(3)] == [-signal.SIGKILL, -signal.SIGTERM, -signal.SIGKILL]
    assert not os.path.exists(supervisor.directory)


def test_a_module_that_cannot_be_imported_fails_the_launch_with_its_own_text() -> None:
    supervisor = Supervisor(launch_of(worker_module="worker_missing"), SETTINGS, Recorder())
    supervisor.start()
    with pytest.raises(LaunchError, match="No module named 'worker_missing'"):
        supervisor.wait_ready()
    supervisor.stop()
    assert not os.path.exists(supervisor.directory)


def test_a_worker_that_ends_before_it_is_ready_fails_the_launch_with_its_traceback() -> None:
    supervisor = Supervisor(launch_of(worker_module="broken_worker"), SETTINGS, Recorder())
    supervisor.start()
    with pytest.raises(LaunchError, match="(?s)exited with code 1.*broken from the start"):
        supervisor.wait_ready()
    supervisor.stop()


def test_a_worker_that_never_says_hello_is_not_waited_for_beyond_its_time() -> None:
    timeouts = replace(SETTINGS.timeouts, worker_hello=0.3)
    supervisor = Supervisor(launch_of(worker_module="mute_worker"), Settings(timeouts=timeouts), Recorder())
    supervisor.start()
    with pytest.raises(LaunchError, match="rank 0, 1 did not say hello within 0.3 s"):
        supervisor.wait_ready()
    supervisor.stop()


def test_wait_ready_tells_its_stages_and_keeps_to_its_own_time() -> None:
    stages: list[tuple[str, int, int]] = []
    supervisor = Supervisor(launch_of(), SETTINGS, Recorder())
    supervisor.start()
    with pytest.raises(LaunchError, match="was not up within 0 s: agent, 0 of 1"):
        supervisor.wait_ready(0)
    supervisor.wait_ready(None, lambda *stage: stages.append(stage))
    assert stages[0][0] == "agent" and stages[-1] == ("workers", 2, 2)
    supervisor.stop()


def test_a_supervisor_that_was_never_or_hardly_started_stops() -> None:
    Supervisor(launch_of(), SETTINGS, Recorder()).stop()
    with Supervisor(launch_of(), SETTINGS, Recorder()) as supervisor:
        pass
    assert not os.path.exists(supervisor.directory)


def test_an_agent_that_cannot_be_started_is_a_launch_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/nowhere/python")
    supervisor = Supervisor(launch_of(), SETTINGS, Recorder())
    with pytest.raises(LaunchError, match="cannot start its agent"):
        supervisor.start()
    supervisor.stop()
    assert not os.path.exists(supervisor.directory)


def test_a_listener_that_fails_costs_nothing_but_a_log_line(caplog: pytest.LogCaptureFixture) -> None:
    class Failing(Recorder):
        def on_process(self, process: object) -> None:
            raise RuntimeError("my bug")

    with Supervisor(launch_of(), SETTINGS, Failing()) as supervisor:
        supervisor.wait_ready()
    assert "my bug" in caplog.text


def test_meshes_started_and_stopped_again_leave_no_descriptor_or_thread(start_mesh: StartMesh) -> None:
    def count() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    def cycle() -> None:
        supervisor, _ = start_mesh(per_host=1)
        supervisor.stop()

    cycle()
    before = count()
    for _ in range(3):
        cycle()
    assert count() == before


def test_each_outer_time_is_longer_than_what_it_waits_for() -> None:
    times = Timeouts()
    assert times.zygote_ready < times.worker_hello
    # The agent's grace, its sweep, and one more for the guard.
    assert 3 * times.stop_grace < times.stop


def test_logs_go_where_the_user_wants_them_and_stay(start_mesh: StartMesh, tmp_path: Path) -> None:
    supervisor, recorder = start_mesh(settings=replace(SETTINGS, log_dir=str(tmp_path / "logs")))
    supervisor.send([0], b"print kept")
    recorder.wait_report(0)
    supervisor.stop()
    assert (tmp_path / "logs" / "test.0.out").read_text() == "kept\n"


def test_an_interrupt_ends_wait_ready_at_once() -> None:
    supervisor = Supervisor(launch_of(worker_module="mute_worker"), SETTINGS, Recorder())
    supervisor.start()
    stages: list[str] = []

    def interrupt(stage: str, done: int, total: int) -> None:
        stages.append(stage)
        if stage == "workers":
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        supervisor.wait_ready(None, interrupt)
    waker = threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT))
    waker.start()
    with pytest.raises(KeyboardInterrupt):
        supervisor.wait_ready()
    waker.join()
    supervisor.stop()
    assert not os.path.exists(supervisor.directory)


def test_a_rank_gets_another_process_and_the_others_keep_theirs(start_mesh: StartMesh) -> None:
    supervisor, recorder = start_mesh(per_host=3)
    pids = {rank: info.pid for rank, info in supervisor.processes.items()}
    supervisor.signal([1], signal.SIGKILL)
    recorder.wait_exit(1)
    supervisor.restart([1, 2])  # a dead one and a live one
    fresh = {rank: info.pid for rank, info in supervisor.processes.items()}
    assert fresh[0] == pids[0] and fresh[1] != pids[1] and fresh[2] != pids[2]
    assert all(info.state is ProcessState.READY for info in supervisor.processes.values())
    recorder.reports.clear()
    supervisor.send(None, b"echo again")
    assert [recorder.wait_report(rank) for rank in range(3)] == [[b"echo again"]] * 3
    supervisor.send_control([1], b"hello")
    assert recorder.wait_report(1) == [b"control hello"]


def test_what_a_process_printed_is_not_told_of_the_next_one_of_its_rank(start_mesh: StartMesh) -> None:
    supervisor, recorder = start_mesh()
    supervisor.send([1], b"print last words")
    recorder.wait_report(1)
    supervisor.restart([1])
    recorder.processes.clear()
    supervisor.signal([1], signal.SIGKILL)
    assert recorder.wait_exit(1).last_lines == ""


def test_a_restart_has_the_zygote_replaced_where_it_has_died(start_mesh: StartMesh) -> None:
    supervisor, recorder = start_mesh()
    os.kill(zygote_pid_of(supervisor), signal.SIGKILL)
    supervisor.restart([0])
    supervisor.send(None, b"echo again")
    assert [recorder.wait_report(rank) for rank in range(2)] == [[b"echo again"]] * 2


def test_zygotes_that_die_of_the_fork_are_not_tried_for_ever(start_mesh: StartMesh, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    (tmp_path / "deadly.py").write_text(
        "import os, signal, sys\nfrom fake_worker import run\n"
        "def die():\n"
        "    if sys._getframe(1).f_code.co_name == '_fork' and "  # imports fork too: ctypes.util.find_library does
        f"os.path.exists({str(broken)!r}): os.kill(os.getpid(), signal.SIGKILL)\n"
        "os.register_at_fork(before=die)\n"
    )
    supervisor, recorder = start_mesh(worker_module="deadly", python_path=[str(tmp_path), *launch_of().python_path])
    broken.touch()
    with pytest.raises(LaunchError, match="two zygotes ended while they forked it"):
        supervisor.restart([0])
    broken.unlink()
    supervisor.restart([0])
    supervisor.send(None, b"echo again")
    assert [recorder.wait_report(rank) for rank in range(2)] == [[b"echo again"]] * 2


def test_a_rank_that_does_not_come_up_again_is_an_error_and_can_be_restarted(
    start_mesh: StartMesh, tmp_path: Path
) -> None:
    module = tmp_path / "sometimes.py"
    module.write_text(
        "import os, fake_worker\ndef run(spec):\n    if os.path.exists('broken'): raise ValueError('no luck')\n"
        "    fake_worker.run(spec)\n"
    )
    supervisor, recorder = start_mesh(
        worker_module="sometimes", cwd=str(tmp_path), python_path=[str(tmp_path), *launch_of().python_path]
    )
    (tmp_path / "broken").touch()
    with pytest.raises(LaunchError, match="no luck"):
        supervisor.restart([0])
    (tmp_path / "broken").unlink()
    supervisor.restart([0])
    supervisor.send([1, 0], b"echo still")
    assert [recorder.wait_report(rank) for rank in range(2)] == [[b"echo still"]] * 2


def test_a_silent_agent_is_told_and_then_given_up_with_its_processes(start_mesh: StartMesh) -> None:
    times = replace(SETTINGS.timeouts, look=0.05, unreachable=0.3, lost=1.5)
    supervisor, recorder = start_mesh(replace(SETTINGS, timeouts=times))
    os.kill(supervisor.agent_pid, signal.SIGSTOP)
    recorder.wait(lambda: any("state T) has been silent" in text for text in recorder.silences))
    recorder.wait(lambda: bool(recorder.lost))
    assert "state T) has been silent for" in recorder.lost[0] and len(recorder.lost) == 1
    assert all(info.state is ProcessState.LOST for info in supervisor.processes.values())


def test_an_agent_that_speaks_again_in_time_loses_nothing(start_mesh: StartMesh) -> None:
    times = replace(SETTINGS.timeouts, look=0.05, unreachable=0.3, lost=30.0)
    supervisor, recorder = start_mesh(replace(SETTINGS, timeouts=times))
    os.kill(supervisor.agent_pid, signal.SIGSTOP)
    recorder.wait(lambda: any("silent" in text for text in recorder.silences))
    supervisor.send(None, b"echo on")  # workers do not need it
    assert [recorder.wait_report(rank) for rank in (0, 1)] == [[b"echo on"]] * 2
    os.kill(supervisor.agent_pid, signal.SIGCONT)
    recorder.wait(lambda: recorder.silences[-1] == "")
    assert recorder.lost == []
