"""Ops on a mesh whose sockets are TCP's."""

from __future__ import annotations

import torch

import monarch_lab as ml


def test_a_mesh_over_tcp_runs_its_ops_and_restarts_a_rank() -> None:
    with ml.local_mesh(name="by_tcp", gpus_per_host=2, device="cpu", socket_type=ml.SocketType.TCP) as mesh:
        with mesh.activate():
            x = torch.ones(3, 3)
            total = (x @ x).reduce("gpu", "sum").sum()
        assert ml.inspect(total, gpu=0).item() == 54
        mesh.slice(gpu=1).restart()
        with mesh.activate():
            again = torch.ones(2).reduce("gpu", "sum")
        assert ml.inspect(again, gpu=1).tolist() == [2, 2]
