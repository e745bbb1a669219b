"""Ranks that do not come to the end of an operation, on real workers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import monarch_lab as ml
from monarch_lab.errors import DeviceException

SOON = ml.SupervisionParams(update_interval=0.1)


@ml.remote
def sleep_on_rank_1(x: torch.Tensor, seconds: float) -> torch.Tensor:
    import os
    import time

    if os.environ["RANK"] == "1":
        time.sleep(seconds)
    return x + 1


def mesh_with(fail: bool, seconds: float) -> Any:
    params = ml.ControllerParams(progress_check_interval=0.1, operation_timeout=seconds, fail_on_worker_timeout=fail)
    return ml.local_mesh(gpus_per_host=2, device="cpu", name="stuck", supervision_params=SOON, controller_params=params)


@pytest.fixture
def impatient() -> Iterator[Any]:
    with mesh_with(fail=True, seconds=3.0) as mesh, mesh.activate():  # forming a group takes one on a busy machine
        yield mesh


def test_a_rank_that_is_long_in_an_operation_is_told_of_and_may_end_it(capfd: pytest.CaptureFixture[str]) -> None:
    with mesh_with(fail=False, seconds=1.0) as mesh, mesh.activate():
        assert ml.fetch_all(sleep_on_rank_1(torch.ones(1), 2.5)).tolist() == [[[2.0], [2.0]]]
        mesh.sync()
    told = capfd.readouterr().err
    assert told.count("has not come to an end for 1 s") == 1
    assert "rank 1 has" in told and "test_stuck.py:" in told and "sleep_on_rank_1(torch.ones(1), 2.5)" in told


def test_it_may_count_as_failed_and_be_replaced(impatient: Any) -> None:
    kept = impatient.rank("gpu") + 5
    with pytest.raises(DeviceException, match="rank 1 has not come to an end for 3 s") as caught:
        ml.fetch_all(sleep_on_rank_1(kept, 600.0))
    assert caught.value.ranks == (1,)
    assert ml.inspect(kept, gpu=0).item() == 5
    assert impatient.state == "dead"
    impatient.restart(1)
    assert impatient.state == "live"
    assert ml.fetch_all(torch.ones(1).reduce("gpu")).tolist() == [[[2.0], [2.0]]]


def test_ops_that_were_done_long_ago_and_never_asked_for_are_not_stuck(impatient: Any) -> None:
    x = torch.ones(2)
    for _ in range(10):
        x = x + 1
    for _ in range(4):
        ml.call_on_shard_and_fetch(_nap, shard={"gpu": 0}).result()
    impatient.sync()
    assert ml.inspect(x, gpu=0).tolist() == [11.0, 11.0]


def _nap() -> None:
    """Less than the time-out by itself; the ops before it are older."""
    import time

    time.sleep(1.0)
