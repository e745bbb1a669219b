"""One mesh of this kernel: its processes and its op stream, joined. Imports torch."""

from __future__ import annotations

import itertools
import os
import platform
import time
from collections.abc import Callable, Sequence
from typing import Any

import monarch_lab.controller.tensor  # noqa: F401  the class of every tensor that is made
from monarch_lab.config import Settings
from monarch_lab.controller import losing, patches, rejoining
from monarch_lab.controller.client import Client
from monarch_lab.controller.mesh import DeviceMesh
from monarch_lab.controller.random import kernel_seed
from monarch_lab.session.info import MeshInfo
from monarch_lab.session.pool import warm_pool
from monarch_lab.session.record import Recorder
from monarch_lab.session.registry import sessions
from monarch_lab.session.relay import Relay
from monarch_lab.supervisor import Ground, MeshLaunch, ProcessInfo, Supervisor
from monarch_lab.wire import engine as wire
from monarch_lab.wire.codec import encode
from monarch_lab.wire.shape import Slice
from monarch_lab.wire.snapshot import DebuggerSnapshot, MeshSnapshot, ProcessSnapshot

Progress = Callable[[str, int, int], None]
_NAMES = ("host", "gpu")


class Session:
    """Owns a started supervisor and the client of a mesh. ``state``: starting, live, dead, closed."""

    def __init__(
        self, launch: MeshLaunch, settings: Settings, supervisor: Supervisor, relay: Relay, recorder: Recorder
    ) -> None:
        self.launch = launch
        self.device = launch.device
        self.parts: dict[Any, DeviceMesh] = {}
        self.client = Client(launch.name, launch.hosts * launch.per_host, settings)
        self.supervisor = supervisor
        self._settings = settings
        self._relay = relay
        self._recorder = recorder
        self.started = time.monotonic()
        self._numbers = itertools.count(1)
        self.client.ladder.respawn = self.respawn
        self._pid = os.getpid()
        whole = Slice.dense(launch.hosts, launch.per_host)
        self.mesh = DeviceMesh(self.client, whole, _NAMES, self)
        self.parts[whole, _NAMES] = self.mesh

    def start(self, on_progress: Progress | None) -> None:
        """Wait for every worker. LaunchError, or KeyboardInterrupt, leaves nothing behind."""
        sessions[self.launch.name] = self
        try:
            patches.install()
            self.client.attach(self.supervisor)
            self._relay.attach(self.client)
            self.supervisor.wait_ready(on_progress=on_progress)
            self.client.go_live()
            # Here and not in the launch: that was before torch was imported, which knows the kernel's seed.
            self.client.order(wire.Seed(kernel_seed()), None)
        except BaseException:
            self.stop()
            raise

    def restart(self, ranks: tuple[int, ...]) -> tuple[int, ...]:
        """Give these ranks other processes (see DeviceMesh.restart). What cannot be restarted is left as it was."""
        client = self.client
        # Held all the while: what another thread sent would reach a process that does not know the words yet.
        with client.lock:
            rejoining.check_can_restart(client)
            if client.is_lost:
                ranks = self.mesh.ranks_key
            else:
                client.flush()
            client.ending = frozenset(ranks)
            try:
                if client.is_lost:
                    self._start_anew()
                else:
                    self.supervisor.restart(ranks)
            finally:
                client.ending = frozenset()
            rejoining.rejoin(self.mesh, ranks)
        return ranks

    def respawn(self, ranks: Sequence[int]) -> str:
        """Restart ranks that are stuck; what is lost with their processes, in words."""
        lost = losing.told(self.client, ranks)
        self.restart(tuple(ranks))
        return lost

    def _start_anew(self) -> None:
        """The agent is gone: another one, with other processes for every rank."""
        self.supervisor.stop()
        spare = warm_pool.take(Ground.of(self.launch, self._settings))
        supervisor = Supervisor(self.launch, self._settings, self._relay, spare)
        supervisor.start()
        try:
            self._recorder.begin(supervisor)
            supervisor.wait_ready()
        except BaseException:
            supervisor.stop()
            raise
        self.supervisor = supervisor
        self.client.attach(supervisor)

    def next_number(self) -> int:
        return next(self._numbers)

    @property
    def state(self) -> str:
        if self.client.state == "live" and len(self.client.alive) < self.client.world:
            return "dead"
        return self.client.state

    def stop(self) -> None:
        """End every process; nothing is left running. Safe to call twice, and in a forked child."""
        if os.getpid() != self._pid:
            return
        if self.client.state == "live" and self.client.alive:
            try:
                with self.client.lock:
                    self.client.flush()
                    self.client.ending = frozenset(self.mesh.ranks_key)
                    self.supervisor.send(None, encode(wire.Exit()))
            except Exception:  # its processes are ended below, whatever they heard
                pass
        self.client.close()
        if sessions.get(self.launch.name) is self:
            del sessions[self.launch.name]
        self.supervisor.stop()

    def info(self, ranks: tuple[int, ...]) -> MeshInfo:
        processes = [self.supervisor.processes[rank] for rank in ranks]
        hostname = platform.node()
        devices = [
            {
                "rank": str(info.rank),
                "host": info.host,
                "gpu": info.label.partition(".")[2],
                "device": self.device,
                "hostname": hostname,
                "pid": str(info.pid),
            }
            for info in processes
        ]
        return MeshInfo(dict(self.launch.labels), devices)

    def snapshot(self) -> MeshSnapshot:
        client = self.client
        processes = [self._process(info) for _, info in sorted(self.supervisor.processes.items())]
        return MeshSnapshot(
            name=self.launch.name,
            state=self.state,  # type: ignore[arg-type]
            dims=list(self.mesh.sizes.items()),
            device=self.device,
            processes=processes,
            age_s=round(time.monotonic() - self.started, 1),
            ops=client.ops,
            note=client.note,
            debuggers=[_debugger(s) for s in client.prompts.sessions],
        )

    def _process(self, info: ProcessInfo) -> ProcessSnapshot:
        op, age, pending = self.client.progress.oldest(info.rank)
        if not info.is_live or self.client.is_gone(info.rank):
            state, op, age, pending = "exited", "", 0.0, 0
        elif self.client.state == "starting":
            state = "starting"
        elif self.client.is_debugging(info.rank):
            state = "debugging"
        else:
            state = "busy" if pending else "idle"
        return ProcessSnapshot(
            rank=info.rank,
            label=info.label,
            host=info.host,
            pid=info.pid,
            state=state,  # type: ignore[arg-type]
            rss_bytes=info.rss_bytes,
            device_bytes=self.client.progress.device_bytes.get(info.rank, 0),
            cpu_s=info.cpu_s,
            pending_ops=pending,
            op=op,
            op_age_s=round(age, 1),
            exit=info.ending(),
        )


def _debugger(session: Any) -> DebuggerSnapshot:
    place = session.place
    return DebuggerSnapshot(
        name=session.name,
        rank=session.rank,
        label=session.label,
        state=session.state.name.lower(),
        file=place.file,
        line=place.line,
        function=place.function,
        source=place.source,
        why=session.why,
        prompt=session.read.prompt if session.read is not None else "",
    )
