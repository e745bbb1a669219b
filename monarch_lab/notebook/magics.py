"""``%mesh SUBCOMMAND`` and ``%%mesh``: a table of sub-commands, each a few lines over the meshes.

Runs on: the main thread.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import inspect
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from IPython.core.magic import Magics, line_cell_magic, magics_class, no_var_expand
from IPython.display import display

from monarch_lab.arguments import HELP, Parser, assignment, count, lines_number, split, suggestion
from monarch_lab.errors import UsageValueError
from monarch_lab.notebook import debugging, inspecting, sending, status, syncing, tracebacks
from monarch_lab.notebook.cell import cell_parser
from monarch_lab.notebook.elsewhere import NOT_YET
from monarch_lab.notebook.meshes import DEFAULT_NAME, NONE_RUNS, Meshes, workers
from monarch_lab.notebook.names import cell_number, readable
from monarch_lab.notebook.progress import StartProgress
from monarch_lab.notebook.rich import named
from monarch_lab.notebook.transform import QUIET, SHOWN

if TYPE_CHECKING:
    from monarch_lab.controller import DeviceMesh

Arguments = argparse.Namespace
_LOOK_S = 0.2


@dataclass(frozen=True, slots=True)
class SubCommand:
    name: str
    does: str
    run: Callable[[Any, Arguments], None]
    add_arguments: Callable[[Parser], None] = lambda parser: None

    def parser(self) -> Parser:
        parser = Parser(f"%mesh {self.name}", self.does)
        self.add_arguments(parser)
        return parser


def _start_arguments(parser: Parser) -> None:
    add = parser.add_argument
    add("--name", default=DEFAULT_NAME, metavar="NAME", help=f"what to call it; {DEFAULT_NAME!r} if not given")
    add("--hosts", type=count, default=1, metavar="H", help="hosts (all of them this machine); 1 if not given")
    add(
        "--per-host",
        "-n",
        type=count,
        default=None,
        metavar="G",
        help="workers on each host; one for each GPU, or 2 without a GPU, if not given",
    )
    add("--cpu", action="store_true", help="workers on the CPU, even where there are GPUs")
    add("--env", type=assignment, action="append", default=[], metavar="K=V", help="a variable of the workers")


def _status_arguments(parser: Parser) -> None:
    parser.add_argument("name", nargs="?", metavar="NAME", help="the current mesh if not given")
    parser.add_argument("--live", action="store_true", help="a view that keeps itself current")


def _stop_arguments(parser: Parser) -> None:
    parser.add_argument("name", nargs="?", metavar="NAME", help="the current mesh if not given")
    parser.add_argument("--all", action="store_true", help="every mesh of this notebook")


def _use_arguments(parser: Parser) -> None:
    parser.add_argument("name", metavar="NAME", help="the mesh that cells run on from now")


def _logs_arguments(parser: Parser) -> None:
    add = parser.add_argument
    add("name", nargs="?", metavar="NAME", help="the current mesh if not given")
    add("--ranks", "-r", metavar="R", help="as 3, -1, 0,2-5, ::2, gpu=0; all if not given")
    add("--follow", "-f", action="store_true", help="go on with what is written, until the mesh ends or you interrupt")
    add("--grep", "-g", metavar="P", help="only lines in which this pattern (a regular expression) is found")
    add("--lines", "-n", type=lines_number, default=20, metavar="N", help="the last N of each file; 20; 0: all")


def _restart_arguments(parser: Parser) -> None:
    parser.add_argument("name", nargs="?", metavar="NAME", help="the current mesh if not given")
    parser.add_argument("--ranks", "-r", metavar="R", help="as 3, -1, 0,2-5, ::2, gpu=0; all if not given")


def _kill_arguments(parser: Parser) -> None:
    parser.add_argument("name", nargs="?", metavar="NAME", help="the current mesh if not given")
    parser.add_argument("--ranks", "-r", metavar="R", help="as 3, -1, 0,2-5, ::2, gpu=0 or all")


@magics_class
class MeshMagics(Magics):
    shell: Any

    def __init__(self, shell: Any, meshes: Meshes) -> None:
        super().__init__(shell)
        self._meshes = meshes

    @no_var_expand
    @line_cell_magic
    def mesh(self, line: str, cell: str | None = None) -> None:
        """Start, look at and stop meshes (%mesh), and run cells on them (%%mesh).

        %mesh                      the card of the current mesh
        %mesh start                one worker for each GPU; 2 on the CPU where there is none
        %mesh stop                 end the workers of the current mesh
        %mesh restart --ranks 1    a new process for a rank; the others keep their values
        %mesh stacks, memory       what the workers do and hold now
        %mesh logs --ranks 1       what a worker wrote to its log files
        %mesh list, %mesh use NAME several meshes in one notebook

        %%mesh                     as a cell's first line: the cell runs with the mesh active
        %%spmd                     as a cell's first line: the cell runs on each process
        %mesh push x, %mesh pull y between the notebook and %%spmd cells

        %mesh --help lists the sub-commands, %mesh start --help and %%mesh --help their options.
        """
        if cell is not None:
            self._run_cell(line, cell)
            return
        words = split(self.shell.var_expand(line, depth=2), "%mesh")
        name = words[0] if words else "status"
        if name in HELP:
            print(_overview())
            return
        if name.startswith("-"):  # %mesh --live
            words.insert(0, "status")
            name = "status"
        command = SUB_COMMANDS.get(name)
        if command is None and name in NOT_YET:
            raise UsageValueError(f"%mesh {name} is not there yet: {NOT_YET[name]}")
        if command is None:
            raise UsageValueError(f"%mesh: unknown sub-command {name!r}{suggestion(name, SUB_COMMANDS)}")
        parser = command.parser()
        arguments = parser.read(words[1:])
        if arguments.help:
            print(parser.format_help().rstrip())
            return
        command.run(self, arguments)

    def _run_cell(self, line: str, cell: str) -> None:
        """``%%mesh`` as a function of its text: for ``--help`` and run_cell_magic; see transform.py for the rest."""
        if set(line.split()) & set(HELP):
            print(cell_parser().format_help().rstrip())
            return
        if cell in (SHOWN, QUIET):
            raise UsageValueError(
                "%%mesh cannot run under the magic above it, which takes the cell as plain Python: "
                "put that magic inside the %%mesh cell"
            )
        shell = self.shell
        text = f"%%mesh {line}\n{cell}"
        source = shell.transform_cell(text)
        filename = shell.compile.cache(source, cell_number(shell), raw_code=text)
        tree = shell.transform_ast(shell.compile.ast_parse(source, filename))
        with shell.compile.extra_flags(ast.PyCF_ALLOW_TOP_LEVEL_AWAIT):
            code = shell.compile(tree, filename, "exec")
        if code.co_flags & inspect.CO_COROUTINE:
            raise UsageValueError("await works where %%mesh is the first line of the cell, not under another magic")
        exec(code, shell.user_global_ns, shell.user_ns)

    # sub-commands

    def start(self, arguments: Arguments) -> None:
        name = arguments.name
        there = self._meshes.all()
        same = there.get(name)
        if same is not None and same.state != "dead":
            print(f'Mesh "{name}" is already running ({workers(same)}): nothing was changed. %mesh stop ends it.')
            return
        for mesh in {id(m): m for m in (same, there.get(self._meshes.current)) if m is not None}.values():
            if mesh.state == "dead":
                note = mesh.status().note
                mesh.exit()
                print(f'Mesh "{mesh.name}" was dead{f" ({note})" if note else ""}: stopped it.')
        progress = StartProgress(self.shell, name)
        try:
            mesh = self._meshes.start(
                name,
                progress,
                hosts=arguments.hosts,
                gpus_per_host=arguments.per_host,
                device="cpu" if arguments.cpu else None,
                env=dict(arguments.env) or None,
            )
        except BaseException as error:
            progress.fail()
            if isinstance(error, KeyboardInterrupt):
                tracebacks.leave_out_our_frames(error)
            raise
        progress.show(status.card(readable(mesh.status())))

    def status(self, arguments: Arguments) -> None:
        if not self._meshes.all() and arguments.name is None:
            print(NONE_RUNS)
            return
        mesh = self._meshes.find(arguments.name)
        if arguments.live and hasattr(self.shell, "kernel"):  # a terminal shows no widgets
            from monarch_lab.notebook.widgets import MeshView

            display(MeshView(mesh))
        else:
            display(status.card(readable(mesh.status())), raw=True)

    def list(self, arguments: Arguments) -> None:
        snapshot, found = self._meshes.snapshot(), self._meshes.found()
        print(status.list_text(snapshot, found) if snapshot.meshes or found else NONE_RUNS)

    def use(self, arguments: Arguments) -> None:
        mesh = self._meshes.use(arguments.name)
        print(f'Cells run on mesh "{mesh.name}" ({workers(mesh)}) now.')

    def stop(self, arguments: Arguments) -> None:
        if arguments.all:
            if arguments.name is not None:
                raise UsageValueError("%mesh stop: a NAME or --all, not both")
            print(stopped(self._meshes.stop_all()) or NONE_RUNS)
            return
        mesh = self._meshes.find(arguments.name)
        mesh.exit()
        print(stopped([mesh]))

    def logs(self, arguments: Arguments) -> None:
        mesh = self._meshes.find(arguments.name)
        reader = self._meshes.log_reader(mesh, arguments.ranks, arguments.grep)
        if reader is None:
            print(f'Mesh "{mesh.name}" writes to no files: its output goes where the kernel\'s goes.')
            return
        if arguments.follow:
            with contextlib.suppress(KeyboardInterrupt):  # how one has enough of it
                print_lines(reader.last(arguments.lines, to_the_end=False))
                print_lines(reader.follow(waiting_while(lambda: mesh.state == "live")))
        elif not print_lines(reader.last(arguments.lines)):
            print(
                f'Nothing of that is in the log files of mesh "{mesh.name}". They have what C code wrote, and what a '
                "dead worker wrote last; what Python prints is in its cell."
            )

    def interrupt(self, arguments: Arguments) -> None:
        mesh = self._meshes.find(arguments.name)
        if arguments.ranks is None:
            mesh.interrupt()
            print(f'Interrupted the workers of mesh "{mesh.name}".')
            return
        stuck = mesh.interrupt(arguments.ranks)
        print(f'Interrupted {named(mesh.chosen(arguments.ranks))} of mesh "{mesh.name}".')
        if stuck:
            listed = ",".join(map(str, stuck))
            print(f"{named(stuck).capitalize()} did not stop: %mesh restart --ranks {listed} gives another process.")

    def stacks(self, arguments: Arguments) -> None:
        print(inspecting.stacks_text(self.shell, self._meshes.find(arguments.name), arguments.ranks))

    def memory(self, arguments: Arguments) -> None:
        print(inspecting.memory_text(self._meshes.find(arguments.name), arguments.ranks))

    def ranks(self, arguments: Arguments) -> None:
        print(inspecting.ranks_text(self._meshes.find(arguments.name), arguments.ranks))

    def show_config(self, arguments: Arguments) -> None:
        print(inspecting.config_text(arguments.all))

    def restart(self, arguments: Arguments) -> None:
        mesh = self._meshes.find(arguments.name)
        ranks = mesh.restart(arguments.ranks)
        print(f'Restarted {named(ranks)} of mesh "{mesh.name}": {_what_is_left(mesh, ranks)}.')

    def push(self, arguments: Arguments) -> None:
        sending.push(self.shell, self._meshes.find(arguments.mesh), arguments)

    def pull(self, arguments: Arguments) -> None:
        sending.pull(self.shell, self._meshes.find(arguments.mesh), arguments)

    def debug(self, arguments: Arguments) -> None:
        debugging.debug(self._meshes.find(arguments.name), arguments)

    def pm(self, arguments: Arguments) -> None:
        debugging.post_mortem(self._meshes.find(arguments.name), arguments)

    def set_break(self, arguments: Arguments) -> None:
        debugging.set_break(self.shell, self._meshes.find(arguments.name), arguments)

    def debugpy(self, arguments: Arguments) -> None:
        debugging.debugpy(self._meshes.find(arguments.name), arguments)

    def sync(self, arguments: Arguments) -> None:
        syncing.sync(self._meshes.find(arguments.mesh), arguments)

    def kill(self, arguments: Arguments) -> None:
        mesh = self._meshes.find(arguments.name)
        if arguments.ranks is None:
            raise UsageValueError("%mesh kill: say which, as in --ranks 2 (or --ranks all; %mesh stop ends the mesh)")
        ranks = mesh.kill(arguments.ranks)
        print(f'Killed {named(ranks)} of mesh "{mesh.name}".' if ranks else "No process lives there.")


def print_lines(lines: Iterable[str]) -> int:
    """How many there were."""
    count = 0
    for count, line in enumerate(lines, 1):  # noqa: B007
        print(line, flush=True)
    return count


def waiting_while(goes_on: Callable[[], bool]) -> Callable[[], bool]:
    """For LogReader.follow: a pause, then whether it goes on."""
    pause = threading.Event()

    def wait() -> bool:
        pause.wait(_LOOK_S)
        return goes_on()

    return wait


def _what_is_left(mesh: DeviceMesh, ranks: tuple[int, ...]) -> str:
    if len(ranks) == len(mesh):
        return "what they held is gone"
    return "what it held is gone, the other ranks keep theirs"


def stopped(meshes: list[DeviceMesh]) -> str:
    """What was stopped, as a sentence; "" if nothing was."""
    if not meshes:
        return ""
    return "Stopped " + ", ".join(f'mesh "{mesh.name}" ({workers(mesh)})' for mesh in meshes) + "."


SUB_COMMANDS: dict[str, SubCommand] = {
    row.name: row
    for row in (
        SubCommand("start", "Start a mesh of workers and run cells on it.", MeshMagics.start, _start_arguments),
        SubCommand("status", "Show a mesh: its processes and what they do.", MeshMagics.status, _status_arguments),
        SubCommand("stop", "End the workers of a mesh; what they hold is lost.", MeshMagics.stop, _stop_arguments),
        SubCommand("list", "List the meshes of this notebook, and those of your other kernels.", MeshMagics.list),
        SubCommand("use", "Choose the mesh that cells run on.", MeshMagics.use, _use_arguments),
        SubCommand("interrupt", "Interrupt what the workers run.", MeshMagics.interrupt, inspecting.ranks_arguments),
        SubCommand(
            "restart", "Give ranks new processes; the others keep theirs.", MeshMagics.restart, _restart_arguments
        ),
        SubCommand("logs", "Show what the workers wrote to their log files.", MeshMagics.logs, _logs_arguments),
        SubCommand("push", "Put variables of the notebook into %%spmd cells.", MeshMagics.push, sending.push_arguments),
        SubCommand(
            "pull", "Bring variables of %%spmd cells into the notebook.", MeshMagics.pull, sending.pull_arguments
        ),
        SubCommand("stacks", "Show what the workers' threads do now.", MeshMagics.stacks, inspecting.ranks_arguments),
        SubCommand("memory", "Show what memory the workers hold.", MeshMagics.memory, inspecting.ranks_arguments),
        SubCommand(
            "ranks", "List the ranks: where they are, what they do.", MeshMagics.ranks, inspecting.ranks_arguments
        ),
        SubCommand(
            "config", "List the settings that were changed.", MeshMagics.show_config, inspecting.config_arguments
        ),
        SubCommand("debug", "Go to ranks that wait in a debugger.", MeshMagics.debug, debugging.debug_arguments),
        SubCommand("pm", "Look at the frames of the last failure.", MeshMagics.pm, debugging.pm_arguments),
        SubCommand(
            "break", "Set, list and clear breakpoints of the workers.", MeshMagics.set_break, debugging.break_arguments
        ),
        SubCommand("debugpy", "Open a port for VS Code's debugger.", MeshMagics.debugpy, debugging.debugpy_arguments),
        SubCommand("sync", "Reload changed modules on the workers.", MeshMagics.sync, syncing.sync_arguments),
        SubCommand("kill", "Kill the processes of ranks, as a crash would.", MeshMagics.kill, _kill_arguments),
    )
}


def _overview() -> str:
    lines = ["usage: %mesh SUBCOMMAND [options]", ""]
    lines += [f"  {command.name:<10} {command.does}" for command in SUB_COMMANDS.values()]
    return "\n".join([*lines, "", "%mesh alone is %mesh status; %mesh SUBCOMMAND --help lists the options."])
