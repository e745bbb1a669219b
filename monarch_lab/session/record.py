"""Tells the user's other kernels and shells of a mesh: keeps its record (wire/record.py) in its directory.

Runs on: the owner's thread at the start, then the supervisor's I/O thread.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable

from monarch_lab.supervisor import MeshLaunch, ProcessInfo, ProcessState, Supervisor
from monarch_lab.transport import platform
from monarch_lab.transport.directory import RECORD, write_file
from monarch_lab.wire.codec import encode_text
from monarch_lab.wire.record import MeshRecord, PidRecord, WorkerRecord

log = logging.getLogger(__name__)


class Recorder:
    def __init__(self, launch: MeshLaunch, on_change: Callable[[], None] = lambda: None) -> None:
        """``on_change``: called after each process that has changed."""
        self._launch = launch
        self._on_change = on_change
        self._began = time.monotonic()
        self._supervisor: Supervisor | None = None
        self._lock = threading.Lock()  # guards the file: the newest facts stay

    def begin(self, supervisor: Supervisor) -> None:
        """Once the agent runs; again for another agent."""
        self._supervisor = supervisor
        self._write(supervisor)

    def note(self, process: ProcessInfo) -> None:
        """A process has changed."""
        supervisor = self._supervisor
        # One record when all are there, and one for each that is replaced later: not one for each that starts.
        if supervisor is not None and process.state is ProcessState.READY and _all_up(supervisor):
            self._write(supervisor)
        self._on_change()

    def _write(self, supervisor: Supervisor) -> None:
        try:
            with self._lock:
                write_file(supervisor.directory, RECORD, encode_text(self._record(supervisor)))
        except OSError as e:
            if os.path.isdir(supervisor.directory):  # gone: the mesh has just ended
                log.warning("mesh %s will not be listed elsewhere: %s", self._launch.name, e)

    def _record(self, supervisor: Supervisor) -> MeshRecord:
        launch = self._launch
        workers = [
            WorkerRecord(info.rank, info.label, _pid(info.pid), info.stdout_path, info.stderr_path)
            for _, info in sorted(supervisor.processes.items())
        ]
        return MeshRecord(
            name=launch.name,
            state="started" if _all_up(supervisor) else "starting",
            kernel=_pid(os.getpid()),
            agent=_pid(supervisor.agent_pid),
            boot=platform.boot_id(),
            namespace=platform.pid_namespace(),
            hosts=launch.hosts,
            per_host=launch.per_host,
            device=launch.device,
            labels=dict(launch.labels),
            began=self._began,
            workers=workers,
        )


def _all_up(supervisor: Supervisor) -> bool:
    return all(info.state is ProcessState.READY for info in supervisor.processes.values())


def _pid(pid: int) -> PidRecord:
    return PidRecord(pid, (platform.start_time(pid) or 0) if pid else 0)
