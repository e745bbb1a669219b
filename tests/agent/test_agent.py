from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from monarch_lab.agent.children import Child, Children, last_lines
from monarch_lab.transport import platform
from tests.supervisor.conftest import StartMesh
from tests.supervisor.recorder import ROOT, agent_pid_of, wait_until, zygote_pid_of


def test_the_agent_never_loads_torch_nor_jupyter() -> None:
    code = (
        "import sys, monarch_lab.agent.main, monarch_lab.agent.zygote; "
        "print([m for m in ('torch', 'IPython', 'numpy', 'monarch_lab.worker', 'monarch_lab.tensors') "
        "if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.strip() == "[]"


def test_the_guard_needs_the_standard_library_alone() -> None:
    code = (
        f"import sys; sys.path.append({str(ROOT)!r}); import monarch_lab.agent.guard; print('msgspec' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.skipif(not platform.LINUX, reason="subreaper")
def test_a_worker_is_the_agents_child_and_leads_a_session_of_its_own(start_mesh: StartMesh) -> None:
    supervisor, recorder = start_mesh()
    supervisor.send([0], b"where")
    pid, parent, session = (int(word) for word in recorder.wait_report(0)[0].split()[:3])
    assert pid == session == supervisor.processes[0].pid
    assert parent == agent_pid_of(supervisor)
    assert os.getsid(parent) == parent != os.getsid(0)
    assert os.getsid(zygote_pid_of(supervisor)) not in (session, parent)


@pytest.mark.skipif(not platform.LINUX, reason="/proc")
def test_a_worker_inherits_no_descriptor_of_zygote_or_agent(start_mesh: StartMesh) -> None:
    supervisor, _ = start_mesh()
    for info in supervisor.processes.values():
        open_files = {int(fd): os.readlink(f"/proc/{info.pid}/fd/{fd}") for fd in os.listdir(f"/proc/{info.pid}/fd")}
        assert open_files[0] == os.devnull
        assert (open_files[1], open_files[2]) == (info.stdout_path, info.stderr_path)
        # What is left are zmq's own: sockets, eventfd and epoll of this process.
        for fd, target in open_files.items():
            assert fd < 3 or target.startswith(("socket:", "anon_inode:[event")), (fd, target)


@pytest.mark.skipif(not platform.LINUX, reason="/proc")
def test_the_zygote_runs_one_thread(start_mesh: StartMesh) -> None:
    # numpy's OpenBLAS starts threads when it is imported.
    supervisor, _ = start_mesh(preload=("numpy",))
    assert len(os.listdir(f"/proc/{zygote_pid_of(supervisor)}/task")) == 1
    assert (Path(supervisor.directory) / "zygote.log").read_text() == ""


def test_signals_reach_the_process_or_its_whole_group(start_mesh: StartMesh) -> None:
    supervisor, recorder = start_mesh()
    supervisor.send([0], b"family")
    plain = int(recorder.wait_report(0)[0].split()[0])
    supervisor.signal([0], signal.SIGSTOP, group=True)
    wait_until(lambda: (platform.usage(plain) or (0, 0, ""))[2] == "T")
    supervisor.signal([0], signal.SIGCONT, group=True)
    wait_until(lambda: (platform.usage(plain) or (0, 0, ""))[2] == "S")
    supervisor.send([0], b"echo back")
    assert recorder.wait_report(0) == [b"echo back"]


@pytest.mark.slow
def test_a_zygote_with_torch_forks_workers_that_are_ready(start_mesh: StartMesh) -> None:
    supervisor, recorder = start_mesh(per_host=4, preload=("torch",))
    supervisor.send(None, b"where")
    assert all(recorder.wait_report(rank)[0] for rank in range(4))
    assert len(os.listdir(f"/proc/{zygote_pid_of(supervisor)}/task")) == 1


def test_the_end_of_a_long_file_is_told_without_reading_it_all(tmp_path: Path) -> None:
    path = tmp_path / "err"
    path.write_text("".join(f"line {n}\n" for n in range(100_000)))
    lines = last_lines(str(path)).splitlines()
    assert lines[-1] == "line 99999" and len(lines) == 20
    assert last_lines(str(tmp_path / "none")) == ""


def test_an_end_that_overtakes_the_zygotes_word_is_kept_for_it() -> None:
    children = Children()
    child = subprocess.Popen([sys.executable, "-S", "-c", "raise SystemExit(3)"])
    child.returncode = 0
    others: list[tuple[int, int]] = []

    def collected() -> bool:
        others.extend(children.collect(expecting=True)[1])
        return (child.pid, 3) in others

    wait_until(collected)
    exited = children.add(Child(process=5, pid=child.pid, stderr_path=""))
    assert exited is not None and (exited.process, exited.pid, exited.code) == (5, child.pid, 3)
    assert len(children) == 0
