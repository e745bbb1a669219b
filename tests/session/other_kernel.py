"""Another kernel's stand-in: a mesh of workers without torch, and its record. Says what it is told till it is killed.

argv: the mesh's name, hosts, workers for each.
"""

from __future__ import annotations

import sys
import threading

from monarch_lab.session.record import Recorder
from monarch_lab.session.relay import Relay
from monarch_lab.supervisor import Supervisor
from tests.supervisor.recorder import SETTINGS, launch_of
from tests.supervisor.recorder import Recorder as Listener


class Talking(Listener):
    def on_lost(self, reason: str) -> None:
        print(f"lost: {reason}", flush=True)


def main() -> None:
    name, hosts, per_host = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    launch = launch_of(name=name, hosts=hosts, per_host=per_host, labels={"team": "blue"})
    recorder = Recorder(launch)
    relay = Relay(recorder.note)
    relay.attach(Talking())
    supervisor = Supervisor(launch, SETTINGS, relay)
    supervisor.start()
    recorder.begin(supervisor)
    supervisor.wait_ready()
    pids = " ".join(str(info.pid) for info in supervisor.processes.values())
    print(f"{supervisor.directory} {supervisor.agent_pid} {pids}", flush=True)
    for line in sys.stdin:  # "RANK what to do"
        rank, _, order = line.strip().partition(" ")
        supervisor.send([int(rank)], order.encode())
    threading.Event().wait()


if __name__ == "__main__":
    main()
