"""Scripts as torch's tutorials have them, each one ``%%spmd`` cell: what they say of the ranks is as under torchrun."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from monarch_lab.controller.spmd import SpmdCell, run_spmd

_numbers = itertools.count()

DDP = """
import os
import tempfile
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.optim as optim
from torch.nn.parallel import DistributedDataParallel as DDP

class ToyModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.net1 = nn.Linear(10, 10)
        self.relu = nn.ReLU()
        self.net2 = nn.Linear(10, 5)

    def forward(self, x):
        return self.net2(self.relu(self.net1(x)))

def demo():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    ddp_model = DDP(ToyModel())
    loss_fn = nn.MSELoss()
    optimizer = optim.SGD(ddp_model.parameters(), lr=0.001)
    path = os.path.join(tempfile.gettempdir(), f"model.{os.environ['MONARCH_LAB_MARK'].replace('/', '.')}")
    if rank == 0:
        torch.save(ddp_model.state_dict(), path)
    dist.barrier()
    ddp_model.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
    optimizer.zero_grad()
    outputs = ddp_model(torch.randn(20, 10))
    loss_fn(outputs, torch.randn(20, 5)).backward()
    optimizer.step()
    dist.barrier()
    if rank == 0:
        os.remove(path)
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, ddp_model.module.net1.weight.sum().item())
    dist.destroy_process_group()
    return len(set(found))

if __name__ == "__main__":
    result = demo()
result
"""

TRAINER = """
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler
from torch.nn.parallel import DistributedDataParallel as DDP

class MyTrainDataset(Dataset):
    def __init__(self, size):
        self.data = [(torch.full((20,), float(k)), torch.tensor([k % 2.0])) for k in range(size)]

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        return self.data[index]

class Trainer:
    def __init__(self, model, train_data, optimizer):
        self.model, self.train_data, self.optimizer = DDP(model), train_data, optimizer
        self.seen = []

    def train(self, max_epochs):
        for epoch in range(max_epochs):
            self.train_data.sampler.set_epoch(epoch)
            for source, targets in self.train_data:
                self.seen += source[:, 0].int().tolist()
                self.optimizer.zero_grad()
                F.binary_cross_entropy_with_logits(self.model(source), targets).backward()
                self.optimizer.step()

model = torch.nn.Linear(20, 1)
data = DataLoader(MyTrainDataset(32), batch_size=4, num_workers=2, persistent_workers=True, pin_memory=False,
                  shuffle=False, sampler=DistributedSampler(MyTrainDataset(32)))
trainer = Trainer(model, data, torch.optim.SGD(model.parameters(), lr=1e-3))
trainer.train(2)
everybodys = [None, None]
dist.all_gather_object(everybodys, trainer.seen)
del data, trainer.train_data
sorted(everybodys[0] + everybodys[1]) == sorted(2 * list(range(32)))
"""

FSDP = """
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

torch.manual_seed(0)
with torch.device("meta"):
    model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU()) for _ in range(3)))
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
mesh = init_device_mesh("cpu", (world_size,))
for layer in model:
    fully_shard(layer, mesh=mesh, mp_policy=policy)
fully_shard(model, mesh=mesh, mp_policy=policy)
assert isinstance(model, FSDPModule) and all(isinstance(p, DTensor) for p in model.parameters())
model.to_empty(device="cpu")
for module in model.modules():
    if hasattr(module, "reset_parameters"):
        module.reset_parameters()
optim = torch.optim.Adam(model.parameters(), lr=1e-2)
for _ in range(3):
    model.unshard()
    model(torch.randn(4, 8)).float().sum().backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
    optim.step()
    optim.zero_grad()
options = StateDictOptions(full_state_dict=True, cpu_offload=True)
whole = get_model_state_dict(model, options=options)
set_model_state_dict(model, whole if rank == 0 else {},
                     options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
tuple(next(model.parameters()).to_local().shape), len(whole) == (0 if rank else 6)
"""

TENSOR_PARALLEL = """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("tp",))
big = torch.arange(32.0).reshape(8, 4)
rowwise = distribute_tensor(big, mesh, [Shard(0)])
columns = rowwise.redistribute(mesh, [Shard(1)])

class MLP(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(4, 8), torch.nn.Linear(8, 4)
    def forward(self, x):
        return self.down(torch.relu(self.up(x)))

torch.manual_seed(0)
model = MLP()
plain = model(big)
model = parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
out = model(big)
out.sum().backward()
tuple(columns.to_local().shape), torch.allclose(out, plain, atol=1e-5), tuple(model.up.weight.grad.to_local().shape)
"""

PIPELINE = """
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

torch.manual_seed(0)
layers = [torch.nn.Linear(4, 4) for _ in range(world_size)]
stage = PipelineStage(layers[rank], rank, world_size, torch.device("cpu"))
schedule = ScheduleGPipe(stage, n_microbatches=2, loss_fn=torch.nn.functional.mse_loss)
x = torch.ones(4, 4)
losses = []
if rank == 0:
    schedule.step(x)
else:
    out = schedule.step(target=x, losses=losses)
layers[rank].weight.grad is not None, len(losses) == 2 * rank
"""

RPC = """
import os, shutil, tempfile
import torch.distributed.rpc as rpc
folder = [tempfile.mkdtemp() if rank == 0 else None]
dist.broadcast_object_list(folder)
options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{folder[0]}/store")
rpc.init_rpc(f"worker{rank}", rank=rank, world_size=world_size, rpc_backend_options=options)
far = rpc.rpc_sync(f"worker{1 - rank}", torch.add, args=(torch.ones(2), 1))
rpc.shutdown()
dist.barrier()
if rank == 0: shutil.rmtree(folder[0])
far.tolist()
"""

BY_HAND = """
from math import ceil
def average_gradients(model):
    size = float(dist.get_world_size())
    for param in model.parameters():
        dist.all_reduce(param.grad.data, op=dist.ReduceOp.SUM)
        param.grad.data /= size

def run(rank, size):
    tensor = torch.zeros(1)
    if rank == 0:
        tensor += 1
        dist.isend(tensor=tensor, dst=1).wait()
    else:
        dist.irecv(tensor=tensor, src=0).wait()
    group = dist.new_group([0, 1])
    dist.all_reduce(tensor, op=dist.ReduceOp.SUM, group=group)
    torch.manual_seed(1234)
    model = torch.nn.Linear(2, 1)
    model(torch.randn(4, 2)).sum().backward()
    average_gradients(model)
    return tensor.item()
run(dist.get_rank(), dist.get_world_size())
"""


@pytest.mark.parametrize(
    ("script", "told"),
    [
        (DDP, "1"),
        (TRAINER, "True"),
        (FSDP, "((4, 8), True)"),
        (TENSOR_PARALLEL, "((8, 2), True, (4, 4))"),
        (PIPELINE, "(True, True)"),
        (RPC, "[2.0, 2.0]"),
        (BY_HAND, "2.0"),
    ],
    ids=["ddp", "trainer", "fsdp", "tensor_parallel", "pipeline", "rpc", "by_hand"],
)
def test_a_tutorial_runs_as_it_stands(mesh: Any, script: str, told: str) -> None:
    for _ in range(3):  # cells are run again
        cell = SpmdCell(script, f"<tutorial {next(_numbers)}>", mesh.ranks_key)
        assert run_spmd(mesh, cell).shown == {0: told, 1: told}
