"""``monarch-lab`` in a shell, beside a kernel of another process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

import pytest

from monarch_lab.cli.commands import COMMANDS
from monarch_lab.cli.main import main
from tests.session.conftest import OtherKernel, other_kernel
from tests.supervisor.recorder import ROOT, wait_until

__all__ = ["other_kernel"]
StartKernel = Callable[..., OtherKernel]
Capture = pytest.CaptureFixture[str]


def test_list_shows_the_meshes_of_other_kernels(other_kernel: StartKernel, capsys: Capture) -> None:
    kernel = other_kernel("far", hosts=2, per_host=1)
    assert main(["list"]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if kernel.directory in line)
    assert line.split()[:5] == ["far", "live", "2", "x", "1"] and f"{kernel.pid}" in line and "team=blue" in line


def test_stop_ends_the_one_that_is_named_and_no_other(other_kernel: StartKernel, capsys: Capture) -> None:
    kept, ended = other_kernel("kept"), other_kernel("ended")
    assert main(["stop", "ended"]) == 0
    assert capsys.readouterr().out == f'Stopped mesh "ended" of kernel {ended.pid}.\n'
    assert ended.is_gone() and not kept.is_gone()
    assert ended.says().startswith("lost: it was stopped from outside (monarch-lab stop, pid ")
    assert main(["stop", "ended"]) == 2
    assert "no mesh is named 'ended'" in capsys.readouterr().err


def test_of_two_with_one_name_the_kernel_chooses(other_kernel: StartKernel, capsys: Capture) -> None:
    one, two = other_kernel("twin"), other_kernel("twin")
    assert main(["stop", "twin"]) == 2
    assert f"twin@{one.pid}" in capsys.readouterr().err
    assert main(["stop", f"twin@{two.pid}"]) == 0
    assert two.is_gone() and not one.is_gone()


def test_logs_shows_what_workers_wrote_to_their_files(other_kernel: StartKernel, capsys: Capture) -> None:
    kernel = other_kernel("far")
    for rank, text in ((0, "print first"), (1, "print second"), (1, "print third")):
        kernel.order(rank, text)

    def shown(*words: str) -> list[str]:
        assert main(["logs", "far", *words]) == 0
        return capsys.readouterr().out.splitlines()

    everything = ["[0.0] first", "[0.0 stderr] first", "[0.1] second", "[0.1] third", "[0.1 stderr] second"]
    wait_until(lambda: len(shown()) == 6)
    assert shown()[:5] == everything
    assert shown("--ranks", "-1", "-n", "1") == ["[0.1] third", "[0.1 stderr] third"]
    assert shown("--ranks=gpu=0", "--grep", "irst") == everything[:2]
    assert shown("-g", "nothing") == []


def test_logs_follows_until_the_mesh_ends(other_kernel: StartKernel) -> None:
    kernel = other_kernel("far")
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    words = [sys.executable, "-m", "monarch_lab", "logs", "far", "--follow", "-r", "0"]
    follower = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environ)
    assert follower.stdout is not None
    kernel.order(0, "print now")
    assert sorted(follower.stdout.readline().strip() for _ in range(2)) == ["[0.0 stderr] now", "[0.0] now"]
    assert main(["stop", "far"]) == 0
    assert follower.wait(30) == 0
    follower.stdout.close()


@pytest.mark.parametrize(
    ("words", "text", "status"),
    [
        (["stpo"], "monarch-lab: unknown sub-command 'stpo'; did you mean stop?", 2),
        (["stop"], "monarch-lab stop: a NAME or --all", 2),
        (["stop", "x", "--all"], "monarch-lab stop: a NAME or --all, not both", 2),
        (["stop", "--al"], "monarch-lab stop: unknown option '--al'; did you mean --all?", 2),
        (["logs"], "monarch-lab logs: the following arguments are required: NAME", 2),
        (["logs", "nobody"], "monarch-lab: no mesh is named 'nobody'", 2),
        (["logs", "x", "--grep", "("], "monarch-lab: --grep: '(' is no pattern", 2),
        (["logs", "x", "--lines", "-3"], "must be at least 0, not -3", 2),
    ],
)
def test_what_makes_no_sense_is_one_sentence(words: list[str], text: str, status: int, capsys: Capture) -> None:
    assert main(words) == status
    said = capsys.readouterr()
    assert text in said.err and said.err.count("\n") == 1 and said.out == ""


def test_a_wrong_rank_names_the_valid_ones(other_kernel: StartKernel, capsys: Capture) -> None:
    other_kernel("far")
    assert main(["logs", "far", "--ranks", "7"]) == 2
    assert "there is no rank 7; ranks are 0 to 1" in capsys.readouterr().err


def test_each_sub_command_explains_itself(capsys: Capture) -> None:
    assert main(["--help"]) == 0
    overview = capsys.readouterr().out
    for name, command in COMMANDS.items():
        assert f"  {name}" in overview and command.does in overview
        assert main([name, "--help"]) == 0
        assert f"usage: monarch-lab {name}" in capsys.readouterr().out
    assert main([]) == 2


def test_a_reader_that_has_enough_is_no_error() -> None:
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    line = f"{sys.executable} -m monarch_lab --help | true"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, cwd=ROOT, env=environ)
    assert done.stderr == ""


def test_the_command_line_loads_neither_torch_nor_jupyter() -> None:
    code = "import sys, monarch_lab.cli.main; print([m for m in ('torch', 'IPython', 'numpy') if m in sys.modules])"
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, env=environ)
    assert done.stdout.strip() == "[]", done.stderr


def test_agent_becomes_the_agent_of_a_host() -> None:
    command = [sys.executable, "-m", "monarch_lab", "agent", "/no/such/invitation"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert (
        done.stderr
        == "monarch-lab agent: the invitation /no/such/invitation cannot be read: No such file or directory\n"
    )
