"""The spare in a real kernel: made beside a mesh, gone with the extension and with the kernel, however that ends."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from monarch_lab.transport import platform
from tests.kernel import Kernel
from tests.supervisor.recorder import wait_until

ROOT = str(Path(__file__).parents[2])
START = """
%load_ext monarch_lab
%mesh start --cpu -n 1
from monarch_lab.session.pool import warm_pool
import threading
while not warm_pool.is_ready:
    threading.Event().wait(0.05)
"""


@pytest.fixture
def kernel() -> Iterator[Kernel]:
    with Kernel(cwd=ROOT, env={"MONARCH_LAB_WARM_POOL_DELAY": "0"}) as kernel:
        assert kernel.run(START) == "ok", kernel.errors()
        yield kernel


def below(kernel: Kernel) -> list[int]:
    return platform.descendants(kernel.pid)


@pytest.mark.slow
def test_the_next_mesh_takes_the_spare_and_unloading_ends_the_one_after(kernel: Kernel) -> None:
    assert kernel.run("spare = warm_pool._spare.directory\n%mesh start --cpu -n 1 --name later") == "ok"
    assert (
        kernel.run("import monarch_lab as ml\nprint(ml.meshes()['later']._owner.supervisor.directory == spare)") == "ok"
    )
    assert kernel.text() == "True\n"
    assert kernel.run(START.partition("warm_pool\n")[2]) == "ok"
    assert kernel.run("%mesh list") == "ok"
    assert [line for line in kernel.text().splitlines() if "spare" in line] == []
    assert kernel.run("%unload_ext monarch_lab") == "ok"
    assert kernel.text() == 'Stopped mesh "mesh" (1 worker), mesh "later" (1 worker).\n'
    assert below(kernel) == []


@pytest.mark.slow
def test_a_killed_or_restarted_kernel_leaves_no_spare(kernel: Kernel) -> None:
    processes = below(kernel)
    assert len(processes) == 7, "of a mesh of one, and of the spare: agent, guard, zygote"
    kernel.restart()
    wait_until(lambda: not any(map(platform.is_alive, processes)))
    assert kernel.run(START) == "ok", kernel.errors()
    processes = below(kernel)
    kernel.kill()
    wait_until(lambda: not any(map(platform.is_alive, processes)))
