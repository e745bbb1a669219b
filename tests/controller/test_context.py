"""Which mesh a piece of code uses hangs on its context (rule 15): tasks and threads do not see each other's."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import monarch_lab as ml
from tests.controller.compare import is_mesh, rank_values


def test_another_task_does_not_see_the_mesh_of_a_task_that_waits(mesh: Any) -> None:
    async def active(inside: asyncio.Event, leave: asyncio.Event) -> Any:
        with mesh.activate():
            inside.set()
            await leave.wait()
            return torch.ones(1)

    async def plain(inside: asyncio.Event, leave: asyncio.Event) -> Any:
        await inside.wait()
        made = torch.ones(1)
        leave.set()
        return made

    async def both() -> Any:
        inside, leave = asyncio.Event(), asyncio.Event()
        return await asyncio.gather(active(inside, leave), plain(inside, leave))

    far, local = asyncio.run(both())
    assert is_mesh(far) and not is_mesh(local)
    assert not is_mesh(torch.ones(1))


def test_two_tasks_use_two_meshes_at_once(mesh: Any) -> None:
    async def use(part: Any) -> Any:
        with part.activate():
            seen = []
            for _ in range(3):
                seen.append(torch.ones(1).mesh)
                await asyncio.sleep(0)
            return seen

    async def both() -> Any:
        return await asyncio.gather(use(mesh.slice(gpu=0)), use(mesh.slice(gpu=1)))

    first, second = asyncio.run(both())
    assert set(first) == {mesh.slice(gpu=0)} and set(second) == {mesh.slice(gpu=1)}


def test_a_thread_starts_without_a_mesh(cell: Any) -> None:
    with ThreadPoolExecutor(1) as pool:
        assert not is_mesh(pool.submit(torch.ones, 1).result())


def test_a_thread_in_a_copied_context_uses_the_mesh(cell: Any) -> None:
    seen: list[Any] = []

    def work() -> None:
        seen.append(ml.get_active_mesh())
        seen.append(torch.ones(2))
        seen.append(torch.zeros(2, 2) + 1)

    thread = threading.Thread(target=contextvars.copy_context().run, args=(work,))
    thread.start()
    thread.join()
    assert seen[0] is cell and is_mesh(seen[1]) and is_mesh(seen[2])


def test_threads_with_meshes_of_their_own_issue_ops_at_once(mesh: Any) -> None:
    def work(k: int) -> Any:
        with mesh.activate():
            x = torch.full((4,), float(k))
            for _ in range(50):
                x = x * 2 - k
            return x

    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(work, range(4)))
    for k, x in enumerate(results):
        assert rank_values(x) == [[float(k)] * 4] * 2
    assert not is_mesh(torch.ones(1))


def test_no_grad_of_one_thread_is_not_that_of_another(mesh: Any) -> None:
    w = mesh.replicate(torch.ones(2)).requires_grad_()
    barrier = threading.Barrier(2)

    def without() -> bool:
        with torch.no_grad():
            barrier.wait()
            y = w * 3
            barrier.wait()
        return y.requires_grad

    def with_() -> bool:
        barrier.wait()
        y = w * 3
        barrier.wait()
        return y.requires_grad

    with ThreadPoolExecutor(2) as pool:
        for _ in range(3):
            a, b = pool.submit(without), pool.submit(with_)
            assert (a.result(), b.result()) == (False, True)
    mesh.sync()


def test_an_awaited_value_in_a_cell_leaves_the_mesh_active(mesh: Any) -> None:
    async def cell() -> Any:
        with mesh.activate():
            value = await ml.fetch_shard(torch.ones(1))
            return value, torch.ones(1)

    value, made = asyncio.run(cell())
    assert not is_mesh(value) and is_mesh(made)


def test_handles_that_die_on_another_thread_free_their_values(cell: Any) -> None:
    values = [torch.rand(10) for _ in range(20)]
    watch = weakref.ref(values[0])
    with ThreadPoolExecutor(1) as pool:
        pool.submit(values.clear).result()
    gc.collect()
    assert watch() is None
    assert torch.ones(1).reduce("gpu").item() == 2


def test_a_handle_has_one_gradient_one_base_and_its_own_attributes(cell: Any) -> None:
    x = torch.arange(6.0)
    view = x[2:4]
    assert view._base is x and x._base is None and view._is_view()
    w = torch.ones(2).requires_grad_()
    (w * 2).sum().backward()
    w.grad.mine = 1
    assert w.grad is w.grad and w.grad.mine == 1
    w.note = "kept"
    assert (w + 0) is not w and w.note == "kept"
    assert {w: 1}[w] == 1 and w in {w} and hash(w) == id(w)


def test_parameters_look_like_parameters(cell: Any) -> None:
    p = torch.nn.Parameter(torch.ones(2))
    assert isinstance(p, torch.nn.Parameter) and isinstance(p, torch.Tensor) and type(p).__name__ == "Parameter"
    assert not isinstance(torch.ones(2), torch.nn.Parameter) and not isinstance(p * 1, torch.nn.Parameter)
    assert not isinstance(p.detach(), torch.nn.Parameter) and not isinstance(p.data, torch.nn.Parameter)
    assert (
        p.is_leaf and p.requires_grad and torch.nn.Parameter(torch.ones(1), requires_grad=False).requires_grad is False
    )
    module = torch.nn.Module()
    module.w = p
    module.register_buffer("b", torch.zeros(1))
    assert dict(module.named_parameters())["w"] is p and [n for n, _ in module.named_buffers()] == ["b"]
    assert isinstance(torch.nn.Buffer(torch.ones(1)), torch.nn.Buffer)


@pytest.mark.parametrize("other", [None, "a", object()])
def test_a_tensor_is_compared_with_anything(cell: Any, other: Any) -> None:
    x = torch.ones(2)
    with ml.no_mesh.activate():
        local = torch.ones(2)
    assert (x == other) is (local == other) and (x != other) is (local != other)


def test_a_tensor_is_found_in_a_list_by_identity_first(cell: Any) -> None:
    x, y = torch.ones(()) * 1, torch.zeros(()) * 1
    assert x in [x] and [y, x].index(x) == 1
