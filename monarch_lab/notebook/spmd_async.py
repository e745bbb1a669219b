"""``%%spmd --async``: the cell returns at once; what it prints and gives, and its error, appear in it when they come.

Runs on: the main thread; the end is shown on the cell's own thread.
"""

from __future__ import annotations

import argparse
import importlib
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from monarch_lab.notebook import tracebacks
from monarch_lab.notebook.cell import say
from monarch_lab.notebook.meshes import workers
from monarch_lab.notebook.output import Front
from monarch_lab.notebook.rich import named, values

if TYPE_CHECKING:
    from monarch_lab.controller import DeviceMesh

_MODULE = "monarch_lab.controller.spmd_async"  # brings torch: when it is used, not before


def run(shell: Any, front_end: Front, mesh: DeviceMesh, work: Any, options: argparse.Namespace) -> Any:
    """The cell's AsyncResult. Raises what an earlier cell that was not waited for failed with."""
    __tracebackhide__ = True
    client = mesh.client
    front = front_end.for_client(client)
    number = client.begin_cell(work.filename)
    started = time.monotonic()

    def on_end(ended: Any) -> None:
        front.settle(number)
        if options.time:
            front.publish(number, {"text/plain": f"{time.monotonic() - started:.2f} s"}, {})
        if isinstance(ended, BaseException):
            front.publish(number, {"text/plain": "\n".join(_told(ended))}, {})
            return
        for data, metadata in values(ended.shown, ended.rich):
            front.publish(number, data, metadata)
        shell.user_ns.update(ended.out)

    try:
        with front.cell(number):
            handle = importlib.import_module(_MODULE).start_spmd(mesh, work, on_end)
    finally:
        client.end_cell(number)
    if options.handle:
        shell.user_ns[options.handle] = handle
    if not options.quiet:
        say(header(mesh, work.ranks, None, "not waited for"))
    return handle


def finished(mesh: DeviceMesh, ranks: tuple[int, ...], result: Any) -> Any:
    """The AsyncResult of a cell that was waited for."""
    return importlib.import_module(_MODULE).finished(mesh, ranks, result)


def header(mesh: DeviceMesh, ranks: Iterable[int], seconds: float | None, note: str = "") -> str:
    """The line that says how the cell ran."""
    ranks = list(ranks)
    parts = ["spmd", f'mesh "{mesh.name}"', workers(mesh)]
    if len(ranks) < len(mesh):
        parts.append(named(ranks))
    if seconds is not None:
        parts.append(f"{seconds:.2f} s")
    return " · ".join([*parts, note] if note else parts)


def _told(error: BaseException) -> list[str]:
    if isinstance(error, tracebacks.MeshError):
        return tracebacks.render(error)
    return [f"{type(error).__name__}: {error}"]
