"""Values from the mesh to the kernel: fetch_shard, inspect, fetch_all, futures, printing."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
import torch

import monarch_lab as ml
from tests.controller.compare import own_number


def test_a_shard_is_chosen_by_its_coordinates(cell: Any) -> None:
    x = cell.rank("gpu") + 10
    assert ml.inspect(x).item() == 10
    assert ml.inspect(x, gpu=1).item() == ml.inspect(x, {"gpu": 1}).item() == ml.inspect(x, host=0, gpu=-1).item() == 11
    assert ml.fetch_shard(x, shard={"host": 0, "gpu": 1}).result().item() == 11


def test_a_wrong_shard_says_what_there_is(cell: Any) -> None:
    x = torch.ones(1)
    with pytest.raises(ValueError, match="Missing key 'gpu'"):
        ml.inspect(x, host=0)
    with pytest.raises(KeyError, match="does not have dimension 'tp'"):
        ml.inspect(x, tp=0)
    with pytest.raises(IndexError, match="out of range"):
        ml.inspect(x, gpu=2)
    with pytest.raises(TypeError, match="no mesh tensor"):
        ml.fetch_shard({"a": 1})


def test_a_pytree_keeps_its_form_and_its_other_values(cell: Any) -> None:
    tree = {"a": [torch.ones(2), 3], "b": (own_number(cell), None, "c")}
    got = ml.inspect(tree, gpu=1)
    assert (
        got["a"][0].tolist() == [1, 1] and got["a"][1] == 3 and got["b"][0].item() == 1 and got["b"][1:] == (None, "c")
    )
    whole = ml.fetch_all(tree)
    assert whole["a"][0].shape == (1, 2, 2) and whole["b"][0].tolist() == [[0, 1]]
    assert ml.fetch_all([1, "x"]) == [1, "x"]


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.arange(6.0).view(2, 3).t(),
        lambda: torch.ones(2, dtype=torch.complex64).conj() * 1j,
        lambda: torch.tensor([True, False]),
        lambda: torch.arange(3.0).requires_grad_(),
        lambda: torch.arange(3.0).requires_grad_() * 2,
        lambda: torch.ones(3).expand(2, 3),
        lambda: torch.zeros(0, 4),
        lambda: torch.tensor(3.5, dtype=torch.bfloat16),
        lambda: torch.ones(3).to_sparse(),
        lambda: torch.arange(9).view(3, 3)[1:, ::2],
        lambda: torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last),
        lambda: torch.quantize_per_tensor(torch.arange(3.0), 0.1, 0, torch.qint8),
    ],
)
def test_a_fetched_value_is_a_plain_tensor_without_graph(mesh: Any, make: Any) -> None:
    local = make()
    with mesh.activate():
        far = make()
    got = ml.inspect(far)
    assert type(got) is torch.Tensor and not got.requires_grad and got.device.type == "cpu"
    assert got.dtype == local.dtype and got.shape == local.shape and got.layout == local.layout
    if local.layout is torch.strided and not local.is_quantized:
        assert torch.equal(got.resolve_conj(), local.detach().resolve_conj())
        got.clone().resolve_conj().fill_(1)
    else:
        assert torch.equal(
            got.to_dense() if local.is_sparse else got.dequantize(),
            make().to_dense() if local.is_sparse else make().dequantize(),
        )


def test_writing_to_a_fetched_value_does_not_reach_the_mesh(cell: Any) -> None:
    x = torch.zeros(3)
    got = ml.inspect(x)
    got.add_(1)
    array = x.numpy()
    assert x.tolist() == [0, 0, 0] and not array.flags.writeable


def test_a_future_gives_its_result_again_and_again(cell: Any) -> None:
    future = ml.fetch_shard(torch.arange(3))
    assert future.result(60).tolist() == [0, 1, 2]
    assert future.done() and future.exception() is None
    assert future.result() is future.result(0)


def test_a_future_calls_back_once_it_is_done(cell: Any) -> None:
    heard = threading.Event()
    seen: list[Any] = []
    future = ml.fetch_shard(torch.ones(1))
    future.add_callback(lambda f: (seen.append(f), heard.set()))
    assert heard.wait(60) and seen == [future]
    future.result()
    later: list[Any] = []
    future.add_callback(later.append)
    assert later == [future]


def test_a_future_that_is_late_times_out_and_comes_all_the_same(mesh: Any) -> None:
    @ml.remote
    def wait_for_file(path: str) -> Any:
        import os
        import time

        while not os.path.exists(path):
            time.sleep(0.005)
        return 7

    import tempfile

    with tempfile.TemporaryDirectory() as directory, mesh.activate():
        path = directory + "/go"
        future = wait_for_file.call_on_shard_and_fetch(path, shard={"host": 0, "gpu": 0})
        with pytest.raises(TimeoutError):
            future.result(0.05)
        with pytest.raises(TimeoutError):
            future.exception(0.05)
        assert not future.done()
        open(path, "w").close()
        assert future.result(60) == 7


def test_a_future_of_a_failed_call_raises_and_tells(cell: Any) -> None:
    def fail() -> None:
        raise ValueError("on purpose")

    future = ml.call_on_shard_and_fetch(fail, shard={"host": 0, "gpu": 1})
    error = future.exception(60)
    assert isinstance(error, ml.RemoteException) and isinstance(error, ValueError) and error.ranks == (1,)
    with pytest.raises(ValueError, match="on purpose"):
        future.result()


def test_futures_can_be_awaited(cell: Any) -> None:
    async def both() -> Any:
        a, b = ml.fetch_shard(torch.ones(1)), ml.fetch_shard(torch.zeros(1))
        return (await a).item(), (await b).item(), (await a).item()

    assert asyncio.run(both()) == (1, 0, 1)


def test_an_awaited_failure_raises(cell: Any) -> None:
    def fail() -> None:
        raise KeyError("gone")

    async def wait() -> Any:
        return await ml.call_on_shard_and_fetch(fail, shard={"host": 0, "gpu": 0})

    with pytest.raises(KeyError):
        asyncio.run(wait())


def test_threads_fetch_at_the_same_time(cell: Any) -> None:
    values = [torch.full((100,), float(k)) for k in range(8)]
    got: dict[int, float] = {}

    def fetch(k: int) -> None:
        for _ in range(10):
            got[k] = ml.inspect(values[k])[0].item()

    threads = [threading.Thread(target=fetch, args=(k,)) for k in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    assert got == {k: float(k) for k in range(8)}


def test_values_that_differ_in_shape_come_as_a_list_by_rank(cell: Any) -> None:
    def ragged(r: Any) -> Any:
        return torch.ones(r.item() + 1)

    rank = cell.rank("gpu")
    got = [ml.call_on_shard_and_fetch(ragged, rank, shard={"host": 0, "gpu": g}).result() for g in range(2)]
    assert [g.shape for g in got] == [(1,), (2,)]


def test_printing_shows_equal_values_once_and_others_by_rank(cell: Any) -> None:
    equal, own = torch.arange(3), own_number(cell)
    assert repr(equal).count("tensor([0, 1, 2])") == 1 and "[all]" in repr(equal)
    text = repr(own)
    assert "tensor(0.)" in text and "tensor(1.)" in text and "[0.0]" in text and "[0.1]" in text
    assert "requires_grad" in repr(torch.ones(1).requires_grad_())
    assert "Parameter" in repr(torch.nn.Parameter(torch.ones(1)))
    html = own._repr_mimebundle_()
    assert "tensor(1.)" in html["text/plain"] and "<" in html["text/html"]


def test_a_format_of_unequal_values_lists_them_by_rank(cell: Any) -> None:
    assert f"{torch.ones(()) * 2:.2f}" == "2.00"
    text = f"{own_number(cell):.1f}"
    assert "0.0" in text and "1.0" in text and "0.0:" in text.replace(" ", "")


def test_a_sum_and_a_maximum_of_python_work_on_known_values(cell: Any) -> None:
    x, y = torch.tensor([1.0]).sum() * 1, torch.tensor([2.0]).sum() * 1
    assert sum([x, y]).item() == 3 and max(x, y).item() == 2 and sorted([y, x])[0].item() == 1
    assert [v.item() for v in torch.arange(3)] == [0, 1, 2]
    a, b = torch.tensor([5, 6])
    assert (a.item(), b.item()) == (5, 6)


def test_a_big_value_comes_whole(cell: Any) -> None:
    x = torch.arange(1 << 20)
    assert torch.equal(ml.inspect(x, gpu=1).sum(), ml.inspect(x.sum()))


def test_large_values_come_through_shared_memory_and_are_the_kernels_own(cell: Any) -> None:
    x = torch.arange(600_000.0).view(1000, 600)
    rank0 = dict(host=0, gpu=0)
    first = ml.inspect(x, **rank0)
    kept = first[1:3]
    x.add_(1)
    second = ml.inspect(x, **rank0)
    assert first.equal(second - 1) and first[0, 1] == 1
    first.mul_(0)
    assert ml.inspect(x, **rank0).equal(second)
    expected = kept.clone()
    del first
    for k in range(6):  # segments are used again meanwhile, those that are still read are not
        assert ml.inspect(x * k, **rank0).equal(second * k)
    assert kept.equal(expected) and second[0, 0] == 1
    pair = ml.inspect({"t": x.t(), "b": x > 5, "c": x.to(torch.bfloat16)}, host=0, gpu=1)
    assert pair["t"].shape == (600, 1000) and pair["b"].dtype == torch.bool
    assert pair["c"].equal(second.to(torch.bfloat16))


@pytest.mark.parametrize("elements", [30_000, 200_000, 600_000])
def test_a_value_that_is_changed_after_it_was_fetched_is_fetched_as_it_was(cell: Any, elements: int) -> None:
    x = torch.ones(elements)
    found = [ml.fetch_shard(x.add_(1), gpu=1) for _ in range(8)]
    x.zero_()
    cell.sync()
    for k, future in enumerate(found):
        assert future.result().unique().tolist() == [k + 2]


def test_a_large_fetch_that_nobody_waits_for_is_let_go(cell: Any) -> None:
    x = torch.ones(400_000)
    for _ in range(6):
        ml.fetch_shard(x, host=0, gpu=0)
    cell.sync()
    assert ml.inspect(x, host=0, gpu=0).sum() == 400_000
    apart = x + cell.rank("gpu")
    for _ in range(6):
        assert ml.fetch_all(apart)[0, :, -1].tolist() == [1, 2]
    count = ml.call_on_shard_and_fetch(_open_memory, shard=dict(host=0, gpu=0)).result()
    for _ in range(12):
        ml.inspect(x, host=0, gpu=0)
    assert ml.call_on_shard_and_fetch(_open_memory, shard=dict(host=0, gpu=0)).result() <= max(count, 5)


def _open_memory() -> int:
    import os

    found = 0
    for fd in os.listdir("/proc/self/fd"):
        try:
            found += "memfd:monarch_lab" in os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            continue
    return found
