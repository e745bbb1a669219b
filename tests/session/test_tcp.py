"""Ops on a mesh whose sockets are TCP's."""

from __future__ import annotations

import os
import sys

import torch

import monarch_lab as ml
from monarch_lab import config
from monarch_lab.session.relay import Relay
from monarch_lab.session.session import Session
from monarch_lab.supervisor import MeshLaunch, Supervisor


def test_a_mesh_over_tcp_runs_its_ops_and_restarts_a_rank() -> None:
    launch = MeshLaunch(
        name="by_tcp", hosts=1, per_host=2, device="cpu", seed=0, env={}, python_path=[p for p in sys.path if p],
        cwd=os.getcwd(), socket_type="tcp",
    )  # fmt: skip
    settings, relay = config.load(), Relay(lambda _: None)
    supervisor = Supervisor(launch, settings, relay)
    supervisor.start()
    session = Session(launch, settings, supervisor, relay)
    session.start(None)
    try:
        with session.mesh.activate():
            x = torch.ones(3, 3)
            total = (x @ x).reduce("gpu", "sum").sum()
        assert ml.inspect(total, gpu=0).item() == 54
        session.mesh.slice(gpu=1).restart()
        with session.mesh.activate():
            again = torch.ones(2).reduce("gpu", "sum")
        assert ml.inspect(again, gpu=1).tolist() == [2, 2]
    finally:
        session.mesh.exit()
