from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from monarch_lab.config import MARK_VARIABLE
from monarch_lab.supervisor import Supervisor
from monarch_lab.transport import platform
from tests.supervisor.recorder import SETTINGS, Recorder, launch_of, mark_of

StartMesh = Callable[..., tuple[Supervisor, Recorder]]


@pytest.fixture
def start_mesh() -> Iterator[StartMesh]:
    """Meshes of fake workers; after the test none of their processes may be left."""
    started: list[Supervisor] = []

    def start(settings=SETTINGS, **changes: object) -> tuple[Supervisor, Recorder]:
        recorder = Recorder()
        supervisor = Supervisor(launch_of(**changes), settings, recorder)
        started.append(supervisor)
        supervisor.start()
        supervisor.wait_ready()
        return supervisor, recorder

    yield start
    for supervisor in started:
        supervisor.stop()
        assert platform.marked(MARK_VARIABLE, mark_of(supervisor)) == []
