"""Ctrl-C at any moment of a loop that issues ops: nothing is lost, the mesh goes on."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import monarch_lab as ml


def _interrupted(mesh: Any, step: Callable[[], Any], moment: float) -> None:
    timer = threading.Timer(moment, os.kill, (os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        timer.start()
        while True:
            step()
    timer.join()
    mesh.client.stop_cell()  # what the end of a cell does


@pytest.mark.parametrize("seed", range(3))
def test_an_interrupt_among_small_ops_leaves_the_stream_whole(cell: Any, seed: int) -> None:
    moments, one, kept = random.Random(seed), torch.ones(4), []

    def step() -> None:
        kept[:] = [one + 1, one.clone().mul_(3.0), one.view(2, 2).sum(0)]

    for _ in range(8):
        _interrupted(cell, step, moments.uniform(0.001, 0.03))
        assert (one + 1).sum().tolist() == 8
        assert one.tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize("seed", range(3))
def test_an_interrupt_of_training_leaves_the_model_usable_on_every_rank(cell: Any, seed: int) -> None:
    moments, one = random.Random(seed), torch.ones(1, 4)
    net = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-4)

    def step() -> None:
        optimizer.zero_grad()
        net(one).sum().backward()
        for p in net.parameters():
            p.grad.reduce_("gpu", "avg")
        optimizer.step()

    for _ in range(6):
        _interrupted(cell, step, moments.uniform(0.001, 0.03))
        optimizer.zero_grad()
        net(one).sum().backward()
        assert net.weight.grad.sum().tolist() == 16
        assert net.weight.tolist()  # known equal, and has a value


def test_an_interrupt_of_an_op_that_waits_drops_what_came_after_it(cell: Any) -> None:
    import monarch_lab as ml

    @ml.remote
    def slow(x: Any) -> Any:
        import time

        time.sleep(600)
        return x

    one = torch.ones(2)
    timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        timer.start()
        slow(one)
    timer.join()
    cell.client.stop_cell()
    assert (one + 1).tolist() == [2, 2]


def _nap() -> int:
    import time

    time.sleep(600)
    return 1


def test_each_interrupt_of_calls_in_a_row_ends_its_call(cell: Any) -> None:
    cell.sync()
    for _ in range(3):  # no batch goes out in between
        _interrupted(cell, lambda: ml.call_on_shard_and_fetch(_nap, shard={"gpu": 0}).result(), 0.5)
    assert ml.call_on_shard_and_fetch(int, shard={"gpu": 0}).result(30) == 0


@pytest.mark.parametrize("what", ["backward", "call"])
def test_an_interrupt_while_a_question_is_sent_is_raised_where_its_answer_is_waited_for(
    cell: Any, monkeypatch: Any, what: str
) -> None:
    net, one = torch.nn.Linear(4, 4), torch.ones(1, 4)
    out = net(one).sum()
    cell.sync()
    supervisor = type(cell.client.supervisor)
    send = supervisor.send

    def interrupted(*args: Any) -> None:
        monkeypatch.setattr(supervisor, "send", send)  # once: a second one would drop what has not run yet
        send(*args)
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(supervisor, "send", interrupted)
    with pytest.raises(KeyboardInterrupt):
        out.backward() if what == "backward" else net.weight.requires_grad_(False)
    cell.client.stop_cell()
    if what == "call":  # it has run, and what it did is known
        assert not net.weight.requires_grad
        return
    net.zero_grad()
    net(one).sum().backward()
    assert net.weight.grad.sum().tolist() == 16
