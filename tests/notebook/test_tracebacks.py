"""How errors read in a cell. IPython without colours, so that the texts are whole."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest

from monarch_lab.errors import RankFailure, RemoteException, RemoteFrame, UsageTypeError
from tests.fakes.shell import Shell

RULE = "-" * 75


def cells_file(shell: Shell) -> str:
    """The file name of the cell that runs next with this source, as IPython gives it."""
    return next(iter(reversed(shell.ip.compile._filename_map)))


def remote(shell: Shell, issued_line: int, by_rank: dict[int, RankFailure], text: str) -> Any:
    """What the next wait does: raise a remote error issued at a line of the running cell."""

    def fail(client: Any) -> None:
        __tracebackhide__ = True
        where = RemoteFrame(cells_file(shell), issued_line, "<module>", "")
        raise RemoteException(text, by_rank, cell=where.filename, line=issued_line, issued=(where,))

    return fail


def test_a_remote_error_is_the_users_line_then_the_workers_then_the_ranks(started: Shell) -> None:
    frames = (RemoteFrame("/src/helper.py", 7, "mix", "    return a @ b"),)
    both = {rank: RankFailure(rank, "RuntimeError", "shapes differ", frames) for rank in (0, 1)}
    started.mesh().client.during_sync = remote(started, 3, both, "RuntimeError: shapes differ (on ranks 0, 1)")
    number = started.ip.execution_count
    result = started.run("%%mesh --quiet\nx = 1\ny = 2\nz = 3\nz + 4\n5;")
    assert not result.success
    assert (
        started.text
        == f"""\
{RULE}
RemoteException{"Traceback (most recent call last)".rjust(60)}
Cell In[{number}], line 3
      1 # %%mesh --quiet
      2 x = 1
----> 3 y = 2
      4 z = 3
      5 z + 4

On ranks 0, 1:
File /src/helper.py:7, in mix
----> 7     return a @ b
RuntimeError: shapes differ

RemoteException: RuntimeError: shapes differ (on ranks 0, 1)
"""
    )


def test_different_failures_are_listed_and_equal_ones_folded(started: Shell) -> None:
    by_rank = {
        0: RankFailure(0, "ValueError", "odd"),
        1: RankFailure(1, "KeyError", "'k'"),
        2: RankFailure(2, "ValueError", "odd"),
    }
    started.mesh().client.during_sync = remote(started, 2, by_rank, "ValueError: odd (on ranks 0, 1, 2)")
    started.run("%%mesh -q\nx = 1")
    assert "On ranks 0, 2:\nValueError: odd\n\nOn rank 1:\nKeyError: 'k'\n\nRemoteException: ValueError" in started.text


def test_a_cells_file_name_is_not_shown(started: Shell) -> None:
    def fail(client: Any) -> None:
        __tracebackhide__ = True
        where = RemoteFrame(cells_file(started), 2, "<module>", "")
        by_rank = {0: RankFailure(0, "ValueError", "odd")}
        raise RemoteException(f"ValueError: odd (issued at {where.filename} line 2)", by_rank, issued=(where,))

    started.mesh().client.during_sync = fail
    number = started.ip.execution_count
    started.run("%%mesh -q\nx = 1")
    assert f"RemoteException: ValueError: odd (issued at Cell In[{number}] line 2)" in started.text


def test_a_remote_error_without_a_line_says_what_it_knows(started: Shell) -> None:
    error = RemoteException("ValueError: odd", {1: RankFailure(1, "ValueError", "odd")}, cell="train.py", line=12)
    started.mesh().client.fails = [error]
    started.run("%%mesh -q\nx = 1")
    assert "train.py, line 12\n\nOn rank 1:\nValueError: odd\n" in started.text


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module whose functions raise as ours do: ``refuse`` from within the package, ``call`` for the user's own."""
    import monarch_lab

    module = ModuleType("monarch_lab.tests_only")
    source = "def refuse(error, cause=None):\n    raise error from cause\n"
    exec(compile(source, monarch_lab.__file__.replace("__init__", "tests_only"), "exec"), module.__dict__)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


def test_a_usage_error_points_at_the_users_line(started: Shell, library: ModuleType) -> None:
    started.ip.user_ns.update(refuse=library.refuse, error=UsageTypeError("a local tensor: mesh.replicate(x)"))
    number = started.ip.execution_count
    started.run("%%mesh -q\ndef mix(x):\n    return refuse(error)\nmix(1)")
    assert (
        started.text
        == f"""\
{RULE}
UsageTypeError{"Traceback (most recent call last)".rjust(61)}
Cell In[{number}], line 4
      2 def mix(x):
      3     return refuse(error)
----> 4 mix(1)

Cell In[{number}], line 3, in mix(x)
      2 def mix(x):
----> 3     return refuse(error)

UsageTypeError: a local tensor: mesh.replicate(x)
"""
    )


def test_what_our_code_raised_it_from_is_not_shown(started: Shell, library: ModuleType) -> None:
    started.run("try:\n    refuse(KeyError('inside'))\nexcept NameError: pass")
    try:
        library.refuse(KeyError("inside"))
    except KeyError as error:
        inner = error.with_traceback(error.__traceback__.tb_next)  # type: ignore[union-attr]
    started.ip.user_ns.update(refuse=library.refuse, error=UsageTypeError("no"), inner=inner)
    started.run("refuse(error, inner)")
    assert "UsageTypeError: no" in started.text
    assert "inside" not in started.text


def test_what_the_user_raised_it_from_is_shown(started: Shell) -> None:
    started.run(
        "from monarch_lab import UsageError\ntry:\n    1/0\nexcept Exception as e:\n    raise UsageError('x') from e"
    )
    assert "ZeroDivisionError" in started.text
    assert "UsageError: x" in started.text


def test_verbose_shows_our_frames(started: Shell, library: ModuleType) -> None:
    started.ip.user_ns.update(refuse=library.refuse, error=UsageTypeError("no"))
    started.run("refuse(error)")
    assert "tests_only" not in started.text
    started.run("%xmode Verbose")
    started.run("refuse(error)")
    assert "tests_only.py" in started.text


def test_errors_that_are_not_ours_lose_our_frames_too(started: Shell, library: ModuleType) -> None:
    started.ip.user_ns.update(refuse=library.refuse)
    started.run("%%mesh -q\nrefuse(ZeroDivisionError('far'))")
    assert "tests_only" not in started.text
    assert "----> 2 refuse(ZeroDivisionError('far'))" in started.text


def test_under_time_the_users_lines_are_shown(started: Shell) -> None:
    started.run("%%time\n%%mesh -q\nx = 1\n1/0")
    assert "File <timed exec>:3\n      1 # %%mesh -q\n      2 x = 1\n----> 3 1/0" in started.text


def test_without_the_extension_errors_are_pythons(bare: Shell) -> None:
    bare.run("from monarch_lab import UsageError")
    bare.run("%load_ext monarch_lab")
    bare.run("%unload_ext monarch_lab")
    assert bare.run("hasattr(UsageError, '_render_traceback_')").result is False
