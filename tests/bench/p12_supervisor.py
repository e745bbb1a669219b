"""P12: a supervisor of 1,000 hosts x 8 processes, 16 of the hosts with real agents and processes.

The others are simulated: real links and the agent's real rules, children that are only played. CPU is this process's.
"""

from __future__ import annotations

from collections.abc import Iterator

from tests.bench._report import Line, main, median
from tests.supervisor.fleet import Figures, run

PER_HOST = 8


def work_per_process(figures: Figures, hosts: int) -> float:
    return 1e6 * figures.work_cpu_s / (hosts * PER_HOST)


def measure(quick: bool) -> Iterator[Line]:
    sizes, real, idle_s, broadcasts = ((50, 100), 2, 2, 3) if quick else ((250, 500, 1000), 16, 10, 9)
    found = {hosts: run(hosts, real, PER_HOST, idle_s=idle_s, broadcasts=broadcasts) for hosts in sizes}
    least, most = sizes[0], sizes[-1]
    whole = found[most]
    assert whole.broadcast_s is not None
    details = {
        "hosts": most,
        "real_agents": real,
        "processes": most * PER_HOST,
        "start_s": whole.start_s,
        "exit_s": whole.exit_s,
        "broadcast_worst_s": max(whole.broadcast_s),
        "lost": whole.lost,
    }
    cpu = 100 * whole.idle_cpu
    yield Line("P12", f"heartbeats of {most} hosts", cpu, "% of a core", goal=20, absolute=True, details=details)
    yield Line(
        "P12", "1 KB to every process, until the last has it", median(whole.broadcast_s), "s", goal=0.5, absolute=True
    )
    yield Line(
        "P12",
        f"CPU of start, broadcasts and exit, a process of {most} hosts",
        work_per_process(whole, most),
        "us",
        goal=1.3,
        reference=work_per_process(found[least], least),
        reference_is=f"of {least} hosts",
        details={str(hosts): work_per_process(figures, hosts) for hosts, figures in found.items()},
    )


if __name__ == "__main__":
    main("p12_supervisor", measure)
