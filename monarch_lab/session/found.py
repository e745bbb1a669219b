"""The meshes of this user on this machine, whichever kernel they belong to: found by their records, ended by agents.

A record is believed while the kernel that wrote it lives: it holds the directory's lock; its pid has its start time.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from monarch_lab.config import Timeouts
from monarch_lab.errors import LaunchError, ProtocolError, UsageKeyError, UsageValueError
from monarch_lab.transport import platform
from monarch_lab.transport.directory import (
    RECORD,
    STOP_ASKED,
    is_held,
    own_directories,
    parents_of_directories,
    read_file,
    sweep_directories,
    write_file,
)
from monarch_lab.wire.codec import TextDecoder
from monarch_lab.wire.record import MeshRecord, PidRecord, age_text, labels_text

_decode = TextDecoder(MeshRecord)
_AGENT = "monarch_lab.agent"
_LOOK_S = 0.02


@dataclass(frozen=True, slots=True)
class FoundMesh:
    record: MeshRecord
    directory: str
    state: str  # starting, live, dead; "elsewhere" where its pids mean nothing here
    note: str = ""  # what is the matter, in a few words

    @property
    def age_s(self) -> float:
        return max(0.0, time.monotonic() - self.record.began)

    def workers(self) -> Iterator[tuple[int, str, str, str]]:
        """(rank, label, stdout path, stderr path) of each."""
        for worker in self.record.workers:
            yield worker.rank, worker.label, worker.stdout_path, worker.stderr_path

    def is_there(self) -> bool:
        """Whether it still runs: its agent does."""
        return _lives(self.record.agent)

    @property
    def is_ours(self) -> bool:
        """Of this process."""
        return self.record.kernel == PidRecord(os.getpid(), platform.start_time(os.getpid()) or 0)


def find_meshes() -> list[FoundMesh]:
    """The oldest first. A directory without a record (of a spare, or of a start in its first moment) is none."""
    found = []
    for directory in _directories():
        record = _read(directory)
        if record is not None and is_held(directory):
            mesh = _judged(record, directory)
            if mesh is not None:
                found.append(mesh)
    return sorted(found, key=lambda mesh: mesh.record.began)


COLUMNS = ("name", "state", "hosts x gpus", "device", "age", "kernel", "agent", "directory", "labels")


def table_text(meshes: Iterable[FoundMesh]) -> str:
    """One line a mesh, in columns."""
    rows = [COLUMNS, *map(_row, meshes)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(f"{text:<{width}}" for text, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _row(mesh: FoundMesh) -> tuple[str, ...]:
    record = mesh.record
    return (
        record.name,
        f"{mesh.state}: {mesh.note}" if mesh.note else mesh.state,
        f"{record.hosts} x {record.per_host}",
        record.device,
        age_text(mesh.age_s),
        str(record.kernel.pid),
        str(record.agent.pid),
        mesh.directory,
        labels_text(record.labels),
    )


def clean_up() -> list[str]:
    """Remove what kernels left that were killed before they had a guard; a sentence for each."""
    cleaned = []
    for parent in {os.path.dirname(directory) for directory in _directories()}:
        names = {directory: _read(directory) for directory in own_directories([parent])}
        for directory in sweep_directories(parent):
            record = names.get(directory)
            whose = f'mesh "{record.name}" of kernel {record.kernel.pid}' if record is not None else "a mesh"
            cleaned.append(f"Removed {directory}: it was left by {whose}, which has ended.")
    return cleaned


def named(meshes: Iterable[FoundMesh], text: str) -> FoundMesh:
    """The one called ``NAME``, or ``NAME@KERNELPID`` where several kernels have one of that name."""
    meshes = list(meshes)
    name, _, kernel = text.partition("@")
    same = [m for m in meshes if m.record.name == name and kernel in ("", str(m.record.kernel.pid))]
    if not same:
        there = ", ".join(dict.fromkeys(m.record.name for m in meshes))
        raise UsageKeyError(f"no mesh is named {text!r}; {f'there is {there}' if there else 'no mesh is running'}")
    if len(same) > 1:
        choices = " or ".join(f"{name}@{m.record.kernel.pid}" for m in same)
        raise UsageValueError(f"{len(same)} kernels have a mesh named {name!r}: write {choices}")
    return same[0]


def stop(mesh: FoundMesh, who: str, timeouts: Timeouts) -> None:
    """Have its agent end every process of it, and tell its kernel that ``who`` did; LaunchError where that fails.

    An agent that does not end in time is killed: its guard does the rest.
    """
    record, directory = mesh.record, mesh.directory
    if mesh.state == "elsewhere":
        raise LaunchError(f'mesh "{record.name}" runs in another container: stop it there')
    agent = record.agent
    with contextlib.suppress(OSError):
        write_file(directory, STOP_ASKED, who.encode())
    for signals, within_s in (
        ((signal.SIGTERM, signal.SIGCONT), timeouts.stop),
        ((signal.SIGKILL,), timeouts.stop_grace),
    ):
        for sig in signals:
            platform.signal_checked(agent.pid, sig, lambda: _lives(agent))
        if _wait(lambda: not _lives(agent) and not _left(mesh), within_s):
            return
    left = ", ".join(str(process.pid) for process in _left(mesh))
    what = f"its processes {left}" if left else f"its agent {agent.pid}"
    raise LaunchError(f'mesh "{record.name}" was not ended: {what} would not go')


def _directories() -> list[str]:
    found = own_directories(parents_of_directories())
    # A kernel with another TMPDIR has its meshes elsewhere; where, its agents say: they stand in the directory.
    for pid in platform.all_pids():
        told = platform.command_and_directory(pid)
        if told is not None and _AGENT in told[0] and told[1] not in found:
            found += [path for path in own_directories([os.path.dirname(told[1])]) if path not in found]
    return found


def _read(directory: str) -> MeshRecord | None:
    data = read_file(directory, RECORD)
    try:
        return None if data is None else _decode(data)
    except ProtocolError:
        return None  # of another version


def _judged(record: MeshRecord, directory: str) -> FoundMesh | None:
    if record.boot != platform.boot_id() or record.namespace != platform.pid_namespace():
        return FoundMesh(record, directory, "elsewhere", "in another container")
    if not _lives(record.kernel):
        # A child of the kernel holds the lock it inherited; with an agent at work the end is on its way.
        return FoundMesh(record, directory, "dead", "its kernel has ended") if _lives(record.agent) else None
    if not _lives(record.agent):
        return FoundMesh(record, directory, "dead", "its agent has ended")
    if record.state == "starting":
        return FoundMesh(record, directory, "starting")
    lost = [worker.rank for worker in record.workers if not _lives(worker.process)]
    if lost:
        return FoundMesh(record, directory, "dead", f"without rank {', '.join(map(str, lost))}")
    return FoundMesh(record, directory, "live")


def _lives(process: PidRecord) -> bool:
    return process.pid > 0 and platform.start_time(process.pid) == process.start


def _left(mesh: FoundMesh) -> list[PidRecord]:
    return [worker.process for worker in mesh.record.workers if _lives(worker.process)]


def _wait(done: Callable[[], bool], within_s: float) -> bool:
    deadline = time.monotonic() + within_s
    while not done():
        if time.monotonic() > deadline:
            return False
        time.sleep(_LOOK_S)
    return True
