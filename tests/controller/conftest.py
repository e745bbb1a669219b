"""A mesh of two hosts for the tests that move values between meshes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import monarch_lab as ml


class _Grid:
    def __init__(self) -> None:
        self.mesh: Any = None

    def get(self) -> Any:
        if self.mesh is None or self.mesh.state != "live":
            self.stop()
            self.mesh = ml.local_mesh(hosts=2, gpus_per_host=2, device="cpu")
        return self.mesh

    def stop(self) -> None:
        if self.mesh is not None:
            self.mesh.exit()


@pytest.fixture(scope="module")
def shared_grid() -> Iterator[_Grid]:
    shared = _Grid()
    yield shared
    shared.stop()


@pytest.fixture
def grid(shared_grid: _Grid) -> Iterator[Any]:
    """A mesh with dims host 2 and gpu 2, not active; what a test leaves failed on it fails the test."""
    mesh = shared_grid.get()
    yield mesh
    if mesh.state == "live":
        mesh.sync()
