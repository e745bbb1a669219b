from __future__ import annotations

import pytest
from IPython.core.completer import provisionalcompleter

from monarch_lab.notebook.magics import SUB_COMMANDS
from tests.fakes.shell import Shell


def offered(shell: Shell, text: str) -> list[str]:
    with provisionalcompleter():
        return [c.text for c in shell.ip.Completer.completions(text, len(text))]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("%mesh ", sorted(SUB_COMMANDS)),
        ("%mesh st", ["stacks", "start", "status", "stop"]),
        ("%mesh start --h", ["--help", "--hosts"]),
        ("%mesh start --hosts 2 --", ["--cpu", "--env", "--help", "--name", "--per-host"]),
        ("%mesh stop m", ["mesh"]),
        ("%mesh use ", ["--help", "mesh"]),
        ("%mesh restart m", ["mesh"]),
        ("%mesh kill --r", ["--ranks"]),
        ("%%mesh --", ["--async", "--coalesce", "--help", "--name", "--quiet", "--stream", "--time"]),
        ("%%mesh --time --n", ["--name"]),
        ("%%mesh --name ", ["mesh"]),
        ("%%spmd --d", ["--debug", "--dim"]),
        ("%%spmd --t", ["--targets", "--time", "--timeout"]),
        ("%%spmd --time --ti", ["--timeout"]),
        ("%%spmd[0,1] --ou", ["--out"]),
        ("%%spmd --name ", ["mesh"]),
        ("%mesh pull x --f", ["--from"]),
        ("%%spmd[", ["0", "1", "all", "gpu=", "host="]),
        ("%%spmd[0,", ["0", "1", "all", "gpu=", "host="]),
        ("%%spmd --name mesh -t a", ["all"]),
        ("%%spmd --dim ", ["gpu=", "host="]),
        ("%%spmd --ranks gpu=", ["gpu=0", "gpu=1"]),
        ("%mesh restart --ranks g", ["gpu="]),
    ],
)
def test_a_line_is_completed(started: Shell, text: str, expected: list[str]) -> None:
    assert sorted(offered(started, text)) == expected


def test_the_body_of_a_cell_is_completed_as_python(started: Shell) -> None:
    started.run("number_of_things = 3")
    assert "number_of_things" in offered(started, "%%mesh\nx = 1\nnumber_of_th")
    assert "number_of_things" in offered(started, "number_of_th")
