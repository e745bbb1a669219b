"""Runs on h0 of a network lab: a Context on TCP, driven by one line at a time on stdin, answering one line each.

Lines are JSON: [verb, argument ...]; the answer is JSON too.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from monarch_lab.supervisor import (
    Context,
    FunctionCall,
    HostConnected,
    HostDisconnected,
    Letter,
    ProcessExited,
    UnreadableMessage,
)
from monarch_lab.transport.keys import write_invitation
from tests.supervisor import context_kit as kit


class Controller:
    def __init__(self, listen: str) -> None:
        self.ctx = Context(listen, launcher=None)
        self.hosts: list[Any] = []
        self.processes: list[Any] = []

    def invite(self, path: str) -> None:
        write_invitation(path, self.ctx.invitation())

    def request(self, count: int) -> None:
        self.hosts += self.ctx.request_hosts(count)

    def launch(self, host: int, function: str, *args: Any) -> int:
        call = FunctionCall(f"{kit.__name__}.{function}", *args)
        self.processes.append(self.hosts[host].create_process(call))
        return len(self.processes) - 1

    def send(self, process: int, message: Any) -> None:
        self.processes[process].send(message)

    def receive(self, timeout: float) -> Any:
        try:
            return self._tell(self.ctx.recv(timeout))
        except TimeoutError:
            return None

    def states(self) -> list[str]:
        return [host.state for host in self.hosts]

    def waiting(self) -> int:
        return self.ctx.status().connections_waiting

    def shutdown(self) -> None:
        self.ctx.shutdown()

    def _tell(self, letter: Letter) -> Any:
        if letter.sender in self.hosts:
            who = f"host {self.hosts.index(letter.sender)}"
        else:
            who = f"process {self.processes.index(letter.sender)}"
        match letter.message:
            case HostConnected(hostname):
                what: Any = ["connected", hostname]
            case HostDisconnected(_, reason):
                what = ["disconnected", reason]
            case ProcessExited(result):
                what = ["exited", result if isinstance(result, int) else type(result).__name__]
            case UnreadableMessage() as wrong:
                what = ["unreadable", wrong.text]
            case int() | str() | list() as message:
                what = ["says", message]
            case other:
                what = [type(other).__name__]
        return [time.monotonic(), who, *what]


def main() -> None:
    controller = Controller(sys.argv[1])
    for line in sys.stdin:
        verb, *args = json.loads(line)
        print(json.dumps(getattr(controller, verb)(*args)), flush=True)


if __name__ == "__main__":
    main()
