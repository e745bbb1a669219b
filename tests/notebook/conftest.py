from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.fakes import engine
from tests.fakes.shell import Shell


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
