"""A notebook kernel's stand-in: starts a mesh whose workers have families, tells who is who, and waits to be killed."""

from __future__ import annotations

import json
import signal
import threading

from monarch_lab.supervisor import Supervisor
from tests.supervisor.recorder import SETTINGS, Recorder, agent_pid_of, launch_of, mark_of


def main() -> None:
    recorder = Recorder()
    supervisor = Supervisor(launch_of(), SETTINGS, recorder)
    supervisor.start()
    supervisor.wait_ready()
    supervisor.send(None, b"family")
    families = [recorder.wait_report(rank)[0].split() for rank in (0, 1)]
    facts = {
        "directory": supervisor.directory,
        "mark": mark_of(supervisor),
        "agent": agent_pid_of(supervisor),
        "workers": [info.pid for info in supervisor.processes.values()],
        "family": [int(pid) for family in families for pid in family],
    }
    over = threading.Event()
    signal.signal(signal.SIGUSR1, lambda *_: over.set())
    print(json.dumps(facts), flush=True)
    over.wait()


if __name__ == "__main__":
    main()
