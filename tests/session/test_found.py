"""Meshes of other kernels: found by their records, believed only while their processes are the ones recorded."""

from __future__ import annotations

import errno
import os
import signal
import stat
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from monarch_lab.config import Timeouts
from monarch_lab.errors import LaunchError, UsageKeyError, UsageValueError
from monarch_lab.session import found
from monarch_lab.session.found import FoundMesh
from monarch_lab.session.record import Recorder
from monarch_lab.session.relay import Relay
from monarch_lab.supervisor import Supervisor
from monarch_lab.transport.directory import RECORD, hold_directory, make_directory, remove_directory, write_file
from monarch_lab.wire.codec import TextDecoder, encode_text
from monarch_lab.wire.record import MeshRecord, PidRecord, age_text
from tests.session.conftest import OtherKernel
from tests.supervisor.recorder import SETTINGS, launch_of, wait_until

StartKernel = Callable[..., OtherKernel]
TIMES = Timeouts(stop=10.0)


def mesh_of(kernel: OtherKernel) -> FoundMesh | None:
    return next((mesh for mesh in found.find_meshes() if mesh.directory == kernel.directory), None)


def state_of(kernel: OtherKernel) -> str:
    mesh = mesh_of(kernel)
    return "" if mesh is None else mesh.state


def test_a_mesh_of_another_kernel_is_found_with_all_that_is_known(other_kernel: StartKernel) -> None:
    kernel = other_kernel("far", hosts=2, per_host=1)
    mesh = mesh_of(kernel)
    assert mesh is not None and not mesh.is_ours and mesh.is_there()
    record = mesh.record
    assert (record.name, mesh.state, record.hosts, record.per_host) == ("far", "live", 2, 1)
    assert (record.kernel.pid, record.agent.pid) == (kernel.pid, kernel.agent)
    assert [worker.process.pid for worker in record.workers] == kernel.workers
    assert record.labels == {"team": "blue"}
    header, *rows = found.table_text([mesh]).splitlines()
    assert header.split()[:2] == ["name", "state"]
    assert len(rows) == 1 and f"{kernel.pid}" in rows[0] and "team=blue" in rows[0] and kernel.directory in rows[0]
    path = Path(kernel.directory) / RECORD
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_kernel_with_another_directory_for_its_files_is_found_by_its_agent(
    other_kernel: StartKernel, tmp_path: Path
) -> None:
    place = tmp_path / "t"
    place.mkdir()
    if len(str(place)) > 60:
        place = Path("/tmp/mlt")
        place.mkdir(exist_ok=True)
    kernel = other_kernel("elsewhere", TMPDIR=str(place))
    assert kernel.directory.startswith(str(place))
    assert state_of(kernel) == "live"


def test_a_mesh_without_a_worker_is_dead_and_says_which(other_kernel: StartKernel) -> None:
    kernel = other_kernel()
    os.kill(kernel.workers[1], signal.SIGKILL)
    wait_until(lambda: state_of(kernel) == "dead")
    mesh = mesh_of(kernel)
    assert mesh is not None and mesh.note == "without rank 1"


def test_a_mesh_whose_kernel_was_killed_is_gone_from_the_list(other_kernel: StartKernel) -> None:
    kernel = other_kernel()
    kernel.process.kill()
    wait_until(lambda: mesh_of(kernel) is None)


def test_stop_ends_every_process_through_the_agent_and_the_kernel_is_told_by_whom(other_kernel: StartKernel) -> None:
    kernel = other_kernel()
    mesh = mesh_of(kernel)
    assert mesh is not None
    found.stop(mesh, "a test", TIMES)
    assert kernel.is_gone() and kernel.process.poll() is None
    assert kernel.says() == "lost: it was stopped from outside (a test)"
    assert mesh_of(kernel) is None


def test_an_agent_that_is_stopped_or_deaf_is_ended_all_the_same(other_kernel: StartKernel) -> None:
    kernel = other_kernel()
    mesh = mesh_of(kernel)
    assert mesh is not None
    os.kill(kernel.agent, signal.SIGSTOP)
    found.stop(mesh, "a test", TIMES)
    assert kernel.is_gone()


def test_a_pid_that_was_reused_is_not_taken_for_its_process(other_kernel: StartKernel) -> None:
    kernel = other_kernel()
    mesh = mesh_of(kernel)
    assert mesh is not None
    for changes in ({"kernel": PidRecord(mesh.record.kernel.pid, 1), "agent": PidRecord(kernel.agent, 1)},):
        other = msgspec.structs.replace(mesh.record, **changes)
        write_file(kernel.directory, RECORD, encode_text(other))
        assert mesh_of(kernel) is None
    moved = FoundMesh(msgspec.structs.replace(mesh.record, agent=PidRecord(kernel.process.pid, 1)), "/nowhere", "live")
    with pytest.raises(LaunchError, match="would not go"):
        found.stop(moved, "a test", Timeouts(stop=0.1, stop_grace=0.1))
    assert kernel.process.poll() is None, "whose number it was"


@pytest.mark.parametrize("changes", [{"boot": "another"}, {"namespace": "pid:[1]"}])
def test_a_mesh_of_another_container_is_shown_and_left_alone(
    other_kernel: StartKernel, changes: dict[str, str]
) -> None:
    kernel = other_kernel()
    mesh = mesh_of(kernel)
    assert mesh is not None
    write_file(kernel.directory, RECORD, encode_text(msgspec.structs.replace(mesh.record, **changes)))
    mesh = mesh_of(kernel)
    assert mesh is not None and mesh.state == "elsewhere"
    with pytest.raises(LaunchError, match="another container: stop it there"):
        found.stop(mesh, "a test", TIMES)


def test_what_a_killed_kernel_left_is_removed_with_a_word() -> None:
    directory = make_directory()
    os.close(hold_directory(directory))
    record = MeshRecord("left", "started", PidRecord(1, 1), PidRecord(2, 2), "", "", 1, 1, "cpu", {}, 0.0, [])
    write_file(directory, RECORD, encode_text(record))
    sentences = found.clean_up()
    assert f'Removed {directory}: it was left by mesh "left" of kernel 1, which has ended.' in sentences
    assert not os.path.exists(directory)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"name": 3}', b"\xff" * 100])
def test_a_record_that_is_none_is_passed_over(content: bytes) -> None:
    directory = make_directory()
    hold = hold_directory(directory)
    try:
        write_file(directory, RECORD, content)
        assert all(mesh.directory != directory for mesh in found.find_meshes())
        os.unlink(os.path.join(directory, RECORD))
        os.symlink("/etc/passwd", os.path.join(directory, RECORD))
        assert all(mesh.directory != directory for mesh in found.find_meshes())
    finally:
        os.close(hold)
        remove_directory(directory)


def record_of(name: str, kernel: int) -> FoundMesh:
    record = MeshRecord(name, "started", PidRecord(kernel, 1), PidRecord(2, 2), "", "", 1, 1, "cpu", {}, 0.0, [])
    assert TextDecoder(MeshRecord)(encode_text(record)) == record
    return FoundMesh(record, "/nowhere", "live")


def test_a_name_that_several_kernels_have_needs_the_kernel() -> None:
    meshes = [record_of("mesh", 7), record_of("mesh", 8), record_of("other", 7)]
    assert found.named(meshes, "other") is meshes[2]
    assert found.named(meshes, "mesh@8") is meshes[1]
    with pytest.raises(UsageValueError, match="2 kernels have a mesh named 'mesh': write mesh@7 or mesh@8"):
        found.named(meshes, "mesh")
    with pytest.raises(UsageKeyError, match="no mesh is named 'mash'; there is mesh, other"):
        found.named(meshes, "mash")


def test_ages_are_told_in_one_unit() -> None:
    assert [age_text(s) for s in (0.4, 61, 130, 3600, 7300, 200_000)] == [
        "0 s",
        "61 s",
        "2 min",
        "60 min",
        "2 h",
        "2 d",
    ]


def test_a_mesh_whose_record_cannot_be_written_starts_all_the_same(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    # Not by its path: tests that import the package afresh leave it without an attribute for the module.
    monkeypatch.setattr(sys.modules[Recorder.__module__], "write_file", full)
    recorder = Recorder(launch_of(per_host=1))
    relay = Relay(recorder.note)
    with Supervisor(launch_of(per_host=1), SETTINGS, relay) as supervisor:
        recorder.begin(supervisor)
        supervisor.wait_ready()
    assert "mesh test will not be listed elsewhere: [Errno 28] No space left on device" in caplog.text


def test_the_record_names_the_process_that_a_rank_got_later() -> None:
    recorder = Recorder(launch_of())
    relay = Relay(recorder.note)
    with Supervisor(launch_of(), SETTINGS, relay) as supervisor:
        recorder.begin(supervisor)
        supervisor.wait_ready()
        supervisor.restart([1])

        def recorded() -> FoundMesh:
            return next(m for m in found.find_meshes() if m.directory == supervisor.directory)

        pids = [info.pid for info in supervisor.processes.values()]
        # Written by the supervisor's thread, a moment after restart() has seen it.
        wait_until(lambda: [worker.process.pid for worker in recorded().record.workers] == pids)
        assert recorded().is_ours and recorded().state == "live"
