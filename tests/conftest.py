"""One mesh of two CPU workers for all tests that need one, started once."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import monarch_lab as ml

# A shell starts background jobs with SIGINT ignored, and Python then installs no handler: tests of Ctrl-C would wait
# for ever, and what they start would inherit it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


class SharedMesh:
    """Starts the mesh at its first use, and again where a test has brought it down."""

    def __init__(self) -> None:
        self._mesh: Any = None

    def get(self) -> Any:
        if self._mesh is None or self._mesh.state != "live":
            self.stop()
            self._mesh = ml.local_mesh(gpus_per_host=2, device="cpu")
        return self._mesh

    def stop(self) -> None:
        if self._mesh is not None:
            self._mesh.exit()


@pytest.fixture(scope="session")
def shared_mesh() -> Iterator[SharedMesh]:
    shared = SharedMesh()
    yield shared
    shared.stop()


@pytest.fixture
def mesh(shared_mesh: SharedMesh) -> Iterator[Any]:
    """A mesh with dims host 1 and gpu 2, not active; what a test leaves failed on it fails the test."""
    mesh = shared_mesh.get()
    with mesh.activate():
        torch.manual_seed(0)
    yield mesh
    if mesh.state == "live":
        mesh.sync()


@pytest.fixture
def cell(mesh: Any) -> Iterator[Any]:
    """The mesh, active as in a %%mesh cell."""
    with mesh.activate():
        yield mesh
