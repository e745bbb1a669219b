"""The sub-commands of ``monarch-lab``: a table, each a few lines over what ``session`` finds."""

from __future__ import annotations

import argparse
import getpass
import os
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass

from monarch_lab import config
from monarch_lab.arguments import Parser, lines_number
from monarch_lab.errors import LaunchError, MeshError, UsageValueError
from monarch_lab.session import found
from monarch_lab.session.found import FoundMesh
from monarch_lab.session.logs import LINES, LogReader, compiled, files_of
from monarch_lab.wire.ranks import parse_ranks

PROG = "monarch-lab"
NONE_RUNS = "No mesh is running."
_LOOK_S = 0.2
Arguments = argparse.Namespace


@dataclass(frozen=True, slots=True)
class Command:
    name: str
    does: str
    run: Callable[[Arguments], int]  # the exit status
    add_arguments: Callable[[Parser], None] = lambda parser: None

    def parser(self) -> Parser:
        parser = Parser(f"{PROG} {self.name}", self.does)
        self.add_arguments(parser)
        return parser


def _list(arguments: Arguments) -> int:
    for sentence in found.clean_up():
        print(sentence)
    meshes = found.find_meshes()
    print(found.table_text(meshes) if meshes else NONE_RUNS)
    return 0


def _stop_arguments(parser: Parser) -> None:
    parser.add_argument("name", nargs="?", metavar="NAME", help="as listed; NAME@KERNEL where several have it")
    parser.add_argument("--all", action="store_true", help="every mesh of this user on this machine")


def _stop(arguments: Arguments) -> int:
    if (arguments.name is None) != arguments.all:
        raise UsageValueError(f"{PROG} stop: a NAME or --all" + (", not both" if arguments.all else ""))
    there = found.find_meshes()
    meshes = there if arguments.all else [found.named(there, arguments.name)]
    if not meshes:
        print(NONE_RUNS)
    who = f"{PROG} stop, pid {os.getpid()} of {getpass.getuser()}"
    failed: list[MeshError] = []
    for mesh in meshes:
        try:
            found.stop(mesh, who, config.load().timeouts)
        except LaunchError as error:
            failed.append(error)
            continue
        print(f'Stopped mesh "{mesh.record.name}" of kernel {mesh.record.kernel.pid}.')
    if failed:
        raise LaunchError("; ".join(map(str, failed)))
    return 0


def _logs_arguments(parser: Parser) -> None:
    add = parser.add_argument
    add("name", metavar="NAME", help="as listed; NAME@KERNEL where several have it")
    add("--ranks", "-r", metavar="R", help="as 3, -1, 0,2-5, ::2, gpu=0; all if not given")
    add("--follow", "-f", action="store_true", help="go on with what is written, until the mesh ends")
    add("--grep", "-g", metavar="P", help="only lines in which this pattern (a regular expression) is found")
    add(
        "--lines", "-n", type=lines_number, default=LINES, metavar="N", help=f"the last N of each file; {LINES}; 0: all"
    )


def _logs(arguments: Arguments) -> int:
    wanted = compiled(arguments.grep)
    mesh = found.named(found.find_meshes(), arguments.name)
    files = files_of(mesh.workers(), _ranks(mesh, arguments.ranks))
    if not files:
        print(f'Mesh "{mesh.record.name}" writes to no files: its output goes where its kernel\'s goes.')
        return 0
    reader = LogReader(files, wanted)
    for line in reader.last(arguments.lines, to_the_end=not arguments.follow):
        print(line)
    if arguments.follow:
        pause = threading.Event()

        def wait() -> bool:
            pause.wait(_LOOK_S)
            return mesh.is_there()

        for line in reader.follow(wait):
            print(line, flush=True)
    return 0


def _agent_arguments(parser: Parser) -> None:
    parser.add_argument("file", nargs="?", metavar="FILE", help="the invitation, of mode 0600; without it: stdin")


def _agent(arguments: Arguments) -> int:
    """Becomes the agent, which loads nothing of what this process has loaded."""
    file = [] if arguments.file is None else [arguments.file]
    os.execv(sys.executable, [sys.executable, "-m", "monarch_lab.agent", "host", *file])


def _ranks(mesh: FoundMesh, text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    return parse_ranks(text, {"host": mesh.record.hosts, "gpu": mesh.record.per_host})


COMMANDS: dict[str, Command] = {
    row.name: row
    for row in (
        Command("list", "List the meshes of this user on this machine, of every kernel.", _list),
        Command("stop", "End every process of a mesh; its kernel is told.", _stop, _stop_arguments),
        Command("logs", "Show what the workers of a mesh wrote to their log files.", _logs, _logs_arguments),
        Command("agent", "Serve as a host of the supervisor that gave an invitation.", _agent, _agent_arguments),
    )
}
