"""SIGKILL at random: of the kernel, the agent, guard, zygote or workers, one or several, while a mesh starts or lives.

Whatever was hit, once the kernel has ended no process of its mesh is left; where kernel, agent and guard were killed
in one moment, once the next mesh starts.
"""

from __future__ import annotations

import json
import os
import random
import select
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from monarch_lab.transport import platform
from monarch_lab.transport.marks import sweep_orphans
from tests.repeats import repeated
from tests.supervisor.recorder import PATIENCE_S, ROOT, wait_until

pytestmark = pytest.mark.skipif(not platform.LINUX, reason="pidfd, subreaper and /proc")
TAG = "LAB_TEST_RUN"


def _everyone(tag: str) -> dict[str, list[int]]:
    """What runs under the tag, by kind."""
    found: dict[str, list[int]] = {}
    for pid in platform.marked(TAG, tag):
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            continue
        if not platform.is_alive(pid):
            continue
        kinds = {
            b"stand_in_kernel": "kernel",
            b"agent.guard": "guard",
            b"agent.zygote": "below",
            b"monarch_lab.agent": "agent",
        }
        kind = next((kind for word, kind in kinds.items() if word in command), "below")
        found.setdefault(kind, []).append(pid)
    return found


@repeated(few=6, many=200)
def test_nobody_is_left_whoever_is_killed(turn: int) -> None:
    chance = random.Random(turn)
    tag = uuid.uuid4().hex
    kernel = subprocess.Popen(
        [sys.executable, "-m", "tests.agent.stand_in_kernel"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd=ROOT,
        env={**os.environ, TAG: tag},
    )
    assert kernel.stdout is not None
    try:
        # Up to half a second from its start it is not up yet.
        while_starting = chance.random() < 0.4
        ready, _, _ = select.select([kernel.stdout], [], [], chance.uniform(0.0, 0.5) if while_starting else PATIENCE_S)
        facts = json.loads(kernel.stdout.readline()) if ready and not while_starting else None
        victims = _everyone(tag)
        kinds = chance.sample(sorted(victims), k=min(len(victims), chance.choice([1, 1, 1, 2, 3])))
        hit = [chance.choice(victims[kind]) for kind in kinds]
        for pid in hit:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        if "kernel" not in kinds:
            if {"agent", "guard"} <= set(kinds):  # the kernel alone is left to end the rest: let it see that
                wait_until(lambda: not _everyone(tag).keys() - {"kernel"})
            kernel.send_signal(chance.choice([signal.SIGKILL, signal.SIGTERM] + [signal.SIGUSR1] * (facts is not None)))
        kernel.wait(PATIENCE_S)
        if {"kernel", "agent", "guard"} <= set(kinds):
            sweep_orphans()  # as the next mesh of this user does: nobody else was left
        wait_until(lambda: not _everyone(tag))
        if facts is not None:
            wait_until(lambda: not os.path.exists(facts["directory"]) or {"agent", "guard"} <= set(kinds))
    finally:
        kernel.kill()
        kernel.wait()
        kernel.stdout.close()
        for pids in _everyone(tag).values():
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
