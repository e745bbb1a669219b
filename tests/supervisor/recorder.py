"""A listener that keeps everything, and meshes of fake workers to hear it from."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from monarch_lab.config import Settings, Timeouts
from monarch_lab.supervisor import MeshLaunch, ProcessInfo, ProcessState, Supervisor
from monarch_lab.transport import platform

PATIENCE_S = 30.0
ROOT = Path(__file__).resolve().parents[2]
SETTINGS = Settings(timeouts=Timeouts(beat=0.1, stop_grace=0.5, stop=10.0))


class Recorder:
    def __init__(self) -> None:
        self.reports: list[tuple[int, list[bytes]]] = []
        self.processes: list[ProcessInfo] = []
        self.lost: list[str] = []
        self.silences: list[str] = []
        self.events: list[str] = []  # "report 0", "exited 0" ... in the order they were told
        self._changed = threading.Condition()

    def on_report(self, rank: int, frames: list[bytes | memoryview]) -> None:
        with self._changed:
            self.reports.append((rank, [bytes(frame) for frame in frames]))
            self.events.append(f"report {rank}")
            self._changed.notify_all()

    def on_process(self, process: ProcessInfo) -> None:
        with self._changed:
            self.processes.append(process)
            self.events.append(f"{process.state.name.lower()} {process.rank}")
            self._changed.notify_all()

    def on_beat(self) -> None:
        pass

    def on_silence(self, text: str) -> None:
        with self._changed:
            self.silences.append(text)
            self._changed.notify_all()

    def on_lost(self, reason: str) -> None:
        with self._changed:
            self.lost.append(reason)
            self._changed.notify_all()

    def wait(self, done: Callable[[], bool]) -> None:
        with self._changed:
            assert self._changed.wait_for(done, PATIENCE_S), (self.events[-20:], self.lost)

    def wait_report(self, rank: int) -> list[bytes]:
        """Take the rank's oldest report."""
        self.wait(lambda: any(r == rank for r, _ in self.reports))
        at = next(i for i, (r, _) in enumerate(self.reports) if r == rank)
        return self.reports.pop(at)[1]

    def wait_exit(self, rank: int) -> ProcessInfo:
        def ended() -> list[ProcessInfo]:
            return [p for p in self.processes if p.rank == rank and p.state is ProcessState.EXITED]

        self.wait(lambda: bool(ended()))
        return ended()[0]


def launch_of(per_host: int = 2, hosts: int = 1, **changes: object) -> MeshLaunch:
    values: dict[str, object] = {
        "name": "test",
        "hosts": hosts,
        "per_host": per_host,
        "device": "cpu",
        "seed": 0,
        "env": {},
        "python_path": [str(ROOT / "tests" / "agent"), str(ROOT), *sys.path],
        "cwd": os.getcwd(),
        "worker_module": "fake_worker",
        "preload": (),
        **changes,
    }
    return MeshLaunch(**values)  # type: ignore[arg-type]


def mark_of(supervisor: Supervisor) -> str:
    assert supervisor._loop is not None
    return supervisor._loop._spec.mark


def key_of(supervisor: Supervisor) -> bytes:
    assert supervisor._loop is not None
    return supervisor._loop._spec.key


def agent_pid_of(supervisor: Supervisor) -> int:
    assert supervisor._loop is not None and supervisor._loop._agent is not None
    return supervisor._loop._agent.pid


def guard_pid_of(agent_pid: int) -> int | None:
    return next((pid for pid in platform.descendants(agent_pid) if b"agent.guard" in command_of(pid)), None)


def zygote_pid_of(supervisor: Supervisor) -> int:
    workers = {info.pid for info in supervisor.processes.values()}
    below = set(platform.descendants(agent_pid_of(supervisor))) - workers
    return next(pid for pid in below if b"agent.zygote" in command_of(pid))


def command_of(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def wait_until(done: Callable[[], bool]) -> None:
    """For what tells nobody: /proc. Polls, with a deadline."""
    pause = threading.Event()
    for _ in range(int(PATIENCE_S / 0.01)):
        if done():
            return
        pause.wait(0.01)
    raise AssertionError("it did not come about")
