"""How a supervisor is doing, in numbers: made by its loop now and then, and when asked."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Status:
    """Counts since the start, but for the last seven, which are of the time since the last status. Times in seconds."""

    launches: int = 0
    starts: int = 0
    exits: int = 0
    sends: int = 0
    responses: int = 0  # letters of processes
    process_deletions: int = 0
    hosts_waiting: int = 0  # for an agent
    connections_waiting: int = 0  # agents for a host
    states: dict[str, int] = field(default_factory=dict)  # hosts by state
    unread_letters: int = 0
    heartbeats: int = 0  # messages heard of agents, beats among them
    heartbeat_ttl_average: float = 0.0  # how long until a silent host would be lost
    heartbeat_ttl_minimum: float = 0.0
    percent_polling: float = 0.0
    percent_active: float = 0.0
    loop_time_mean: float = 0.0
    loop_time_max: float = 0.0

    def __str__(self) -> str:
        states = ", ".join(f"{count} {state.lower()}" for state, count in sorted(self.states.items())) or "none"
        return (
            f"hosts: {states}; {self.hosts_waiting} hosts wait for an agent,"
            f" {self.connections_waiting} agents for a host;"
            f" processes: {self.launches} launched, {self.starts} started, {self.exits} ended;"
            f" letters: {self.sends} sent, {self.responses} received, {self.unread_letters} unread;"
            f" heartbeats: {self.heartbeats}, time to live {self.heartbeat_ttl_average:.1f} s on average,"
            f" {self.heartbeat_ttl_minimum:.1f} s at least; loop: {self.percent_active:.0f} % active,"
            f" {1000 * self.loop_time_mean:.1f} ms on average, {1000 * self.loop_time_max:.1f} ms at most"
        )


class LoopClock:
    """How a loop spends its time: ``poll_ended`` and ``round_ended`` are called in turn."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.reset()

    def reset(self) -> None:
        self._mark = self._clock()
        self._polling = self._active = self._longest = 0.0
        self._rounds = 0

    def poll_ended(self) -> float:
        now = self._clock()
        self._polling += now - self._mark
        self._mark = now
        return now

    def round_ended(self) -> None:
        now = self._clock()
        took = now - self._mark
        self._active += took
        self._longest = max(self._longest, took)
        self._rounds += 1
        self._mark = now

    def figures(self) -> dict[str, float]:
        whole = self._polling + self._active
        return {
            "percent_polling": 100 * self._polling / whole if whole else 0.0,
            "percent_active": 100 * self._active / whole if whole else 0.0,
            "loop_time_mean": self._active / self._rounds if self._rounds else 0.0,
            "loop_time_max": self._longest,
        }


def time_to_live(silences: Sequence[float], lost: float) -> dict[str, float]:
    left = [max(0.0, lost - silence) for silence in silences]
    if not left:
        return {}
    return {"heartbeat_ttl_average": sum(left) / len(left), "heartbeat_ttl_minimum": min(left)}
