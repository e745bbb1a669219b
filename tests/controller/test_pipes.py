"""Processes beside the workers, and the pipes to them."""

from __future__ import annotations

import gc
import os
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import monarch_lab as ml
from tests.controller.compare import own_number, rank_values


def _count_up(start: int) -> Iterator[Any]:
    for k in range(start, start + 4):
        yield torch.tensor([float(k)])


@pytest.fixture
def loader() -> Any:
    @ml.remote_generator(_count_up)
    def load(start: int) -> Iterator[Any]:
        for _ in range(4):
            yield torch.empty(1)

    return load


def test_a_generator_beside_the_workers_yields_mesh_tensors(cell: Any, loader: Any) -> None:
    pipe = loader(3)
    values = list(pipe)
    assert [rank_values(v) for v in values] == [[[k], [k]] for k in (3.0, 4.0, 5.0, 6.0)]
    with pytest.raises(EOFError, match="propagator"):
        pipe.recv()


def test_what_is_sent_comes_back_as_the_function_makes_it(cell: Any) -> None:
    def add_one(pipe: Any, k: int) -> None:
        assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
        pipe.send((pipe.ranks, pipe.sizes, torch.tensor(pipe.ranks["gpu"])))
        while True:
            value = pipe.recv()
            pipe.send(value["x"] + k)

    def shapes(k: int) -> Iterator[Any]:
        yield {}, {}, torch.tensor(0)
        while True:
            yield torch.empty(2)

    pipe = ml.create_pipe(add_one, 1, propagate=shapes)
    _, _, rank = pipe.recv()
    assert rank_values(rank) == [0, 1]
    before = cell.client.cache.misses
    x = torch.zeros(2) + own_number(cell)
    for k in range(10):
        pipe.send({"x": x + float(k), "name": "any"})
        y = pipe.recv()
        assert rank_values(y) == [[k + 1] * 2, [k + 2] * 2]
    assert cell.client.cache.misses <= before + 8, "nothing is learned for a message"
    assert x.equal_dims == torch.zeros(1).equal_dims[:1]


def test_a_sender_waits_while_so_many_are_not_received(cell: Any) -> None:
    def eager(pipe: Any) -> None:
        for k in range(100):
            pipe.send(torch.tensor(k))
            with open(pipe_mark, "w") as file:
                file.write(str(k))

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, cell.slice(gpu=0).activate():
        pipe_mark = os.path.join(folder, "sent")
        pipe = ml.create_pipe(eager, propagate=lambda: iter(lambda: torch.tensor(0), None), max_messages=3)
        assert ml.inspect(pipe.recv()).item() == 0
        for _ in range(1200):
            if os.path.exists(pipe_mark) and open(pipe_mark).read() == "3":
                break
            time.sleep(0.05)
        time.sleep(0.3)
        assert open(pipe_mark).read() == "3", "one received, three wait"
        assert [ml.inspect(pipe.recv()).item() for _ in range(5)] == [1, 2, 3, 4, 5]


@pytest.mark.slow
def test_a_failure_of_the_function_is_told_where_it_was_to_give_something(mesh: Any) -> None:
    def fail() -> Iterator[Any]:
        yield torch.tensor(1)
        raise ValueError("no more data")

    def shapes(*_: Any) -> Iterator[Any]:
        while True:
            yield torch.tensor(0)

    part = mesh.slice(gpu=0)
    with part.activate():
        pipe = ml.remote_generator(fail)(shapes)()
    assert rank_values(pipe.recv()) == [1]
    with pytest.raises(ml.RemoteException, match="no more data"):
        ml.inspect(pipe.recv())
    mesh.client.settle()
    with part.activate():
        ended = ml.remote_generator("builtins.range")(shapes)(0)
    with pytest.raises(ml.RemoteException, match="has ended"):
        ml.inspect(ended.recv())
    mesh.client.settle()


@pytest.mark.slow
def test_side_processes_end_with_the_last_reference(cell: Any) -> None:
    def idle(pipe: Any) -> None:
        pipe.send(torch.tensor(os.getpid()))
        pipe.recv()

    def shapes() -> Iterator[Any]:
        yield torch.tensor(0)

    pipe = ml.create_pipe(idle, propagate=shapes)
    pids = rank_values(pipe.recv())
    assert all(os.path.exists(f"/proc/{pid}") for pid in pids)
    del pipe
    gc.collect()
    cell.sync()
    for _ in range(100):
        if not any(os.path.exists(f"/proc/{pid}") for pid in pids):
            return
        time.sleep(0.05)
    raise AssertionError("a side process was left")


def test_what_a_pipe_cannot_do_is_refused(mesh: Any, loader: Any) -> None:
    with pytest.raises(ValueError, match="no device mesh is active"):
        loader(3)
    with mesh.activate():
        with pytest.raises(TypeError, match="propagate"):
            ml.create_pipe(_count_up, 3, propagate=None)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=r"pipe\.send"):
            loader(torch.ones(2))
        with pytest.raises(ValueError, match=r"pipe\.send"):
            loader({"r": ml.remote(lambda: ml.OpaqueRef(1))()})
        with pytest.raises(ValueError, match="max_messages"):
            ml.create_pipe(_count_up, propagate=_count_up, max_messages=0)
        with pytest.raises(TypeError, match="dotted path"):
            ml.create_pipe(3, propagate=_count_up)  # type: ignore[arg-type]
