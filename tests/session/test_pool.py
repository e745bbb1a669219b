"""The spare: made after a mesh has come up, taken by the next, ended when nobody wants it. Workers without torch."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from monarch_lab.agent import zygote
from monarch_lab.config import MARK_VARIABLE, load
from monarch_lab.errors import UsageValueError
from monarch_lab.session.pool import Pool
from monarch_lab.supervisor import Ground, Supervisor
from monarch_lab.transport import platform
from tests.supervisor.recorder import ROOT, SETTINGS, Recorder, launch_of, wait_until

SOON = replace(SETTINGS, warm_pool_delay=0.0)


@pytest.fixture
def pool() -> Iterator[Pool]:
    pool = Pool()
    yield pool
    pool.clear()
    assert not pool.is_ready


def agent_of(pool: Pool) -> int:
    assert pool._spare is not None and pool._spare.loop._agent is not None
    return pool._spare.loop._agent.pid


def take(pool: Pool, **changes: object) -> Supervisor:
    """A mesh on the spare; it ends with it."""
    launch = launch_of(**changes)
    spare = pool.take(Ground.of(launch, SOON))
    assert spare is not None
    return Supervisor(launch, SOON, Recorder(), spare)


def test_a_later_mesh_takes_the_spare_and_another_is_made_when_it_is_up(pool: Pool) -> None:
    pool.want(launch_of(), SOON)
    wait_until(lambda: pool.is_ready)
    first = agent_of(pool)
    with take(pool, name="later") as mesh:
        mesh.wait_ready()
        assert not pool.is_ready and first in map(platform_parent, mesh_pids(mesh))
        pool.want(launch_of(), SOON)
        wait_until(lambda: pool.is_ready)
        assert agent_of(pool) != first and platform.is_alive(first)
    assert not platform.is_alive(first) and pool.is_ready


def mesh_pids(mesh: Supervisor) -> list[int]:
    return [info.pid for info in mesh.processes.values()]


def platform_parent(pid: int) -> int:
    stat = platform.read_stat(pid)
    assert stat is not None
    return int(stat[1])


def test_a_mesh_whose_environment_torch_would_read_leaves_the_spare_alone(pool: Pool) -> None:
    pool.want(launch_of(), SOON)
    wait_until(lambda: pool.is_ready)
    assert pool.take(Ground.of(launch_of(env={"OMP_NUM_THREADS": "3"}), SOON)) is None
    assert pool.is_ready


def test_the_spare_after_such_a_mesh_is_one_that_fits_the_next_of_its_kind(pool: Pool) -> None:
    pool.want(launch_of(), SOON)
    wait_until(lambda: pool.is_ready)
    first = agent_of(pool)
    pool.want(launch_of(env={"OMP_NUM_THREADS": "3", "TOKEN": "mine"}), SOON)
    wait_until(lambda: not platform.is_alive(first) and pool.is_ready)
    assert pool._spare is not None and "TOKEN" not in pool._spare.ground.environ
    with take(pool, env={"OMP_NUM_THREADS": "3", "TOKEN": "mine"}) as mesh:
        mesh.wait_ready()


def test_a_start_puts_off_a_spare_in_the_making(pool: Pool) -> None:
    late = replace(SETTINGS, warm_pool_delay=3600.0)
    pool.want(launch_of(), late)
    assert pool.take(Ground.of(launch_of(), late)) is None
    pool.want(launch_of(), SOON)
    wait_until(lambda: pool.is_ready)


def test_a_spare_that_nobody_takes_is_ended(pool: Pool) -> None:
    pool.want(launch_of(), replace(SOON, warm_pool_idle=0.5))
    wait_until(lambda: pool._spare is not None)
    mark = pool._spare.loop._spec.mark if pool._spare is not None else ""
    agent = agent_of(pool)
    wait_until(lambda: pool._spare is None and not platform.is_alive(agent))
    wait_until(lambda: platform.marked(MARK_VARIABLE, mark) == [])


def test_a_spare_that_died_is_forgotten_without_a_word(pool: Pool, caplog: pytest.LogCaptureFixture) -> None:
    pool.want(launch_of(), SOON)
    wait_until(lambda: pool.is_ready)
    os.kill(agent_of(pool), 9)
    wait_until(lambda: pool._spare is None)
    assert pool.take(Ground.of(launch_of(), SOON)) is None
    assert [record for record in caplog.records if record.levelname != "DEBUG"] == []


def test_no_spare_is_made_where_it_is_not_wanted_or_cannot_be(pool: Pool) -> None:
    pool.want(launch_of(), replace(SOON, warm_pool=0))
    pool.want(launch_of(worker_module="worker_missing"), SOON)
    wait_until(lambda: pool._spare is not None)
    wait_until(lambda: pool._spare is None)
    with pytest.raises(UsageValueError, match="MONARCH_LAB_WARM_POOL=3 is too many"):
        load({"MONARCH_LAB_WARM_POOL": "3"})
    assert load({"MONARCH_LAB_WARM_POOL": "0", "MONARCH_LAB_WARM_POOL_DELAY": "2"}).warm_pool_delay == 2.0


KERNEL = """
import os, sys, time
from monarch_lab.session.pool import Pool
from tests.session.test_pool import SOON, agent_of
from tests.supervisor.recorder import launch_of, wait_until
pool = Pool()
if sys.argv[1] == "leave":
    import atexit
    atexit.register(pool.clear)
pool.want(launch_of(), SOON)
wait_until(lambda: pool.is_ready)
print(pool._spare.loop._spec.mark, pool._spare.directory, flush=True)
if sys.argv[1] == "leave":
    sys.exit()
os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize("end", ["leave", "die"])
def test_the_spare_ends_with_its_kernel(end: str) -> None:
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", KERNEL, end], capture_output=True, text=True, cwd=ROOT, env=environ)
    mark, directory = done.stdout.split()
    assert done.returncode == (0 if end == "leave" else -9), done.stderr
    wait_until(lambda: platform.marked(MARK_VARIABLE, mark) == [] and not os.path.exists(directory))


def test_a_forked_child_of_the_kernel_leaves_the_spare_alone(pool: Pool) -> None:
    pool.want(launch_of(), SOON)
    wait_until(lambda: pool.is_ready)
    child = os.fork()
    if child == 0:
        pool.clear()
        os._exit(0 if pool.take(Ground.of(launch_of(), SOON)) is None else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert pool.is_ready


def test_lowered_priority_can_be_undone_or_is_not_lowered() -> None:
    before = os.getpriority(os.PRIO_PROCESS, 0)
    undo: Callable[[], None] | None = zygote.lower_priority(1)
    assert os.getpriority(os.PRIO_PROCESS, 0) == before + (undo is not None)
    if undo is not None:
        undo()
    assert os.getpriority(os.PRIO_PROCESS, 0) == before


@pytest.mark.slow
def test_spares_made_taken_and_ended_again_leave_no_descriptor_or_thread(pool: Pool) -> None:
    def count() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    def cycle() -> None:
        pool.want(launch_of(), SOON)
        wait_until(lambda: pool.is_ready)
        with take(pool, per_host=1) as mesh:
            mesh.wait_ready()
        pool.want(launch_of(), SOON)
        wait_until(lambda: pool.is_ready)
        pool.clear()

    cycle()
    before = count()
    for _ in range(3):
        cycle()
    wait_until(lambda: count() == before)


def test_a_program_that_the_kernel_starts_inherits_nothing_of_the_spare(pool: Pool) -> None:
    code = "import os; print([n for n in range(3, 500) if os.path.lexists(f'/proc/self/fd/{n}')])"

    def inherited() -> str:
        return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, close_fds=False).stdout

    before = inherited()
    pool.want(launch_of(), SOON)
    wait_until(lambda: pool.is_ready)
    assert inherited() == before
