"""What a remote function may be given beside tensors: modules with mesh parameters, process groups."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import monarch_lab as ml
from tests.controller.compare import own_number, rank_values


def test_a_module_with_mesh_parameters_is_a_module_there(cell: Any) -> None:
    @ml.remote
    def apply(m: Any, x: Any) -> Any:
        assert type(m) is nn.Sequential and isinstance(m[0].weight, nn.Parameter)
        assert len(list(m.parameters())) == 2
        return m(x)

    net = nn.Sequential(nn.Linear(2, 1), nn.BatchNorm1d(1, affine=False))
    x = torch.tensor([[1.0, 2.0], [3.0, 5.0]])
    with torch.no_grad():
        net[0].weight.fill_(1.0)
        net[0].bias.zero_()
    for k in (1, 2):
        out = apply(net, x)
        assert rank_values(out) == rank_values(net[1](net[0](x)).detach())
        assert rank_values(net[1].num_batches_tracked) == [2 * k] * 2, "written on the workers, and here"


def test_gradients_reach_the_parameters_of_a_module_given(cell: Any) -> None:
    net = nn.Linear(2, 1, bias=False)
    loss = ml.remote(lambda m, x: m(x).sum())
    for _ in range(2):
        net.zero_grad()
        loss(net, torch.ones(3, 2)).backward()
        assert rank_values(net.weight.grad) == [[[3, 3]]] * 2
    ml.remote(lambda m, x: m(x).sum().backward())(net, torch.ones(3, 2))
    assert rank_values(net.weight.grad) == [[[6, 6]]] * 2


def test_shared_parameters_stay_shared(cell: Any) -> None:
    net = nn.ModuleList([nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)])
    net[1].weight = net[0].weight
    assert ml.remote(lambda m: m[0].weight is m[1].weight)(net)


def test_an_object_with_mesh_tensors_is_built_around_them(cell: Any) -> None:
    held = SimpleNamespace(x=torch.ones(2), name="held", n=torch.tensor(3.0))
    assert rank_values(ml.remote(lambda h, k: h.x * h.n * k)(held, own_number(cell))) == [[0, 0], [3, 3]]
    with pytest.raises(TypeError, match="pass it as an argument"):
        ml.remote(lambda h: h)({"deep": SimpleNamespace(inner=SimpleNamespace(x=torch.ones(2)))})


def test_an_optimizer_is_refused_with_what_to_do(cell: Any) -> None:
    with pytest.raises(TypeError, match=r"ml\.OpaqueRef"):
        ml.remote(lambda o: o.step())(torch.optim.SGD([torch.ones(2).requires_grad_()], 0.1))


def test_a_module_is_an_argument_of_a_call_on_one_shard(mesh: Any) -> None:
    with mesh.activate():
        net = nn.Linear(2, 1)
    names = ml.call_on_shard_and_fetch(lambda m: [n for n, _ in m.named_parameters()], net, shard={"gpu": 1})
    assert names.result() == ["weight", "bias"]


def test_a_process_group_carries_collectives_of_torch(cell: Any) -> None:
    group = cell.process_group("gpu")
    assert group.size() == 2

    @ml.remote
    def everything(x: Any, g: Any) -> Any:
        assert isinstance(g, dist.ProcessGroup) and g.size() == 2
        total = x.clone()
        dist.all_reduce(total, group=g)
        parts = [torch.empty_like(x) for _ in range(2)]
        dist.all_gather(parts, x, group=g)
        flat = torch.empty(2 * len(x))
        dist.all_gather_into_tensor(flat, x, group=g)
        sent = x.clone()
        dist.broadcast(sent, src=1, group=g)
        mine = torch.empty(1)
        dist.reduce_scatter_tensor(mine, x.clone(), group=g)
        turned = torch.empty_like(x)
        dist.all_to_all_single(turned, x.clone(), group=g)
        dist.barrier(group=g)
        return total, torch.stack(parts), flat, sent, mine, turned

    x = torch.tensor([1.0, 2.0]) + 10 * own_number(cell)
    for _ in range(2):
        total, parts, flat, sent, mine, turned = everything(x, group)
        assert rank_values(total) == [[12, 14]] * 2
        assert rank_values(parts) == [[[1, 2], [11, 12]]] * 2
        assert rank_values(flat) == [[1, 2, 11, 12]] * 2
        assert rank_values(sent) == [[11, 12]] * 2
        assert rank_values(mine) == [[12], [14]]
        assert rank_values(turned) == [[1, 11], [2, 12]]


def test_a_process_group_sends_between_ranks(cell: Any) -> None:
    @ml.remote
    def exchange(x: Any, r: Any, g: Any) -> Any:
        got = torch.zeros_like(x)
        if r.item() == 0:
            dist.isend(x, 1, group=g).wait()
        else:
            dist.irecv(got, 0, group=g).wait()
        return got

    sent = exchange(torch.full((2,), 7.0), cell.rank("gpu"), cell.process_group(["gpu"]))
    assert rank_values(sent) == [[0, 0], [7, 7]]


def test_a_process_group_of_one_process_and_of_all(cell: Any) -> None:
    total = ml.remote(lambda x, g: (dist.all_reduce(x, group=g), x)[1])
    one = torch.ones(1)
    assert rank_values(total(one.clone(), cell.process_group("host"))) == [[1]] * 2
    assert rank_values(total(one.clone(), cell.process_group())) == [[2]] * 2


def test_a_process_group_says_what_is_wrong_with_its_use(cell: Any) -> None:
    with pytest.raises(KeyError, match="no_such"):
        cell.process_group("no_such")
    with pytest.raises(TypeError, match="twice"):
        cell.process_group(["gpu", "gpu"])
    group = cell.process_group("gpu")
    with pytest.raises(TypeError, match="argument of its own"):
        pickle.dumps(group)
    group.drop()
    with pytest.raises(ml.UsageError, match="DROPPED"):
        ml.remote(lambda g: None)(group)
