"""The processes of a mesh: which one has each rank, what is known of it, and whoever waits for that to change.

Runs on: the supervisor's I/O thread alone writes; any thread reads ``by_rank``, a snapshot, or waits.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace

from msgspec import structs

from monarch_lab.errors import ProtocolError
from monarch_lab.supervisor.lifecycle import AgentLost, Event, ProcessInfo, ProcessState
from monarch_lab.wire.supervision import LaunchWorker, ProcessUsage

log = logging.getLogger(__name__)


class ProcessTable:
    def __init__(self) -> None:
        self.by_rank: dict[int, ProcessInfo] = {}  # replaced as a whole
        self._launches: dict[int, LaunchWorker] = {}
        self._rank_of: dict[int, int] = {}
        self._changed = threading.Condition()

    # --- any thread

    def wait(self, done: Callable[[], bool], timeout: float) -> bool:
        """Until ``done()``, which is asked whenever a process has changed; what it said last."""
        with self._changed:
            return self._changed.wait_for(done, max(0.0, timeout))

    # --- the I/O thread

    def fill(self, launches: Mapping[int, LaunchWorker], processes: Mapping[int, ProcessInfo]) -> None:
        self._launches = dict(launches)
        self._rank_of = {launch.process: rank for rank, launch in launches.items()}
        self._set(dict(processes))

    def succeed(self, rank: int) -> LaunchWorker:
        """The order for another process under a rank whose own has ended."""
        process = max(self._rank_of) + 1
        launch = self._launches[rank] = structs.replace(self._launches[rank], process=process)
        self._rank_of[process] = rank
        self._set({**self.by_rank, rank: self.by_rank[rank].successor(process)})
        return launch

    def rank(self, process: int) -> int:
        try:
            return self._rank_of[process]
        except KeyError:
            raise ProtocolError(f"there is no process {process}") from None

    def apply(self, rank: int, event: Event) -> ProcessInfo | None:
        """The new snapshot; None, with a line in the log, for what does not belong here."""
        try:
            info = self.by_rank[rank].after(event)
        except ProtocolError as e:
            log.warning("rank %d: %s", rank, e)
            return None
        self._set({**self.by_rank, rank: info})
        return info

    def note_usage(self, usage: list[ProcessUsage]) -> None:
        fresh = dict(self.by_rank)
        for used in usage:
            rank = self.rank(used.process)
            if fresh[rank].process == used.process:  # not of one that has a successor
                fresh[rank] = replace(fresh[rank], rss_bytes=used.rss_bytes, cpu_s=used.cpu_s, activity=used.state)
        self.by_rank = fresh

    def lose_all(self) -> None:
        """With their agent."""
        self._set({rank: info.after(AgentLost()) for rank, info in self.by_rank.items()})

    def count_ready(self) -> int:
        return sum(info.state is ProcessState.READY for info in self.by_rank.values())

    def _set(self, processes: dict[int, ProcessInfo]) -> None:
        with self._changed:
            self.by_rank = processes
            self._changed.notify_all()
