"""What the rest of the kernel holds of a mesh's processes."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping, Sequence
from types import TracebackType

from monarch_lab.config import Settings
from monarch_lab.errors import ClosedError, InternalError, LaunchError
from monarch_lab.supervisor.groundwork import Ground, Groundwork
from monarch_lab.supervisor.launch import Listener, MeshLaunch, Plan
from monarch_lab.supervisor.lifecycle import ProcessInfo, ProcessState
from monarch_lab.supervisor.loop import SupervisorLoop
from monarch_lab.supervisor.progress import MeshState, OnProgress, Progress
from monarch_lab.transport import platform
from monarch_lab.transport.frames import share
from monarch_lab.wire.engine import ALL, CONTROL_ALL, control_topic, topic
from monarch_lab.wire.supervision import LaunchWorker, MeshFacts, SignalProcess

# What a mesh opens in the kernel: its own, with room for what others open meanwhile, and three sockets of each worker.
_DESCRIPTORS = 48
_DESCRIPTORS_OF_WORKER = 4


class Supervisor:
    """Starts, watches, reaches and ends the processes of one mesh.

    ``send``, ``send_control``, ``signal`` and ``processes`` are for any thread but never block; ``start``,
    ``wait_ready`` and ``stop`` belong to the mesh's owner.
    """

    def __init__(
        self, launch: MeshLaunch, settings: Settings, listener: Listener, groundwork: Groundwork | None = None
    ) -> None:
        """``groundwork``: one that fits and that no mesh stands on, ended with this mesh; None: a fresh one."""
        self._launch = launch
        self._settings = settings
        self._listener = listener
        self._groundwork = groundwork
        self._loop: SupervisorLoop | None = None
        self.directory = ""

    def __enter__(self) -> Supervisor:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        self.stop()

    @property
    def processes(self) -> Mapping[int, ProcessInfo]:
        """Snapshots by rank, of this moment."""
        return self._loop.processes if self._loop is not None else {}

    @property
    def state(self) -> MeshState:
        return MeshState.STARTING if self._loop is None else self._loop.start.progress.state

    def failure_text(self) -> str:
        """What is the matter: why it did not come up, or which processes have ended."""
        ended = [info.obituary() for info in self.processes.values() if not info.is_live]
        return str(self._started().start.progress) if self.state is not MeshState.LIVE else "; ".join(ended)

    @property
    def agent_pid(self) -> int:
        """0 before the start."""
        return self._loop.agent_pid if self._loop is not None else 0

    def start(self) -> None:
        """Bind, start agent and thread; returns before any of them has answered. LaunchError if it cannot."""
        if self._loop is not None:
            raise InternalError("a supervisor starts once")
        self._check_descriptors()
        ground = Ground.of(self._launch, self._settings)
        if self._groundwork is None:
            self._groundwork = Groundwork(ground, self._launch.name)
        self.directory = self._groundwork.directory
        self._loop = self._groundwork.loop
        try:
            self._loop.launch(self._plan(self._groundwork, ground))
        except BaseException:
            self._groundwork.stop()
            raise

    def _check_descriptors(self) -> None:
        """Before anything is opened: libzmq ends the whole process where it meets the limit."""
        free = platform.free_descriptors()
        needed = _DESCRIPTORS + _DESCRIPTORS_OF_WORKER * self._launch.hosts * self._launch.per_host
        if free is not None and free < needed:
            raise LaunchError(
                f"mesh {self._launch.name} cannot start: it needs {needed} file descriptors and this process may open "
                f"{free} more; raise the limit (ulimit -n) before the kernel starts"
            )

    def wait_ready(self, timeout: float | None = None, on_progress: OnProgress | None = None) -> None:
        """Return when every worker has been welcomed.

        LaunchError with what the failing process printed last, or when ``timeout`` is over; ClosedError if stopped
        meanwhile. ``on_progress(stage, done, total)`` is called on this thread.
        """
        start = self._started().start
        deadline = None if timeout is None else time.monotonic() + timeout
        shown: Progress | None = None
        while True:
            progress = start.wait_change(shown, None if deadline is None else deadline - time.monotonic())
            if progress == shown:
                raise LaunchError(f"mesh {self._launch.name} was not up within {timeout:g} s: {progress}")
            if on_progress is not None:
                on_progress(progress.stage.value, progress.done, progress.total)
            shown = progress
            match progress.state:
                case MeshState.LIVE:
                    return
                case MeshState.FAILED:
                    raise LaunchError(f"mesh {self._launch.name} did not come up: {progress}")
                case MeshState.STOPPING | MeshState.CLOSED:
                    raise ClosedError(f"mesh {self._launch.name} was stopped")

    def send(self, ranks: Sequence[int] | None, header: bytes, frames: Sequence[bytes | memoryview] = ()) -> None:
        """Order to the ranks' main threads (None: all, in one send). Large frames are not copied: leave them alone."""
        names = (ALL,) if ranks is None else tuple(map(topic, ranks))
        parts = [header, *map(share, frames)]
        self._started().publish([[name, *parts] for name in names])

    def send_control(self, ranks: Sequence[int] | None, header: bytes) -> None:
        """To the ranks' control threads; overtakes the orders."""
        names = (CONTROL_ALL,) if ranks is None else tuple(map(control_topic, ranks))
        self._started().publish([(name, header) for name in names])

    def signal(self, ranks: Sequence[int], sig: int, group: bool = False) -> None:
        """Through the agent, which alone knows whose pid it is. A rank that has ended is passed over."""
        loop = self._started()
        for rank in ranks:
            loop.order_agent(SignalProcess(loop.processes[rank].process, sig, group))

    def restart(self, ranks: Sequence[int]) -> None:
        """End the processes of these ranks, where they live, and start others; returns when those are ready.

        LaunchError where one does not come up (the rank is then without a process, and may be restarted again) or where
        the agent, which would start it, is gone. Another rank's process is not touched.
        """
        loop, timeouts = self._started(), self._settings.timeouts
        if loop.start.progress.state is not MeshState.LIVE:
            raise LaunchError(f"mesh {self._launch.name} has no agent that could start a process")
        self.signal([rank for rank in ranks if loop.processes[rank].is_live], signal.SIGKILL, group=True)
        if not loop.wait_processes(lambda: not any(loop.processes[r].is_live for r in ranks), timeouts.stop):
            left = "; ".join(f"rank {r} (pid {p.pid}, state {p.activity})" for r, p in self._live(ranks))
            raise LaunchError(f"{left} did not end within {timeouts.stop:g} s of SIGKILL")
        before = {rank: loop.processes[rank].process for rank in ranks}
        for rank in ranks:
            loop.replace(rank)

        def is_over() -> bool:
            fresh = [loop.processes[rank] for rank in ranks]
            if any(info.process == before[info.rank] for info in fresh):
                return loop.start.progress.state is not MeshState.LIVE
            return all(p.state is ProcessState.READY for p in fresh) or not all(p.is_live for p in fresh)

        try:
            # The zygote may have died, too: then torch is imported once more.
            in_time = loop.wait_processes(is_over, timeouts.zygote_ready + timeouts.worker_hello)
        except BaseException:
            self.signal(ranks, signal.SIGKILL, group=True)
            raise
        missing = [loop.processes[rank] for rank in ranks if loop.processes[rank].state is not ProcessState.READY]
        if missing:
            self.signal([info.rank for info in missing], signal.SIGKILL, group=True)
            told = "; ".join(info.obituary() for info in missing)
            raise LaunchError(f"{told if in_time else f'no hello in time: {told}'}")

    def _live(self, ranks: Sequence[int]) -> list[tuple[int, ProcessInfo]]:
        return [(rank, self.processes[rank]) for rank in ranks if self.processes[rank].is_live]

    def kill(self) -> None:
        """As a crash: SIGKILL to the agent, which all below it does not outlive. Returns at once."""
        self._started().kill_agent()

    def stop(self) -> None:
        """End every process, within ``timeouts.stop``; nothing is left, the directory is gone. Again: does nothing."""
        if self._groundwork is not None:
            self._groundwork.stop()

    def _started(self) -> SupervisorLoop:
        if self._loop is None:
            raise ClosedError(f"mesh {self._launch.name} was not started")
        return self._loop

    def _plan(self, groundwork: Groundwork, wanted: Ground) -> Plan:
        launch, ground = self._launch, groundwork.ground
        world_size = launch.hosts * launch.per_host
        facts = MeshFacts(
            launch.name, world_size, launch.device, launch.seed, list(launch.python_path), launch.cwd, launch.gpus
        )
        differing = ground.differences(wanted)
        without = sorted(differing - set(wanted.environ))
        env = {name: wanted.environ[name] for name in differing & set(wanted.environ)}
        launches: dict[int, LaunchWorker] = {}
        processes: dict[int, ProcessInfo] = {}
        for rank in range(world_size):
            host, local_rank = divmod(rank, launch.per_host)
            out, err = (self._log_path(groundwork, rank, end) for end in ("out", "err"))
            own = {
                "RANK": str(rank),
                "LOCAL_RANK": str(local_rank),
                "WORLD_SIZE": str(world_size),
                "LOCAL_WORLD_SIZE": str(launch.per_host),
            }
            launches[rank] = LaunchWorker(
                process=rank,
                rank=rank,
                local_rank=local_rank,
                env={**env, **own},  # its own win: an inherited RANK would break the mesh
                stdout_path=out,
                stderr_path=err,
                mesh=facts,
                without=without,
                host=str(host),
                local_world_size=launch.per_host,
            )
            processes[rank] = ProcessInfo(rank, rank, str(host), f"{host}.{local_rank}", out, err)
        return Plan(launch.name, launches, processes, self._listener)

    def _log_path(self, groundwork: Groundwork, rank: int, end: str) -> str:
        if self._launch.logging_location == "default":
            return ""
        return os.path.join(groundwork.logs, f"{self._launch.name}.{rank}.{end}")
