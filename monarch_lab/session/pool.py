"""One spare beside the meshes: agent, guard and a zygote that has imported torch, so that a later mesh need not wait.

A mesh that takes it owns it from then on: no two meshes share a process. It is made some seconds after a mesh has come
up, never before the first, and ended when nobody took it for long, with the interpreter at the latest.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from dataclasses import replace

from monarch_lab.config import Settings
from monarch_lab.supervisor import Ground, Groundwork, MeshLaunch
from monarch_lab.supervisor.groundwork import READ_AT_IMPORT

log = logging.getLogger(__name__)


class Pool:
    """Runs on: any thread; each spare has a keeper thread of its own, which ends with it, or when it was taken."""

    def __init__(self) -> None:
        self._changed = threading.Condition()  # guards what follows
        self._spare: Groundwork | None = None
        self._turn = 0  # goes up whenever what a keeper waits to make is not wanted any more
        self._pid = os.getpid()

    @property
    def is_ready(self) -> bool:
        """A mesh that is started now, and fits, has no import to wait for."""
        spare = self._spare
        return spare is not None and spare.is_idle

    def take(self, wanted: Ground) -> Groundwork | None:
        """The spare, if a mesh with this ground can stand on it; the caller ends it. One in the making is put off."""
        if os.getpid() != self._pid:  # a forked child has the kernel's memory, and nothing of its threads
            return None
        with self._changed:
            self._next_turn()
            spare = self._spare
            if spare is None or not spare.is_free or not spare.ground.fits(wanted):
                return None
            self._spare = None
            return spare

    def want(self, launch: MeshLaunch, settings: Settings) -> None:
        """A mesh has come up: have a spare like it, after a while."""
        with self._changed:
            turn = self._next_turn()
        if settings.warm_pool:
            threading.Thread(target=self._keep, args=(turn, launch, settings), name="spare", daemon=True).start()

    def clear(self) -> None:
        """End the spare; none is made until another mesh has come up."""
        if os.getpid() != self._pid:
            return
        with self._changed:
            self._next_turn()
            spare, self._spare = self._spare, None
        if spare is not None:
            spare.stop()

    def _next_turn(self) -> int:
        self._turn += 1
        self._changed.notify_all()
        return self._turn

    def _keep(self, turn: int, launch: MeshLaunch, settings: Settings) -> None:
        """Runs on: the keeper."""
        try:
            with self._changed:
                if self._changed.wait_for(lambda: self._turn != turn, settings.warm_pool_delay):
                    return
                ground = Ground.of(replace(launch, env=_read_at_import(launch)), settings)
                old = self._spare
                if old is not None and old.is_free and old.ground.fits(ground):
                    return
                self._spare = None
            if old is not None:
                old.stop()
            spare = Groundwork(ground, "spare", in_background=True)
            with self._changed:
                is_wanted = self._turn == turn
                if is_wanted:
                    self._spare = spare
            if is_wanted:
                self._watch(spare, settings.warm_pool_idle)
            else:  # a mesh was asked for meanwhile, or the end
                spare.stop()
        except Exception:
            log.debug("a spare could not be made or ended", exc_info=True)

    def _watch(self, spare: Groundwork, idle_s: float) -> None:
        """Until it is taken; one that nobody took in time, or that has died, is ended."""
        until = time.monotonic() + idle_s
        shown = spare.loop.start.progress
        while self._spare is spare and spare.is_free:
            progress = spare.loop.start.wait_change(shown, until - time.monotonic())
            if progress == shown:
                break
            shown = progress
        with self._changed:
            if self._spare is not spare:
                return  # whoever took it ends it
            self._spare = None
        log.debug("the spare is ended: %s", shown)
        spare.stop()


def _read_at_import(launch: MeshLaunch) -> dict[str, str]:
    """Of the mesh's own variables those that a later mesh like it could not be given in a fork."""
    return {name: value for name, value in launch.env.items() if name.startswith(READ_AT_IMPORT)}


warm_pool = Pool()
atexit.register(warm_pool.clear)
