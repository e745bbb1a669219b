"""A real kernel as a front end sees it, with ours or another system in it: what P6, P9 and P11 time.

The other systems live in ``.venv-peers/others`` (``make bench-peers``); without it ``peers()`` gives none.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.bench._peers import ROOT, python_of
from tests.kernel import Kernel

LIMIT_S = 120


@dataclass(frozen=True)
class Peer:
    """Another system that runs a cell on each of its processes: the cell that makes ``workers`` of them, the magic, and
    the cell that ends them."""

    name: str
    start: str
    magic: str
    stop: str


PEERS = (
    Peer(
        "ipyparallel",
        "import ipyparallel as ipp\n"
        "cluster = ipp.Cluster(n={workers})\n"
        "client = cluster.start_and_connect_sync()\n"
        "client[:].activate()",
        "%%px --block",
        "cluster.stop_cluster_sync()",
    ),
    # dist_init comes back before its workers can be reached: the first cells are asked again until all answer. Its own
    # shutdown is not called, for it ends whatever on the machine has a name like its workers' (peer_nbdistributed.py).
    Peer(
        "nbdistributed",
        "%load_ext nbdistributed\n"
        "%dist_init -n {workers}\n"
        "_m = get_ipython().magics_manager.registry['DistributedMagic']\n"
        "for _ in range(60):\n"
        "    try:\n"
        "        _m._comm_manager.send_to_all('get_status', {{}}, timeout=1)\n"
        "        break\n"
        "    except TimeoutError:\n"
        "        pass",
        "%%distributed",
        "for _p in _m._process_manager.processes: _p.kill()",
    ),
)


@contextmanager
def ours(workers: int = 2) -> Iterator[Kernel]:
    """A kernel with a mesh of ``workers`` CPU workers."""
    with Kernel(cwd=str(ROOT)) as kernel:
        start = f"import torch\n%load_ext monarch_lab\n%mesh start --cpu --per-host {workers}"
        assert kernel.run(start) == "ok", kernel.errors()
        yield kernel
        assert kernel.run("%mesh stop") == "ok", kernel.errors()


@contextmanager
def theirs(peer: Peer, workers: int = 2) -> Iterator[Kernel]:
    """A kernel of the peers' environment with ``peer`` started in it."""
    python = python_of("others")
    with tempfile.TemporaryDirectory() as scratch:
        # nbdistributed starts its workers as `python`, and would end others' processes with `pkill` when it exits.
        bin = Path(scratch)
        (bin / "python").write_text(f'#!/bin/sh\nexec "{python}" "$@"\n')
        (bin / "pkill").write_text("#!/bin/sh\nexit 0\n")
        for file in bin.iterdir():
            file.chmod(0o755)
        with Kernel(env={"PATH": f"{bin}{os.pathsep}{os.environ['PATH']}"}, cwd=scratch, python=python) as kernel:
            status = kernel.run(peer.start.format(workers=workers), timeout=LIMIT_S)
            assert status == "ok", kernel.errors()
            try:
                yield kernel
            finally:
                kernel.run(peer.stop, timeout=LIMIT_S)


def peers() -> list[Peer]:
    """Those that are installed."""
    return list(PEERS) if (python_of("others").parents[1] / ".installed").exists() else []


def cell_ms(kernel: Kernel, code: str) -> float:
    """From the request until its reply and the kernel's "idle" are here. AssertionError where the cell fails."""
    client = kernel.client
    began = time.perf_counter()
    asked = client.execute(code)
    while True:
        reply = client.get_shell_msg(timeout=LIMIT_S)
        if reply["parent_header"].get("msg_id") == asked:
            break
    assert reply["content"]["status"] == "ok", reply["content"]
    while True:
        message = client.get_iopub_msg(timeout=LIMIT_S)
        if message["parent_header"].get("msg_id") == asked and message["content"].get("execution_state") == "idle":
            return (time.perf_counter() - began) * 1e3


def cell(kernel: Kernel, code: str) -> Callable[[], float]:
    return lambda: cell_ms(kernel, code)
