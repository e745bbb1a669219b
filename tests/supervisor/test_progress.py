from __future__ import annotations

from monarch_lab.config import Timeouts
from monarch_lab.supervisor.progress import MeshState, Progress, Stage, StartClock

TIMES = Timeouts(agent_hello=30, zygote_ready=120, worker_hello=150)


def test_each_stage_has_its_own_deadline_and_none_is_left_when_all_is_up() -> None:
    start = StartClock(TIMES)
    start.enter(Stage.AGENT, 1, now=100.0)
    assert start.due == 130.0
    start.enter(Stage.IMPORTS, 1, now=101.0)
    assert start.due == 221.0
    start.enter(Stage.WORKERS, 2, now=110.0)
    assert start.due == 260.0
    start.count(1, 2)
    assert start.progress == Progress(MeshState.STARTING, Stage.WORKERS, 1, 2)
    start.count(2, 2)
    assert start.progress.state is MeshState.LIVE
    assert start.due == float("inf")


def test_the_first_failure_is_the_one_told_and_nothing_revives_the_start() -> None:
    start = StartClock(TIMES)
    start.fail_start("no torch\n")
    start.fail_start("the agent ended")
    start.enter(Stage.WORKERS, 2, now=0.0)
    start.count(2, 2)
    assert (start.progress.state, str(start.progress)) == (MeshState.FAILED, "no torch")


def test_a_live_mesh_does_not_fail_its_start() -> None:
    start = StartClock(TIMES)
    start.count(1, 1)
    start.fail_start("rank 0 was killed")
    assert start.progress.state is MeshState.LIVE


def test_a_waiter_sees_a_change_it_did_not_know_or_the_end_of_its_time() -> None:
    start = StartClock(TIMES)
    known = start.wait_change(None, 0)
    assert start.wait_change(known, 0) == known
    start.enter(Stage.IMPORTS, 1, now=0.0)
    assert start.wait_change(known, None).stage is Stage.IMPORTS
