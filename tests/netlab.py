"""Hosts on one machine: each a network, pid, mount, uts and ipc namespace with an address of its own. Root only.

No default route exists in any of them, so that nothing sent inside can leave the machine. What can be broken: the
link (cut and heal, silent as a pulled cable) and the host (power off: every process at once, no FIN, no RST).
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

_NET = "198.18.0."  # RFC 2544, benchmarking: never a real neighbour
_START_S = 10.0


class Lab:
    """Hosts "h0", "h1" ...; ``down`` ends all of it, and may be called again."""

    def __init__(self, directory: Path, hosts: int) -> None:
        missing = [tool for tool in ("ip", "nsenter", "unshare") if shutil.which(tool) is None]
        if os.geteuid() != 0 or missing:
            why = f"{', '.join(missing)} of iproute2 and util-linux" if missing else "root"
            raise RuntimeError(f"the network lab needs {why}; leave it out with -m 'not netlab'")
        self._directory = directory
        self._tag = f"mlt{os.getpid() % 100_000}"
        self._init: dict[str, int] = {}  # pid 1 of each host
        self._shells: dict[str, subprocess.Popen[bytes]] = {}
        self._hosts = [f"h{number}" for number in range(hosts)]
        try:
            self._wire()
        except BaseException:
            self.down()
            raise

    def address(self, host: str) -> str:
        return _NET + str(10 + int(host[1:]))

    def enter(self, host: str) -> list[str]:
        """Command line that runs what follows on that host."""
        pid = str(self._init[host])
        return ["nsenter", "-t", pid, "--net", "--pid", "--mount", "--uts", "--ipc", "--"]

    def cut(self, host: str) -> None:
        self._link(host, "down")

    def heal(self, host: str) -> None:
        self._link(host, "up")

    def power_off(self, host: str) -> None:
        self.cut(host)  # first: a dead machine sends no FIN and no RST
        self._kill(host)

    def down(self) -> None:
        for host in list(self._init):
            self._kill(host)
        for name in [*self._hosts, "sw"]:
            subprocess.run(["ip", "netns", "del", self._namespace(name)], check=False, capture_output=True)

    def _wire(self) -> None:
        switch = self._namespace("sw")
        _run("ip", "netns", "add", switch)
        _run("ip", "-n", switch, "link", "add", "name", "lan0", "type", "bridge")
        _run("ip", "-n", switch, "link", "set", "lan0", "up")
        for host in self._hosts:
            own = self._namespace(host)
            _run("ip", "netns", "add", own)
            _run("ip", "-n", own, "link", "set", "lo", "up")
            _run("ip", "-n", switch, "link", "add", "name", host, "type", "veth", "peer", "name", "eth0", "netns", own)
            _run("ip", "-n", switch, "link", "set", host, "master", "lan0", "up")
            _run("ip", "-n", own, "addr", "add", f"{self.address(host)}/24", "dev", "eth0")
            _run("ip", "-n", own, "link", "set", "eth0", "up")
            self._boot(host)

    def _boot(self, host: str) -> None:
        """Pid 1 of the host: a shell that sets the name and sleeps. Its /tmp is its own, as on another machine."""
        ready = self._directory / f"{host}.ready"
        temporary = self._directory / f"tmp.{host}"
        temporary.mkdir()
        init = f"hostname {host} && mount -t tmpfs tmpfs {temporary} && echo > {ready} && exec sleep infinity"
        namespaces = ["--pid", "--fork", "--kill-child=KILL", "--mount", "--mount-proc", "--uts", "--ipc"]
        shell = subprocess.Popen(
            ["ip", "netns", "exec", self._namespace(host), "unshare", *namespaces, "sh", "-c", init],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._shells[host] = shell
        deadline = time.monotonic() + _START_S
        while not ready.exists():
            if time.monotonic() > deadline:
                raise RuntimeError(f"host {host} of the network lab did not start")
            time.sleep(0.01)
        children = Path(f"/proc/{shell.pid}/task/{shell.pid}/children").read_text().split()
        self._init[host] = int(children[0])

    def _kill(self, host: str) -> None:
        pid = self._init.pop(host, None)
        if pid is not None:
            os.kill(pid, signal.SIGKILL)
            self._shells.pop(host).wait()

    def _link(self, host: str, state: str) -> None:
        _run("ip", "-n", self._namespace("sw"), "link", "set", host, state)

    def _namespace(self, name: str) -> str:
        return f"{self._tag}-{name}"


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
