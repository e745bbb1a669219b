"""P12 in small: many hosts, most of them simulated, a few real. tests/bench/p12_supervisor.py has the figures."""

from __future__ import annotations

import pytest

from monarch_lab.transport import platform
from tests.supervisor.fleet import run

pytestmark = pytest.mark.skipif(not platform.LINUX, reason="pidfd, subreaper and /proc")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hosts", "real"), [(100, 4), pytest.param(1000, 16, marks=[pytest.mark.soak, pytest.mark.timeout(600)])]
)
def test_many_hosts_start_beat_hear_a_broadcast_and_end(hosts: int, real: int) -> None:
    figures = run(hosts, real, per_host=8, idle_s=2, broadcasts=2)
    assert figures.lost == 0
    assert figures.broadcast_s is not None and len(figures.broadcast_s) == 2
