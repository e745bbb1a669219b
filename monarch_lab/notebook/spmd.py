"""``%%spmd`` cells: the cell's source runs on each process, in a namespace of the workers that lasts.

Runs on: the main thread.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import re
import sys
import time
from typing import TYPE_CHECKING, Any

from IPython.core.displayhook import DisplayHook
from IPython.core.magic import Magics, cell_magic, magics_class, no_var_expand
from IPython.display import display

from monarch_lab.arguments import Parser, split
from monarch_lab.errors import DetachedError, UsageValueError
from monarch_lab.notebook import spmd_async, tracebacks
from monarch_lab.notebook.cell import say
from monarch_lab.notebook.meshes import Meshes
from monarch_lab.notebook.names import cell_number
from monarch_lab.notebook.output import Front
from monarch_lab.notebook.rich import values
from monarch_lab.notebook.spmd_async import header
from monarch_lab.notebook.spmd_source import names as names_in
from monarch_lab.notebook.spmd_source import parsed

if TYPE_CHECKING:
    from monarch_lab.controller import DeviceMesh

DESCRIPTION = """\
Run the cell on each process of the mesh, as a script under torchrun would: in a namespace that lasts
from cell to cell, with rank, local_rank, world_size, device, mesh_coordinates, torch and dist
(torch.distributed, initialised).

A mesh tensor of the notebook that the cell names is this process's shard there. The last expression is
shown, unless the cell ends with ";". %%spmd[0,1] is short for %%spmd --ranks 0,1."""

_SHORT = re.compile(r"%%spmd\[([^\]\n]*)\]")
_FIRST = re.compile(r"%%spmd(\s|$)")
_ASKS_FOR_HELP = re.compile(r"%%spmd\s(.*\s)?(-h|--help)(\s|$)")


def read_first_line(lines: list[str]) -> list[str]:
    """For ``ip.input_transformers_cleanup``: ``%%spmd[0,1]`` is no name of a magic that IPython could find, and it
    refuses a cell magic without a body, as with ``--help`` and in an empty cell."""
    if lines and (match := _SHORT.match(lines[0])):
        ranks = match[1].replace(" ", "")
        lines = [f"%%spmd --ranks {ranks or '[]'}{lines[0][match.end() :]}", *lines[1:]]
    if lines and (_ASKS_FOR_HELP.match(lines[0]) or (_FIRST.match(lines[0]) and not "".join(lines[1:]).strip())):
        return [lines[0].rstrip("\n") + "\n", "pass\n"]
    return lines


def seconds(text: str) -> float:
    """For ``type=``: more than 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return value


@functools.cache
def spmd_parser() -> Parser:
    parser = Parser("%%spmd", DESCRIPTION)
    add = parser.add_argument
    add("--name", metavar="NAME", help="the mesh to run on; the current one if not given")
    add(
        "--ranks",
        "-r",
        "--targets",
        "-t",
        metavar="R",
        help="where to run, as 3, -1, 0,2-5, ::2, gpu=0; all if not given",
    )
    add("--dim", action="append", default=[], metavar="D=R", help="where to run, by a dim of the mesh: gpu=0")
    add("--out", action="append", nargs="+", default=[], metavar="V", help="variables to have as mesh tensors")
    add("--async", "--noblock", "-a", dest="no_wait", action="store_true", help="do not wait; gives an AsyncResult")
    add("-o", dest="handle", metavar="V", help="a variable for the cell's AsyncResult: result(), done(), await")
    add("--time", action="store_true", help="show how long the cell took")
    add("--timeout", type=seconds, default=None, metavar="S", help="interrupt it after S seconds")
    add("--debug", "-d", action="store_true", help="stop at its first line, and where an error leaves it")
    add("--quiet", "-q", action="store_true", help="leave out the line that says how the cell ran")
    return parser


@magics_class
class SpmdMagics(Magics):
    shell: Any

    def __init__(self, shell: Any, meshes: Meshes, front: Front) -> None:
        super().__init__(shell)
        self._meshes = meshes
        self._front = front

    @no_var_expand
    @cell_magic
    def spmd(self, line: str, cell: str) -> Any:
        """Run the cell on each process of the mesh; ``%%spmd --help`` lists the options."""
        options = spmd_parser().read(split(self.shell.var_expand(line, depth=2), "%%spmd"))
        if options.help:
            print(spmd_parser().format_help().rstrip())
            return None
        code, tree = parsed(self.shell, cell)
        mesh = self._meshes.find(options.name)
        ranks = chosen_ranks(mesh, options)
        text = f"%%spmd {line}\n{cell}"
        source = f"\n{cell}"  # lines count from the magic's own
        # The number that tracebacks name the cell by, and its lines.
        filename = self.shell.compile.cache(source, cell_number(self.shell), raw_code=text)
        run = importlib.import_module("monarch_lab.controller.spmd")
        names = self.shell.user_ns
        work = run.SpmdCell(
            source,
            filename,
            ranks,
            _is_quiet(code),
            {name: names[name] for name in names_in(tree) if _is_mesh_tensor(names.get(name))},
            tuple(name for words in options.out for name in words),
            options.timeout,
            {name for name in names if not name.startswith("_")} - set(self.shell.user_ns_hidden),
            code if code != source else "",
            debug=options.debug,
        )
        if options.no_wait:
            return spmd_async.run(self.shell, self._front, mesh, work, options)
        started = time.monotonic()
        try:
            result = self._run(mesh, run.run_spmd, work)
        except DetachedError as left:
            print(f"{left}; what this cell shows comes when it goes on.")
            return None
        finally:
            if not options.quiet:
                say(header(mesh, ranks, time.monotonic() - started if options.time else None))
        for data, metadata in values(result.shown, result.rich):
            display(data, metadata=metadata, raw=True)
        names.update(result.out)
        if options.handle:
            names[options.handle] = spmd_async.finished(mesh, ranks, result)
        return None

    def _run(self, mesh: DeviceMesh, run: Any, work: Any) -> Any:
        __tracebackhide__ = True
        client = mesh.client
        front = self._front.for_client(client)
        number = client.begin_cell(work.filename)
        try:
            with front.cell(number):
                return run(mesh, work)
        except (KeyboardInterrupt, TimeoutError) as error:
            tracebacks.leave_out_our_frames(error, always=True)
            raise
        finally:
            if mesh.state != "closed":
                client.end_cell(number)


def chosen_ranks(mesh: DeviceMesh, options: argparse.Namespace) -> tuple[int, ...]:
    """Raises UsageError for a rank or dim that the mesh does not have."""
    return mesh.chosen(_ranks_text(options.ranks, options.dim))


def _ranks_text(ranks: str | None, dims: list[str]) -> str | None:
    if ranks is not None and dims:
        raise UsageValueError("%%spmd: --ranks or --dim, not both; --ranks host=1,gpu=0 names two dims")
    for dim in dims:
        if "=" not in dim:
            raise UsageValueError(f"%%spmd: --dim {dim}: write --dim gpu=0")
    return ",".join(dims) if dims else ranks


def _is_quiet(cell: str) -> bool:
    return bool(DisplayHook.semicolon_at_end_of_expression(cell))


def _is_mesh_tensor(value: object) -> bool:
    return bool(getattr(type(value), "is_mesh_tensor", False))


class NameAdvice:
    """For ``post_run_cell``: a name that only the workers' cells have is said to be there."""

    def __init__(self, meshes: Meshes) -> None:
        self._meshes = meshes

    def __call__(self, result: Any) -> None:
        error = result.error_in_exec
        name = getattr(error, "name", None)
        module = sys.modules.get("monarch_lab.controller.spmd")
        # A RemoteException of a worker's NameError is one too, and says it itself.
        if type(error) is not NameError or not name or module is None:
            return
        for mesh in self._meshes.all().values():
            if name in module.worker_names(mesh.client):
                print(
                    f'{name} is a variable of the %%spmd cells of mesh "{mesh.name}": %mesh pull {name} brings it',
                    file=sys.stderr,
                )
                return
