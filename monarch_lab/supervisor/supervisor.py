"""What the rest of the kernel holds of a mesh's processes."""

from __future__ import annotations

import os
import secrets
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from types import TracebackType

import msgspec

from monarch_lab.config import Settings
from monarch_lab.errors import ClosedError, InternalError, LaunchError
from monarch_lab.supervisor.agent_process import AgentProcess, launch_agent
from monarch_lab.supervisor.launch import Listener, MeshLaunch
from monarch_lab.supervisor.lifecycle import ProcessInfo, ProcessState
from monarch_lab.supervisor.loop import SupervisorLoop
from monarch_lab.supervisor.progress import MeshState, OnProgress, Progress
from monarch_lab.transport import platform
from monarch_lab.transport.directory import address, hold_directory, make_directory, remove_directory, sweep_directories
from monarch_lab.transport.frames import share
from monarch_lab.wire.engine import ALL, CONTROL_ALL, control_topic, topic
from monarch_lab.wire.supervision import AgentSpec, LaunchWorker, SignalProcess

_KEY_BYTES = 32


class Supervisor:
    """Starts, watches, reaches and ends the processes of one mesh.

    ``send``, ``send_control``, ``signal`` and ``processes`` are for any thread but never block; ``start``,
    ``wait_ready`` and ``stop`` belong to the mesh's owner.
    """

    def __init__(self, launch: MeshLaunch, settings: Settings, listener: Listener) -> None:
        self._launch = launch
        self._settings = settings
        self._listener = listener
        self._loop: SupervisorLoop | None = None
        self._stop_lock = threading.Lock()  # guards the end: two threads may ask for it
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

    def start(self) -> None:
        """Bind, start agent and thread; returns before any of them has answered. LaunchError if it cannot."""
        if self._loop is not None:
            raise InternalError("a supervisor starts once")
        self.directory = make_directory()
        self._hold = hold_directory(self.directory)
        sweep_directories(os.path.dirname(self.directory))
        try:
            logs = self._settings.log_dir or os.path.join(self.directory, "logs")
            rendezvous = os.path.join(self.directory, "rendezvous")
            os.makedirs(logs, mode=0o700, exist_ok=True)
            os.mkdir(rendezvous, mode=0o700)
            spec = self._agent_spec(rendezvous)
            launches, processes = self._plan(os.path.abspath(logs))
            loop = SupervisorLoop(spec, launches, processes, self._settings, self._listener)
        except OSError as e:
            self._let_go()
            raise LaunchError(f"mesh {self._launch.name} cannot start: {e}") from e
        self._loop = loop
        try:
            loop.open(lambda: _start_agent(spec))
        except BaseException as e:
            loop.close()
            self._let_go()
            if isinstance(e, OSError):
                raise LaunchError(f"mesh {self._launch.name} cannot start its agent: {e}") from e
            raise

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

    def stop(self) -> None:
        """End every process, within ``timeouts.stop``; nothing is left, the directory is gone. Again: does nothing."""
        loop = self._loop
        if loop is None:
            return
        loop.ask_to_stop()
        with self._stop_lock:
            if loop.start.progress.state is MeshState.CLOSED:
                return
            # The thread keeps to the bound itself; one more grace is for a machine that stands still.
            if loop.join(self._settings.timeouts.stop + self._settings.timeouts.stop_grace):
                loop.close()
                self._let_go()

    def _let_go(self) -> None:
        remove_directory(self.directory)
        os.close(self._hold)

    def _started(self) -> SupervisorLoop:
        if self._loop is None:
            raise ClosedError(f"mesh {self._launch.name} was not started")
        return self._loop

    def _agent_spec(self, rendezvous: str) -> AgentSpec:
        launch, timeouts = self._launch, self._settings.timeouts
        return AgentSpec(
            key=secrets.token_bytes(_KEY_BYTES),
            mark=secrets.token_hex(),
            mesh=launch.name,
            kernel_pid=os.getpid(),
            kernel_fd=-1,
            lifeline_fd=-1,
            directory=self.directory,
            orders=address(self.directory, "orders"),
            reports=address(self.directory, "reports"),
            rendezvous=rendezvous,
            world_size=launch.hosts * launch.per_host,
            device=launch.device,
            seed=launch.seed,
            environ={**os.environ, **launch.env},
            python_path=list(launch.python_path),
            cwd=launch.cwd,
            preload=list(launch.preload),
            worker_module=launch.worker_module,
            beat_s=timeouts.beat,
            stop_grace_s=timeouts.stop_grace,
            worker_hello_s=timeouts.worker_hello,
            linger_s=timeouts.interrupt_heard,
        )

    def _plan(self, logs: str) -> tuple[dict[int, LaunchWorker], dict[int, ProcessInfo]]:
        launch = self._launch
        launches: dict[int, LaunchWorker] = {}
        processes: dict[int, ProcessInfo] = {}
        world_size = launch.hosts * launch.per_host
        for rank in range(world_size):
            host, local_rank = divmod(rank, launch.per_host)
            out, err = (os.path.join(logs, f"{launch.name}.{rank}.{end}") for end in ("out", "err"))
            env = {
                "RANK": str(rank),
                "LOCAL_RANK": str(local_rank),
                "WORLD_SIZE": str(world_size),
                "LOCAL_WORLD_SIZE": str(launch.per_host),
            }
            launches[rank] = LaunchWorker(rank, rank, local_rank, env, out, err, str(host), launch.per_host)
            processes[rank] = ProcessInfo(rank, rank, str(host), f"{host}.{local_rank}", out, err)
        return launches, processes


def _start_agent(spec: AgentSpec) -> tuple[AgentProcess, int]:
    """The agent, and the end of the lifeline whose end of file says that agent and guard are gone."""
    kernel_fd = platform.open_pidfd(os.getpid())
    read_end, write_end = os.pipe()
    try:
        fd = -1 if kernel_fd is None else kernel_fd
        spec = msgspec.structs.replace(spec, kernel_fd=fd, lifeline_fd=write_end)
        return launch_agent(spec, dict(os.environ), kernel_fd, write_end), read_end
    except BaseException:
        os.close(read_end)
        raise
    finally:
        os.close(write_end)
        if kernel_fd is not None:
            os.close(kernel_fd)
