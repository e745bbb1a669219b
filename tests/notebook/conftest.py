from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes import engine
from tests.fakes.shell import Shell
from tests.kernel import Kernel

ROOT = str(Path(__file__).parents[2])
SETUP = """
%load_ext monarch_lab
%colors nocolor
%mesh start --cpu
import torch, monarch_lab as ml
"""


@pytest.fixture(scope="session")
def _running_kernel() -> Iterator[Kernel]:
    with Kernel(cwd=ROOT) as kernel:
        yield kernel


@pytest.fixture
def meshed(_running_kernel: Kernel) -> Kernel:
    """A real kernel with a live mesh of two CPU workers, shared by the tests of several files."""
    if _running_kernel.run("ml.meshes()['mesh'].check_alive()") != "ok":
        assert _running_kernel.run(SETUP) == "ok", _running_kernel.errors()
    return _running_kernel


@pytest.fixture
def bare(capsys: pytest.CaptureFixture[str]) -> Iterator[Shell]:
    """A shell without the extension."""
    shell = Shell(capsys)
    engine.install()
    yield shell
    shell.close()
    engine.uninstall()


@pytest.fixture
def shell(bare: Shell) -> Iterator[Shell]:
    """A shell with the extension and no mesh."""
    bare.run("%load_ext monarch_lab")
    yield bare
    bare.run("%unload_ext monarch_lab")


@pytest.fixture
def started(shell: Shell) -> Shell:
    """A shell with a mesh of two (made up) workers."""
    shell.run("%mesh start")
    return shell
