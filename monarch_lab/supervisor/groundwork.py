"""What a mesh stands on before it has a name: directory, key, sockets, agent, zygote, and the thread that hears them.

All that is fixed when the agent starts is in ``Ground``; the rest travels with each worker's order, so that one made
beforehand (a spare) serves whatever mesh comes, if its ground fits.
"""

from __future__ import annotations

import logging
import os
import secrets
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
import zmq

from monarch_lab.config import Settings
from monarch_lab.errors import LaunchError, UsageValueError
from monarch_lab.supervisor.agent_process import AgentProcess, launch_agent
from monarch_lab.supervisor.launch import MeshLaunch
from monarch_lab.supervisor.loop import SupervisorLoop
from monarch_lab.supervisor.progress import MeshState, Stage
from monarch_lab.transport import platform
from monarch_lab.transport.directory import address, hold_directory, make_directory, remove_directory, sweep_directories
from monarch_lab.transport.marks import make_mark, sweep_orphans
from monarch_lab.wire.supervision import AgentSpec

log = logging.getLogger(__name__)
_KEY_BYTES = 32
SOCKET_TYPES = ("unix", "tcp")
# What interpreter, C library, torch and what it links read when they are loaded: too late for a fork.
READ_AT_IMPORT = (
    "LD_", "DYLD_", "GLIBC_", "MALLOC_", "LC_", "LANG", "TZ", "PYTHON", "VIRTUAL_ENV", "CONDA_",
    "TORCH", "PYTORCH_", "ATEN_", "OMP_", "GOMP_", "KMP_", "MKL_", "DNNL_", "ONEDNN_", "OPENBLAS_", "BLIS_", "VECLIB_",
    "NUMEXPR_", "NPY_", "NUMPY_", "CUDA_", "CUBLAS_", "CUDNN_", "NVIDIA_", "HIP_", "HSA_", "ROCR_",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Ground:
    """What cannot be changed once the agent runs."""

    settings: Settings
    environ: Mapping[str, str]  # of the zygote, whole
    python_path: Sequence[str]
    preload: Sequence[str]
    worker_module: str
    python: str
    socket_type: str
    logging_location: str

    @classmethod
    def of(cls, launch: MeshLaunch, settings: Settings) -> Ground:
        environ = {**os.environ, **launch.env}
        if launch.socket_type not in SOCKET_TYPES:
            raise UsageValueError(f'socket_type is "unix" or "tcp", not {launch.socket_type!r}')
        return cls(
            settings,
            environ,
            launch.python_path,
            tuple(launch.preload),
            launch.worker_module,
            sys.executable,
            launch.socket_type,
            launch.logging_location,
        )

    def fits(self, wanted: Ground) -> bool:
        """Whether a mesh that wants ``wanted`` may stand here: what differs can still be changed in a fork."""
        return self._fixed() == wanted._fixed() and not any(
            name.startswith(READ_AT_IMPORT) for name in self.differences(wanted)
        )

    def _fixed(self) -> tuple[object, ...]:
        settings = self.settings
        imported = (tuple(self.preload), self.worker_module, self.python)
        return settings.timeouts, settings.log_dir, settings.faults, imported, self.socket_type, self.logging_location

    def differences(self, wanted: Ground) -> set[str]:
        """Names of the variables that differ, or are on one side only."""
        return {name for name, _ in self.environ.items() ^ wanted.environ.items()}


class Groundwork:
    """Ended by ``stop``, whoever stands on it; ``loop`` is its thread."""

    def __init__(self, ground: Ground, what: str, in_background: bool = False) -> None:
        """Bind, start agent and thread; returns before the agent has answered. LaunchError if it cannot.

        ``in_background``: nobody waits for it, so that its imports give way to all else.
        """
        self.ground = ground
        self._stop_lock = threading.Lock()  # guards the end: two threads may ask for it
        self.directory, self._hold = "", -1
        try:
            self.directory = make_directory()
            self._hold = hold_directory(self.directory)
            sweep_directories(os.path.dirname(self.directory))
            sweep_orphans()
            rendezvous = os.path.join(self.directory, "rendezvous")
            os.mkdir(rendezvous, mode=0o700)
            self.logs = self._make_logs(ground.settings.log_dir)
            spec = self._agent_spec(rendezvous, in_background)
            self.loop = SupervisorLoop(spec, ground.settings, what)
        except OSError as e:
            self._let_go()
            raise LaunchError(f"mesh {what} cannot start: {e}") from e
        try:
            self.loop.open(lambda spec: _start_agent(spec, ground.logging_location == "default"))
        except BaseException as e:
            self.loop.close()
            self._let_go()
            if isinstance(e, OSError | zmq.ZMQError):
                raise LaunchError(f"mesh {what} cannot start its agent: {e}") from e
            raise

    @property
    def is_free(self) -> bool:
        """No mesh stands on it, and it has not failed; its zygote may still import."""
        progress = self.loop.start.progress
        return progress.state is MeshState.STARTING and progress.stage is not Stage.WORKERS

    @property
    def is_idle(self) -> bool:
        """It is free, and has nothing left to import."""
        return self.is_free and self.loop.start.progress.stage is Stage.IDLE

    def stop(self) -> None:
        """End every process, within ``timeouts.stop``; nothing is left, the directory is gone. Again: does nothing."""
        timeouts = self.ground.settings.timeouts
        self.loop.ask_to_stop()
        with self._stop_lock:
            if self.loop.start.progress.state is MeshState.CLOSED:
                return
            # The thread keeps to the bound itself; one more grace is for a machine that stands still.
            if self.loop.join(timeouts.stop + timeouts.stop_grace):
                self.loop.close()
                self._let_go()

    def _make_logs(self, wanted: str) -> str:
        """Where output files go. A mesh does not fail for a place that cannot be written to: then it is its own."""
        own = os.path.join(self.directory, "logs")
        os.mkdir(own, mode=0o700)
        if wanted:
            try:
                os.makedirs(wanted, mode=0o700, exist_ok=True)
                with tempfile.TemporaryFile(dir=wanted):
                    return os.path.abspath(wanted)
            except OSError as e:
                log.warning("the log directory %s cannot be written to (%s): logs go to %s", wanted, e.strerror, own)
        return own

    def _let_go(self) -> None:
        if self.directory:
            remove_directory(self.directory)
        if self._hold >= 0:
            os.close(self._hold)

    def _where(self, name: str) -> str:
        # The system chooses the port, and the loop reports it back.
        return address(self.directory, name) if self.ground.socket_type == "unix" else "tcp://127.0.0.1:*"

    def _agent_spec(self, rendezvous: str, in_background: bool) -> AgentSpec:
        ground, timeouts = self.ground, self.ground.settings.timeouts
        return AgentSpec(
            key=secrets.token_bytes(_KEY_BYTES),
            mark=make_mark(),
            kernel_pid=os.getpid(),
            kernel_fd=-1,
            lifeline_fd=-1,
            output_fds=(-1, -1),
            directory=self.directory,
            orders=self._where("orders"),
            reports=self._where("reports"),
            rendezvous=rendezvous,
            faults=ground.settings.faults,
            environ=dict(ground.environ),
            python_path=list(ground.python_path),
            preload=list(ground.preload),
            worker_module=ground.worker_module,
            in_background=in_background,
            beat_s=timeouts.beat,
            stop_grace_s=timeouts.stop_grace,
            worker_hello_s=timeouts.worker_hello,
            linger_s=timeouts.interrupt_heard,
        )


def _start_agent(spec: AgentSpec, with_own_output: bool) -> tuple[AgentProcess, int]:
    """The agent, and the end of the lifeline whose end of file says that agent and guard are gone.

    ``with_own_output``: the workers are to write where this process does.
    """
    read_end, write_end = os.pipe()
    given = [write_end]  # closed here once the agent has them
    try:
        kernel_fd = platform.open_pidfd(os.getpid())
        given += [] if kernel_fd is None else [kernel_fd]
        output_fds = (-1, -1)
        if with_own_output:
            output_fds = (_copy_of(1), _copy_of(2))
            given += output_fds
        spec = msgspec.structs.replace(
            spec, kernel_fd=-1 if kernel_fd is None else kernel_fd, lifeline_fd=write_end, output_fds=output_fds
        )
        return launch_agent(spec, dict(os.environ), given), read_end
    except BaseException:
        os.close(read_end)
        raise
    finally:
        for fd in given:
            os.close(fd)


def _copy_of(fd: int) -> int:
    try:
        return os.dup(fd)
    except OSError:  # this process was started without it
        return os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
