"""``%mesh stacks``, ``memory``, ``ranks``, ``config`` and ``interrupt --ranks`` as they read."""

from __future__ import annotations

from pathlib import Path

import pytest
from IPython.core.completer import provisionalcompleter

from tests.fakes.shell import Shell


def test_equal_stacks_are_shown_once(started: Shell) -> None:
    started.run("%mesh stacks")
    step = "MainThread:\n  File /src/train.py:7, in step\n    loss.backward()\n"
    assert started.text == f"On ranks 0, 1:\n{step}"
    started.run("%mesh stacks mesh --ranks 1")
    assert started.text == f"On rank 1:\n{step}"


def test_memory_and_ranks_are_tables(started: Shell) -> None:
    started.mesh().stuck = {1}
    started.run("%mesh memory")
    assert started.text.splitlines() == [
        "rank  process  share of it  mesh tensors  GPU  largest of %%spmd cells",
        "0     300 MiB  100 MiB      4 MiB in 2         model 3 MiB",
        "No answer from rank 1: it has no process, is stopped, or is in C code.",
    ]
    started.run("%mesh start --name b --hosts 2 -n 2")
    started.run("%mesh ranks b -r host=1")
    assert started.text.splitlines() == [
        "rank  host  gpu  host  pid   device  state",
        "2     1     0    h0    4002  cpu     idle",
        "3     1     1    h0    4003  cpu     idle",
    ]


def test_an_interrupt_of_some_ranks_says_who_did_not_stop(started: Shell) -> None:
    started.run("%mesh interrupt -r 0")
    assert started.text == 'Interrupted rank 0 of mesh "mesh".\n' and started.mesh().acted == ["interrupt (0,)"]
    started.mesh().stuck = {1}
    started.run("%mesh interrupt mesh --ranks all")
    assert "Rank 1 did not stop: %mesh restart --ranks 1 gives another process." in started.text


def test_settings_say_where_they_come_from(shell: Shell, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("MONARCH_LAB_ENGINE_FLUSH_OPS", "64")
    file = tmp_path / "monarch_lab.toml"
    file.write_text("warm_pool = 0\n[timeouts]\nbeat = 2\n[engine]\nflush_ops = 3\n")
    shell.run("%mesh config")
    lines = [line.split() for line in shell.text.splitlines()]
    assert ["timeouts.beat", "2.0", str(file)] in lines and ["warm_pool", "0", str(file)] in lines
    assert ["engine.flush_ops", "64", "MONARCH_LAB_ENGINE_FLUSH_OPS"] in lines
    assert "%mesh config --all lists them" in shell.text and "timeouts.lost" not in shell.text
    shell.run("%mesh config --all")
    assert "timeouts.lost" in shell.text and "default" in shell.text
    for text, told in [
        (
            "[timeouts]\nbaet = 2",
            f"timeouts.baet in {file} is not a setting of monarch_lab; did you mean timeouts.beat?",
        ),
        ("warm_pool = 'x'", f"warm_pool = 'x' in {file} is not a valid int"),
        ("warm_pool = 5", f"{file}=5 is too many"),
        ("warm_pool", f"{file} cannot be read: "),
    ]:
        file.write_text(text)
        result = shell.run("%mesh config" if "5" not in text else "from monarch_lab import config; config.load()")
        assert told in shell.text and not result.success


@pytest.mark.parametrize("name", ["stacks", "memory", "ranks", "config", "interrupt"])
def test_each_is_completed_and_guessed(started: Shell, name: str) -> None:
    with provisionalcompleter():
        found = {c.text for c in started.ip.Completer.completions(f"%mesh {name} ", len(f"%mesh {name} "))}
    assert "--help" in found and ("mesh" in found) == (name != "config")
    assert not started.run(f"%mesh {name[:-1]}").success and f"did you mean {name}?" in started.text
