from __future__ import annotations

import json
import os
import time
from types import SimpleNamespace

import pytest

from monarch_lab.notebook import debugging
from monarch_lab.notebook.magics import SUB_COMMANDS
from monarch_lab.session.found import FoundMesh
from monarch_lab.transport import platform
from monarch_lab.wire.record import MeshRecord, PidRecord
from tests.fakes import engine
from tests.fakes.shell import Shell


def test_a_start_tells_its_stages_and_shows_the_card(shell: Shell) -> None:
    shell.run("%mesh start -n 1")
    assert shell.text == (
        'mesh "mesh": starting the agent: done\n'
        'mesh "mesh": importing torch: done\n'
        'mesh "mesh": starting workers: done\n'
        'mesh "mesh" · live · host=1 × gpu=1 · cpu · 1 worker\n'
        "rank  worker  pid   state  memory  pending  current op\n"
        "0     0.0     4000  idle           0\n"
    )


def test_options_reach_the_session(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    import monarch_lab.session as session

    seen = {}

    def start_local(**options: object) -> object:
        seen.update(options)
        return start(**options)

    start = session.start_local  # type: ignore[attr-defined]
    monkeypatch.setattr(session, "start_local", start_local, raising=False)
    shell.run("%mesh start --name a --hosts 2 --per-host 3 --cpu --env A=1 --env B=x=y")
    seen.pop("on_progress")
    assert seen == {
        "name": "a",
        "hosts": 2,
        "gpus_per_host": 3,
        "device": "cpu",
        "env": {"A": "1", "B": "x=y"},
    }


def test_a_second_start_changes_nothing(started: Shell) -> None:
    mesh = started.mesh()
    started.run("%mesh start -n 4")
    assert started.text == 'Mesh "mesh" is already running (2 workers): nothing was changed. %mesh stop ends it.\n'
    assert started.mesh() is mesh


def test_an_interrupted_start_shows_no_frames_of_ours(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    import monarch_lab.session as session

    def interrupted(**options: object) -> None:
        __tracebackhide__ = True
        raise KeyboardInterrupt

    monkeypatch.setattr(session, "start_local", interrupted, raising=False)
    assert isinstance(shell.run("%mesh start").error_in_exec, KeyboardInterrupt)
    assert shell.text == "KeyboardInterrupt\n"


def test_a_start_after_a_death_says_so_and_starts_afresh(started: Shell) -> None:
    mesh = started.mesh()
    mesh.die("worker 0.1 was killed by SIGKILL")
    started.run("%mesh start")
    assert started.text.startswith('Mesh "mesh" was dead (worker 0.1 was killed by SIGKILL): stopped it.\n')
    assert mesh.state == "closed"
    assert started.mesh().state == "live"


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("%mesh strat", "UsageValueError: %mesh: unknown sub-command 'strat'; did you mean start?"),
        (
            "%mesh xyz",
            "UsageValueError: %mesh: unknown sub-command 'xyz'; there is start, status, stop, list, use, interrupt, "
            "restart, logs, push, pull, stacks, memory, ranks, config, debug, pm, break, debugpy, sync, kill",
        ),
        (
            "%mesh heal",
            "UsageValueError: %mesh heal is not there yet: %mesh restart --ranks R gives ranks that are dead or stuck "
            "other processes",
        ),
        ("%mesh start --hots 2", "UsageValueError: %mesh start: unknown option '--hots'; did you mean --hosts?"),
        ("%mesh start --per-host 0", "UsageValueError: %mesh start: --per-host/-n: must be at least 1, not 0"),
        ("%mesh start --hosts -1", "UsageValueError: %mesh start: --hosts: must be at least 1, not -1"),
        ("%mesh start --hosts two", "UsageValueError: %mesh start: --hosts: 'two' is not a whole number"),
        ("%mesh start --hosts", "UsageValueError: %mesh start: --hosts: expected one argument"),
        ("%mesh start --env A", "UsageValueError: %mesh start: --env: 'A' is not KEY=VALUE"),
        ("%mesh use", "UsageValueError: %mesh use: the following arguments are required: NAME"),
        ("%mesh use mehs", "UsageKeyError: No mesh is named 'mehs'; did you mean mesh?"),
        ("%mesh stop a b", "UsageValueError: %mesh stop: unknown argument 'b'; there is --help, --all"),
        ("%mesh stop mesh --all", "UsageValueError: %mesh stop: a NAME or --all, not both"),
        ("%mesh stop 'mesh", 'UsageValueError: %mesh: no closing quotation in "stop \'mesh"'),
        ("%%mesh --nmae x\n1", "UsageValueError: %%mesh: unknown option '--nmae'; did you mean --name?"),
        ("%%mesh --name x\n1", "UsageKeyError: No mesh is named 'x'; there is mesh"),
        ("%%spmd --rnaks 0\n1", "UsageValueError: %%spmd: unknown option '--rnaks'; did you mean --ranks?"),
        ("%%spmd --timeout soon\n1", "UsageValueError: %%spmd: --timeout: 'soon' is not a number of seconds above 0"),
        ("%%spmd --timeout 0\n1", "UsageValueError: %%spmd: --timeout: '0' is not a number of seconds above 0"),
        (
            "%%spmd --ranks 0 --dim gpu=0\n1",
            "UsageValueError: %%spmd: --ranks or --dim, not both; --ranks host=1,gpu=0 names two dims",
        ),
        ("%%spmd --dim gpu\n1", "UsageValueError: %%spmd: --dim gpu: write --dim gpu=0"),
        ("%%spmd --name x\n1", "UsageKeyError: No mesh is named 'x'; there is mesh"),
        (
            "%mesh push nothing_of_it",
            "UsageKeyError: %mesh push: the notebook has no variable 'nothing_of_it'; there is no name like it",
        ),
    ],
)
def test_a_fault_is_one_sentence(started: Shell, line: str, sentence: str) -> None:
    result = started.run(line)
    assert started.text == sentence + "\n"
    assert not result.success


@pytest.mark.parametrize("line", ["%mesh", "%mesh list", "%mesh stop --all"])
def test_without_a_mesh_the_next_step_is_said(shell: Shell, line: str) -> None:
    shell.run(line)
    assert shell.text == "No mesh is running: type %mesh start\n"


@pytest.mark.parametrize("line", ["%mesh stop", "%mesh interrupt", "%mesh status a", "%mesh use a"])
def test_what_needs_a_mesh_says_there_is_none(shell: Shell, line: str) -> None:
    assert not shell.run(line).success
    assert "type %mesh start" in shell.text
    assert shell.text.count("\n") == 1


def test_several_meshes_are_listed_chosen_and_stopped(started: Shell) -> None:
    started.run("%mesh start --name b -n 3")
    started.run("%mesh list")
    assert started.text == (
        '  mesh "mesh" · live · host=1 × gpu=2 · cpu · 2 workers\n'
        '* mesh "b" · live · host=1 × gpu=3 · cpu · 3 workers\n'
    )
    started.run("%mesh use mesh")
    assert started.text == 'Cells run on mesh "mesh" (2 workers) now.\n'
    started.run("%mesh stop b")
    assert started.text == 'Stopped mesh "b" (3 workers).\n'
    started.run("%mesh start --name c")
    started.run("%mesh stop --all")
    assert started.text == 'Stopped mesh "mesh" (2 workers), mesh "c" (2 workers).\n'


def test_a_mesh_made_in_python_is_the_current_one_if_it_is_alone(shell: Shell) -> None:
    shell.run("import monarch_lab.session as session\nm = session.start_local(name='made')")
    shell.run("%%mesh\n1;")
    assert shell.text == 'controller · mesh "made" · 2 workers\n'
    shell.run("m = session.start_local(name='other')")
    shell.run("%%mesh\n1;")
    assert shell.text == "UsageValueError: No mesh is current: type %mesh use NAME, one of made, other\n"


def test_interrupt_goes_to_the_workers(started: Shell) -> None:
    started.run("%mesh interrupt")
    assert started.text == 'Interrupted the workers of mesh "mesh".\n'
    assert started.mesh().client.log == ["interrupt"]


def test_debugpy_prints_where_to_connect_and_an_entry_for_vs_code(
    started: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(debugging, "_controller", lambda: SimpleNamespace(listen=lambda mesh, ranks: {1: 5678}))
    started.run("%mesh debugpy --ranks 1")
    first, _, rest = started.text.partition("\n")
    assert first.startswith("rank 1 on host ") and "debugpy listens at 127.0.0.1:5678" in first
    entry, _, warning = rest.partition("\n}\n")
    assert json.loads(entry + "}") == {
        "name": "rank 1 of mesh",
        "type": "debugpy",
        "request": "attach",
        "connect": {"host": "127.0.0.1", "port": 5678},
        "justMyCode": True,
    }
    assert warning == (
        "Every user of this machine can connect there and run code as you, until the process ends: "
        "%mesh restart --ranks 1 closes it.\n"
    )
    started.run("%mesh debugpy")
    assert len(started.text.splitlines()) == 1 and "--ranks" in started.text


@pytest.mark.parametrize("name", SUB_COMMANDS)
def test_each_sub_command_has_help(shell: Shell, name: str) -> None:
    assert shell.run(f"%mesh {name} --help").success
    assert shell.text.startswith(f"usage: %mesh {name}")
    shell.run("%mesh --help")
    assert f"\n  {name} " in shell.text


def test_cells_have_help(shell: Shell) -> None:
    for cell in ("%%mesh --help", "%%mesh -h\nx = 1"):
        assert shell.run(cell).success
        assert shell.text.startswith("usage: %%mesh [-h] [--name NAME]")
        for option in ("--time", "--quiet", "--async", "--stream", "--coalesce"):
            assert option in shell.text
    shell.run("%%mesh?")
    assert "Start, look at and stop meshes" in shell.text


def test_ranks_are_restarted_and_killed(started: Shell) -> None:
    mesh = started.mesh()
    started.run("%mesh restart --ranks 1")
    assert started.text == 'Restarted rank 1 of mesh "mesh": what it held is gone, the other ranks keep theirs.\n'
    started.run("%mesh restart mesh")
    assert started.text == 'Restarted ranks 0, 1 of mesh "mesh": what they held is gone.\n'
    started.run("%mesh kill --ranks gpu=0")
    assert started.text == 'Killed rank 0 of mesh "mesh".\n'
    assert mesh.acted == ["restart (1,)", "restart (0, 1)", "kill (0,)"]


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        (
            "%mesh kill",
            "UsageValueError: %mesh kill: say which, as in --ranks 2 (or --ranks all; %mesh stop ends the mesh)",
        ),
        ("%mesh restart --ranks 7", "'7': there is no rank 7; ranks are 0 to 1 (or -2 to -1)"),
        ("%mesh restart nomesh", "UsageKeyError: No mesh is named 'nomesh'; did you mean mesh?"),
    ],
)
def test_ranks_that_cannot_be_meant_are_refused(started: Shell, line: str, sentence: str) -> None:
    started.run(line)
    assert sentence in started.text


def found_mesh(name: str, kernel: PidRecord, **labels: str) -> FoundMesh:
    record = MeshRecord(name, "started", kernel, PidRecord(5, 5), "", "", 2, 1, "cpu", labels, time.monotonic(), [])
    return FoundMesh(record, "/nowhere", "live")


def test_meshes_of_other_kernels_are_listed_as_such(started: Shell) -> None:
    own = PidRecord(os.getpid(), platform.start_time(os.getpid()) or 0)
    engine.found[:] = [found_mesh("mesh", own, team="blue"), found_mesh("far", PidRecord(4242, 1), team="red")]
    started.run("%mesh list")
    assert started.text == (
        '* mesh "mesh" · live · host=1 × gpu=2 · cpu · 2 workers · team=blue\n'
        "Of other kernels (they cannot be used here; monarch-lab stop NAME in a shell ends one):\n"
        '  mesh "far" · live · host=2 × gpu=1 · cpu · 2 workers · kernel 4242 · 0 s · team=red\n'
    )
    started.run("%mesh stop")
    del engine.found[0]
    started.run("%mesh list")
    assert started.text.startswith("No mesh of this notebook is running: type %mesh start\nOf other kernels")
    for line in ("%mesh use far", "%mesh stop far", "%%mesh --name far\n1"):
        assert not started.run(line).success
        assert "Mesh 'far' belongs to another kernel (process 4242), which alone can use it" in started.text
        assert started.text.count("\n") == 1


def test_an_spmd_cell_tells_its_options(shell: Shell) -> None:
    assert shell.run("%%spmd --help").success
    assert shell.text.startswith("usage: %%spmd ") and "--timeout S" in shell.text and "%%spmd[0,1]" in shell.text


def test_an_spmd_cell_without_a_mesh_says_there_is_none(shell: Shell) -> None:
    assert not shell.run("%%spmd\nrank").success
    assert shell.text == "UsageValueError: No mesh is running: type %mesh start\n"


@pytest.mark.parametrize(
    ("cell", "line"),
    [
        ("%%px --targets 0 -a\n1", "%%spmd --targets 0 -a"),
        ("%px 1 + 1", "%%spmd 1 + 1"),
        ("%%rank [0,1]\n1", "%%spmd[0,1]"),
        ("%%distributed\n1", "%%spmd"),
        ("%dist_init --num-processes 4 --gpu-ids 0,1", "%mesh start --per-host 4"),
        ("%dist_init -n 2", "%mesh start --per-host 2"),
        ("%dist_shutdown", "%mesh stop"),
    ],
)
def test_a_magic_of_another_tool_is_answered_with_ours(shell: Shell, cell: str, line: str) -> None:
    shell.run(cell)
    assert str(shell.error) == f"{cell.split()[0]} is no magic of monarch_lab: write {line} here"


def test_a_magic_that_another_tool_has_registered_stays_its_own(bare: Shell) -> None:
    bare.ip.register_magic_function(lambda line, cell: print("theirs"), "cell", "px")
    bare.run("%load_ext monarch_lab")
    bare.run("%%px\n1")
    assert bare.text == "theirs\n"
    bare.ip.register_magic_function(lambda line, cell: print("later"), "cell", "rank")
    bare.run("%unload_ext monarch_lab")
    tables = bare.ip.magics_manager.magics
    assert "px" in tables["cell"] and tables["cell"].pop("rank") and tables["cell"].pop("px")
    assert "distributed" not in tables["cell"] and "dist_init" not in tables["line"]
