"""What a %%mesh cell does around its body, in IPython without a kernel and on made-up meshes."""

from __future__ import annotations

import pytest

from monarch_lab.errors import DeviceException, RankFailure, RemoteException, UsageError
from tests.fakes import engine
from tests.fakes.shell import Shell

HEADER = 'controller · mesh "mesh" · 2 workers\n'


def failure(text: str = "no") -> RemoteException:
    return RemoteException(f"ValueError: {text}", {0: RankFailure(0, "ValueError", text)}, cell="In[1]", line=2)


def test_the_mesh_is_active_in_the_body_alone(started: Shell) -> None:
    started.run("from tests.fakes import engine")
    started.run("%%mesh\ninside = list(engine.active)")
    assert started.names["inside"] == [started.mesh()]
    assert engine.active == []


def test_the_cell_waits_for_its_own_ops(started: Shell) -> None:
    number = started.ip.execution_count
    started.run("%%mesh\nx = 1")
    assert started.mesh().client.log == [f"begin In[{number}]", "sync", "end"]


def test_async_does_not_wait(started: Shell) -> None:
    started.run("%%mesh --async\nx = 1")
    assert "sync" not in started.mesh().client.log
    assert started.text == HEADER.replace("\n", " · not waited for\n")


def test_the_last_expression_is_shown_and_kept(started: Shell) -> None:
    result = started.run("%%mesh\nx = 41\nx + 1")
    assert started.text == f"Out[{result.execution_count}]: 42\n{HEADER}"
    assert started.names["_"] == started.names["Out"][result.execution_count] == result.result == 42


@pytest.mark.parametrize("cell", ["%%mesh\n42;", "%%mesh\nx = 42", "%%mesh\nNone", "%%mesh\n42;  # why"])
def test_nothing_is_shown(started: Shell, cell: str) -> None:
    started.run(cell)
    assert started.text == HEADER


def test_await_works_at_the_top_of_the_body(started: Shell) -> None:
    started.run("%%mesh\nimport asyncio\nx = await asyncio.sleep(0, 7)\nx")
    assert ": 7\n" in started.text
    assert started.error is None


def test_magics_and_shell_commands_work_in_the_body(started: Shell) -> None:
    started.run("%%mesh\nwords = !echo one two\n%env MONARCH_TEST=3\nwords")
    assert "['one two']" in started.text
    assert "MONARCH_TEST=3" in started.text


def test_the_header_can_be_left_out_or_timed(started: Shell) -> None:
    started.run("%%mesh --quiet\nx = 1")
    assert started.text == ""
    started.run("%%mesh --time\nx = 1")
    assert started.text.startswith(HEADER.strip() + " · ")
    assert started.text.endswith(" s\n")


def test_the_option_line_takes_variables_as_magics_do(started: Shell) -> None:
    started.run("which = 'mesh'")
    started.run("%%mesh --name {which}\nx = 1")
    assert started.text == HEADER


def test_another_mesh_can_be_named(started: Shell) -> None:
    started.run("%mesh start --name other -n 3")
    started.run("%%mesh --name mesh\nx = 1")
    assert started.text == HEADER
    started.run("%%mesh\nx = 1")
    assert started.text == 'controller · mesh "other" · 3 workers\n'


def test_time_above_measures_the_cell_and_shows_its_value(started: Shell) -> None:
    started.run("%%time\n%%mesh\nx = 2\nx + 1")
    assert ": 3\n" in started.text
    assert "Wall time" in started.text
    started.run("%%time\n%%mesh\nx + 1;")
    assert "Out" not in started.text


def test_capture_above_takes_all_that_the_cell_shows(started: Shell) -> None:
    started.mesh().client.prints = [(0, "stdout", "from a worker\n")]
    started.run("%%capture got\n%%mesh\nprint('here')\n5")
    assert started.text == ""
    started.run("got.show()")
    assert "here\n[0.0] from a worker\n" in started.text
    assert "5" in started.text


def test_timeit_above_shows_nothing_of_the_body(started: Shell) -> None:
    started.run("%%timeit -n1 -r2\n%%mesh -q\n5")
    assert "per loop" in started.text
    assert "Out" not in started.text


def test_under_a_magic_that_takes_plain_python_nothing_runs(started: Shell) -> None:
    started.run("%%prun\n%%mesh\nran = True")
    assert "put that magic inside the %%mesh cell" in started.text
    assert "ran" not in started.names


def test_it_runs_as_a_function_of_its_text(started: Shell) -> None:
    started.run("get_ipython().run_cell_magic('mesh', '', 'y = 3\\ny')")
    assert ": 3\n" + HEADER in started.text
    started.run("get_ipython().run_cell_magic('mesh', '', 'await y')")
    assert isinstance(started.error, UsageError)
    assert "first line of the cell" in started.text


def test_no_mesh_is_one_sentence(shell: Shell) -> None:
    shell.run("%%mesh\nran = True")
    assert shell.text == "UsageValueError: No mesh is running: type %mesh start\n"
    assert "ran" not in shell.names


def test_a_dead_mesh_is_one_sentence(started: Shell) -> None:
    started.mesh().die("worker 0.1 was killed by SIGKILL")
    started.run("%%mesh\nran = True")
    assert isinstance(started.error, DeviceException)
    assert started.text.endswith('Mesh "mesh" is dead: worker 0.1 was killed by SIGKILL. Type %mesh start\n')
    assert started.text.count("\n") == 1
    assert "ran" not in started.names


def test_a_failed_op_fails_the_cell(started: Shell) -> None:
    started.mesh().client.fails = [failure()]
    result = started.run("%%mesh\nx = 1")
    assert not result.success
    assert isinstance(result.error_in_exec, RemoteException)
    assert engine.active == []
    assert started.run("%%mesh\nx").success


def test_the_users_error_is_the_cells_and_the_ops_are_still_waited_for(started: Shell) -> None:
    result = started.run("%%mesh\n1/0")
    assert isinstance(result.error_in_exec, ZeroDivisionError)
    assert started.mesh().client.log[1:] == ["sync", "end"]
    assert engine.active == []


def test_an_op_that_failed_before_the_users_error_is_shown_before_it(started: Shell) -> None:
    started.mesh().client.fails = [failure("first cause")]
    result = started.run("%%mesh\nint('x')")
    assert type(result.error_in_exec) is ValueError
    shown = started.text
    assert shown.index("An op that this cell issued before failed") >= 0
    assert shown.index("first cause") > 0
    assert "int('x')" in shown


def test_a_remote_error_that_the_body_met_is_shown_once(started: Shell) -> None:
    started.ip.user_ns["error"] = failure("seen")
    started.mesh().client.fails = [failure("seen")]
    started.run("%%mesh\nraise error")
    assert "issued before" not in started.text


def test_an_interrupt_in_the_body_reaches_the_workers(started: Shell) -> None:
    result = started.run("%%mesh\nraise KeyboardInterrupt")
    assert isinstance(result.error_in_exec, KeyboardInterrupt)
    assert started.mesh().client.log[1:] == ["interrupt", "end"]
    assert started.run("%%mesh\nx = 1").success


def test_an_interrupt_of_the_wait_ends_the_cell(started: Shell) -> None:
    started.mesh().client.fails = [KeyboardInterrupt()]
    result = started.run("%%mesh\nx = 1")
    assert isinstance(result.error_in_exec, KeyboardInterrupt)
    assert "notebook/cell.py" not in started.text
    assert started.run("%%mesh\nx").success


def test_a_cell_may_stop_its_own_mesh(started: Shell) -> None:
    result = started.run("%%mesh\n%mesh stop")
    assert result.success, started.text


def test_out_keeps_no_worker_memory(started: Shell) -> None:
    started.run("from tests.fakes.engine import MeshTensor\nimport weakref, gc")
    started.run("alive = []\ndef made():\n    t = MeshTensor(); alive.append(weakref.ref(t)); return t")
    for cell in ("%%mesh\nmade()", "made()", "%%mesh\n[made(), {'a': made()}]"):
        started.run(cell)
        assert "tensor on the mesh" in started.text
    started.run("gc.collect(); print([ref() for ref in alive])")
    assert started.text == "[None, None, None, None]\n"
    started.run("_")
    assert "only shown" in started.text


def test_a_named_value_is_cached_as_ever(started: Shell) -> None:
    started.run("%%mesh\n[1, 2]")
    assert started.names["_"] == [1, 2]


def test_the_namespace_holds_only_what_the_user_made(bare: Shell) -> None:
    def visible() -> set[str]:
        return {name for name in bare.ip.user_ns if not name.startswith("_") or "monarch" in name}

    before = visible()
    for cell in ("%load_ext monarch_lab", "%mesh start", "%%mesh\nx = 1\nx", "%mesh", "%unload_ext monarch_lab"):
        bare.run(cell)
    assert visible() - before == {"x"}
