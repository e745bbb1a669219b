"""``%mesh debug``, ``pm``, ``break`` and ``debugpy``: debuggers of the workers, from the notebook.

Runs on: the main thread.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import linecache
import os
import re
from collections.abc import Iterable, Iterator
from types import CodeType
from typing import TYPE_CHECKING, Any

from monarch_lab.arguments import Parser
from monarch_lab.errors import UsageValueError
from monarch_lab.notebook import tracebacks
from monarch_lab.notebook.rich import named

if TYPE_CHECKING:
    from monarch_lab.controller import DeviceMesh

Arguments = argparse.Namespace
_CELL = re.compile(r"In\[(\d+)\]")
_RANKS = "as 3, -1, 0,2-5, ::2, gpu=0 or all"
_LOOPBACK = "127.0.0.1"


def _controller() -> Any:
    return importlib.import_module("monarch_lab.controller.debugging")  # brings torch


def debug_arguments(parser: Parser) -> None:
    parser.add_argument("ranks", nargs="?", metavar="RANKS", help=f"{_RANKS}; those that wait if not given")
    parser.add_argument("--name", metavar="NAME", help="the mesh; the current one if not given")


def debug(mesh: DeviceMesh, arguments: Arguments) -> None:
    with _said_in_one_line():
        _controller().debug(mesh, arguments.ranks)


@contextlib.contextmanager
def _said_in_one_line() -> Iterator[None]:
    """An interrupt at the prompt."""
    try:
        yield
    except KeyboardInterrupt as error:
        tracebacks.leave_out_our_frames(error, always=True)
        raise


def pm_arguments(parser: Parser) -> None:
    parser.add_argument("rank", nargs="?", metavar="RANK", help="the first that failed if not given")
    parser.add_argument("--name", metavar="NAME", help="the mesh; the current one if not given")
    parser.add_argument("--forget", action="store_true", help="let go of what is kept of the failure, on every rank")


def post_mortem(mesh: DeviceMesh, arguments: Arguments) -> None:
    if arguments.forget:
        _controller().forget_failure(mesh)
        print(f'What mesh "{mesh.name}" kept of its last failure is gone.')
        return
    with _said_in_one_line():
        _controller().post_mortem(mesh, arguments.rank)


def debugpy_arguments(parser: Parser) -> None:
    parser.add_argument("--ranks", "-r", required=True, metavar="R", help=_RANKS)
    parser.add_argument("--name", metavar="NAME", help="the mesh; the current one if not given")


def debugpy(mesh: DeviceMesh, arguments: Arguments) -> None:
    """Prints where to connect, and an entry for VS Code's launch.json."""
    hosts = {p.rank: p.host for p in mesh.status().processes}
    for rank, port in _controller().listen(mesh, arguments.ranks).items():
        print(f"rank {rank} on host {hosts.get(rank, '?')}: debugpy listens at {_LOOPBACK}:{port}; for launch.json:")
        entry = {
            "name": f"rank {rank} of {mesh.name}",
            "type": "debugpy",
            "request": "attach",
            "connect": {"host": _LOOPBACK, "port": port},
            "justMyCode": True,
        }
        print(json.dumps(entry, indent=2))
    print(
        "Every user of this machine can connect there and run code as you, until the process ends: "
        f"%mesh restart --ranks {arguments.ranks} closes it."
    )


# --- breakpoints


def break_arguments(parser: Parser) -> None:
    add = parser.add_argument
    add("where", nargs="*", metavar="WHERE [if COND]", help="FILE:LINE, In[3]:LINE or FUNCTION; the list if not given")
    add("--ranks", "-r", metavar="R", help=f"{_RANKS}; all if not given")
    add("--clear", metavar="N", help="remove one by its number, or all")
    add("--name", metavar="NAME", help="the mesh; the current one if not given")


def set_break(shell: Any, mesh: DeviceMesh, arguments: Arguments) -> None:
    points = mesh.client.breakpoints
    if arguments.clear is not None:
        if arguments.clear != "all" and not arguments.clear.isdecimal():
            raise UsageValueError(f"%mesh break --clear {arguments.clear}: write the number of one, or all")
        gone = points.clear(None if arguments.clear == "all" else int(arguments.clear))
        print(f"Cleared {', '.join(_line(p) for p in gone)}." if gone else "There are no breakpoints.")
        return
    if not arguments.where:
        print("\n".join(_line(p) for p in points.all.values()) or "There are no breakpoints: %mesh break --help")
        return
    where, condition = arguments.where[0], " ".join(arguments.where[2:])
    if len(arguments.where) > 1 and (arguments.where[1] != "if" or not condition):
        raise UsageValueError(f"%mesh break: write {where} if CONDITION (in quotes where it has quotes itself)")
    if condition:
        _check_condition(condition)
    places, function = _read_where(shell, where)
    added = points.add(where, places, function, condition, mesh.chosen(arguments.ranks))
    print(f"{_line(added)}: %mesh break lists them, %mesh break --clear {added.number} removes it.")
    if places and not any(linecache.getlines(file) for file, _ in places):
        print(f"There is no file {places[0][0]} here: it stops where a worker runs one of that name.")


def _line(point: Any) -> str:
    condition = f" if {point.condition}" if point.condition else ""
    return f"breakpoint {point.number} at {point.where}{condition} on {named(point.ranks)}"


def _check_condition(text: str) -> None:
    try:
        compile(text, "<condition>", "eval")
    except SyntaxError as error:
        raise UsageValueError(f"%mesh break: the condition {text!r} is no Python expression: {error.msg}") from None


def _read_where(shell: Any, where: str) -> tuple[list[tuple[str, int]], str]:
    """(files and lines where that may be, "") or ([], a function's name)."""
    file, colon, number = where.rpartition(":")
    if not colon:
        if not all(part.isidentifier() for part in where.split(".")):
            raise UsageValueError(f"%mesh break: {where!r} is no FILE:LINE, In[3]:LINE or FUNCTION")
        return [], where
    if not number.isdecimal() or not int(number) or not file:
        raise UsageValueError(f"%mesh break: {where!r}: after the colon comes a line's number, as in In[3]:4")
    line = int(number)
    if cell := _CELL.fullmatch(file):
        files = _files_of_cell(shell, int(cell[1]))
        if not files:
            raise UsageValueError(f"%mesh break: no cell of this session is {file}")
    else:
        files = [os.path.expanduser(file)]
    lines = {name: _code_lines(name) for name in files}
    if all(known is not None and line not in known for known in lines.values()):
        after = sorted(k for known in lines.values() for k in known or () if k > line)
        near = f"; the next is {after[0]}" if after else ""
        raise UsageValueError(f"%mesh break: line {line} of {file} has no code that could stop{near}")
    return [(name, line) for name, known in lines.items() if known is None or line in known], ""


def _files_of_cell(shell: Any, number: int) -> list[str]:
    """The names under which the kernel compiled it; a ``%%spmd`` cell has two."""
    known = getattr(shell.compile, "_filename_map", {})
    return [name for name, count in known.items() if count == number]


def _code_lines(name: str) -> set[int] | None:
    """The lines where code can stop; None: the file is not here, or no Python."""
    text = "".join(linecache.getlines(name))
    try:
        compiled = compile(text, name, "exec", flags=0x2000) if text else None  # ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    except (SyntaxError, ValueError):
        return None
    return None if compiled is None else set(_lines([compiled]))


def _lines(codes: Iterable[CodeType]) -> Iterable[int]:
    for code in codes:
        yield from (line for _, _, line in code.co_lines() if line)
        yield from _lines(c for c in code.co_consts if isinstance(c, CodeType))
