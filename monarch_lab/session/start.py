"""A mesh under way: its processes are asked for at once, its client is joined when they are wanted."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from monarch_lab import config
from monarch_lab.errors import UsageValueError
from monarch_lab.session.options import Options, check_name
from monarch_lab.session.pool import warm_pool
from monarch_lab.session.record import Recorder
from monarch_lab.session.registry import free_name, sessions, starting
from monarch_lab.session.relay import Relay
from monarch_lab.supervisor import Ground, Supervisor

if TYPE_CHECKING:
    from monarch_lab.controller.mesh import DeviceMesh
    from monarch_lab.session.session import Progress


class Start:
    """Several may be under way at once. Whoever makes one calls ``finish`` or ``abort``."""

    def __init__(self, options: Options, name: str | None, on_change: Callable[[], None] = lambda: None) -> None:
        """Ask for the processes; returns before they are there. ``on_change``: called when one of them changes, on the
        supervisor's thread. UsageError before anything starts, LaunchError where the agent cannot be started.
        """
        self._settings = options.applied(config.load())
        if name is not None:
            check_name(name)
            if name in sessions or name in starting:
                raise UsageValueError(f'mesh "{name}" is running already: stop it first, or choose another name')
        self.launch = options.launch(name or free_name(), self._settings)
        self._recorder = Recorder(self.launch, on_change)
        self._relay = Relay(self._recorder.note)
        spare = warm_pool.take(Ground.of(self.launch, self._settings))
        self.supervisor = Supervisor(self.launch, self._settings, self._relay, spare)
        starting[self.launch.name] = self.supervisor
        try:
            self.supervisor.start()
            self._recorder.begin(self.supervisor)
        except BaseException:
            self.abort()
            raise

    def finish(self, on_progress: Progress | None) -> DeviceMesh:
        """Wait for every worker. LaunchError, or KeyboardInterrupt, leaves nothing behind."""
        try:
            # The workers' torch is imported meanwhile: importing ours first would double the time of a first mesh.
            from monarch_lab.session.session import Session

            session = Session(self.launch, self._settings, self.supervisor, self._relay, self._recorder)
            session.start(on_progress)
        except BaseException:
            self.abort()
            raise
        starting.pop(self.launch.name, None)
        warm_pool.want(self.launch, self._settings)
        return session.mesh

    def abort(self) -> None:
        """End what was started. Does nothing after ``finish`` has returned."""
        if starting.pop(self.launch.name, None) is not None:
            self.supervisor.stop()
