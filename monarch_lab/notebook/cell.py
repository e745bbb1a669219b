"""One ``%%mesh`` cell: what happens around its body.

The mesh is active, the workers know which cell their output belongs to, and the cell ends when its own ops have:
their errors are this cell's errors.

Runs on: the main thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import linecache
import sys
import time
from dataclasses import dataclass
from types import CodeType, TracebackType
from typing import TYPE_CHECKING, Any, Literal

from IPython.display import display

from monarch_lab.arguments import Parser, split
from monarch_lab.errors import DetachedError, DeviceException, RemoteException
from monarch_lab.notebook import tracebacks
from monarch_lab.notebook.interrupts import AwaitInterrupts
from monarch_lab.notebook.meshes import Meshes, workers
from monarch_lab.notebook.output import Front
from monarch_lab.notebook.transform import MarkFirstLine

if TYPE_CHECKING:
    from monarch_lab.controller import DeviceMesh

DESCRIPTION = """\
Run the cell with the mesh active: what it makes and computes is on the workers.

The cell is ordinary PyTorch. It ends when its own ops have ended, so that their errors, prints and
breakpoints belong to it. The last expression is shown, unless the cell ends with ";"."""


@dataclass(frozen=True, slots=True)
class CellOptions:
    name: str | None
    is_timed: bool
    is_quiet: bool
    is_async: bool
    is_coalesced: bool = False
    stream: str | None = None


@functools.cache
def cell_parser() -> Parser:
    parser = Parser("%%mesh", DESCRIPTION)
    parser.add_argument("--name", metavar="NAME", help="the mesh to run on; the current one if not given")
    parser.add_argument("--stream", metavar="S", help="run its ops on this stream of the workers, beside the others")
    parser.add_argument("--time", action="store_true", help="show how long the cell took, its ops included")
    parser.add_argument("--quiet", "-q", action="store_true", help="leave out the line that says how the cell ran")
    parser.add_argument("--async", "-a", dest="no_wait", action="store_true", help="do not wait for the cell's ops")
    parser.add_argument("--coalesce", action="store_true", help="send what the cell issues as one, when it ends")
    return parser


def read_options(line: str) -> CellOptions:
    found = cell_parser().read(split(line, "%%mesh"))
    return CellOptions(found.name, found.time, found.quiet, found.no_wait, found.coalesce, found.stream)


class CellRunner:
    """What transformed cells call (see transform.py)."""

    def __init__(self, shell: Any, meshes: Meshes, front: Front, marked: MarkFirstLine) -> None:
        self._shell = shell
        self._meshes = meshes
        self._front = front
        self._marked = marked

    def __call__(self, line: str) -> MeshCell:
        code = sys._getframe(1).f_code  # noqa: SLF001
        name = self._name_source(code.co_filename)
        options = read_options(self._shell.var_expand(line, 1))
        return MeshCell(options, self._meshes.find(options.name), self._front, name, code)

    def show(self, value: object) -> None:
        """The cell's last expression."""
        # %%timeit runs the body many times and shows nothing.
        if not sys._getframe(1).f_code.co_filename.startswith("<magic-timeit"):  # noqa: SLF001
            sys.displayhook(value)

    def _name_source(self, filename: str) -> str:
        """Give tracebacks the cell as the user wrote it; the cell's name."""
        source = self._marked.source
        known = self._shell.compile.format_code_name(filename)
        if known is None and filename.startswith("<"):  # under %%time: no one keeps the source
            linecache.cache[filename] = (0, None, ["\n", *source[1:]], filename)
        lines = linecache.getlines(filename)
        if lines and source:
            lines[0] = f"# {source[0]}"  # still Python, for whoever parses it to underline an expression
        return known[1] if known else filename


class MeshCell:
    """``with`` around a cell's body."""

    def __init__(self, options: CellOptions, mesh: DeviceMesh, front: Front, name: str, code: CodeType) -> None:
        self._options = options
        self._mesh = mesh
        self._front = front.for_client(mesh.client)
        self._name = name
        self._interrupts = AwaitInterrupts(code)
        self._leave = contextlib.ExitStack()
        self._started = 0.0

    def __enter__(self) -> None:
        self._mesh.check_alive()
        client = self._mesh.client
        self._started = time.monotonic()
        with contextlib.ExitStack() as entered:
            entered.enter_context(self._interrupts)
            number = client.begin_cell(self._name)
            entered.callback(client.end_cell, number)
            entered.enter_context(self._front.cell(number))
            entered.enter_context(self._mesh.activate())
            if self._options.is_coalesced:
                from monarch_lab.controller import coalescing

                entered.enter_context(coalescing())
            if self._options.stream is not None:
                entered.enter_context(self._mesh.activate_stream(self._options.stream))
            self._leave = entered.pop_all()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> Literal[False]:
        __tracebackhide__ = True  # IPython leaves the frame out
        is_cancelled = isinstance(error, asyncio.CancelledError) and self._interrupts.was_heard
        is_interrupted = is_cancelled or isinstance(error, KeyboardInterrupt)
        with self._leave:
            failure = self._end(error is not None, is_interrupted)
        if not self._options.is_quiet:
            say(self._header())
        if error is None:
            if failure is not None:
                tracebacks.leave_out_our_frames(failure, always=True)
                raise failure
            return False
        if failure is not None and _is_news(failure, error):
            tracebacks.print_before(failure, "An op that this cell issued before failed on the workers:")
        if is_cancelled:
            interrupt = KeyboardInterrupt()
            tracebacks.leave_out_our_frames(interrupt, always=True)
            raise interrupt.with_traceback(error.__traceback__) from None
        tracebacks.leave_out_our_frames(error)
        return False

    def _end(self, is_failing: bool, is_interrupted: bool) -> BaseException | None:
        """Wait for the cell's ops; what they failed with, to be raised when the cell was left."""
        client = self._mesh.client
        if self._mesh.state == "closed":  # the cell stopped the mesh itself
            return None
        if is_interrupted:
            client.stop_cell()  # ends within the bound of Timeouts.prompt_back
            return None
        if self._options.is_async and not is_failing:
            return None
        try:
            client.sync()
        except DetachedError as left:
            print(f"{left}; what this cell sent is waited for there.")
            return None
        except (Exception, KeyboardInterrupt) as failure:
            return failure
        return None

    def _header(self) -> str:
        parts = ["controller", f'mesh "{self._mesh.name}"', workers(self._mesh)]
        if self._options.stream is not None:
            parts.append(f'stream "{self._options.stream}"')
        if self._options.is_async:
            parts.append("not waited for")
        if self._options.is_timed:
            parts.append(f"{time.monotonic() - self._started:.2f} s")
        return " · ".join(parts)


def _is_news(failure: BaseException, error: BaseException) -> bool:
    """Whether a failure of the ops tells what the cell's own error does not."""
    if isinstance(failure, KeyboardInterrupt) or failure is error:
        return False
    if isinstance(error, RemoteException | DeviceException):  # it came first; what follows from it is no news
        return isinstance(failure, DeviceException) and str(error) != str(failure)
    return True


def say(header: str) -> None:
    """The line that says how a cell ran."""
    html = f'<small style="opacity: 0.6">{header.replace("&", "&amp;").replace("<", "&lt;")}</small>'
    display({"text/plain": header, "text/html": html}, raw=True)
