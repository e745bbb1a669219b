"""``%mesh sync``: the notebook's local modules importable and current on the workers.

Runs on: the main thread.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from typing import TYPE_CHECKING

from monarch_lab.arguments import Parser
from monarch_lab.errors import UsageValueError
from monarch_lab.notebook.rich import named

if TYPE_CHECKING:
    from monarch_lab.controller import DeviceMesh


def sync_arguments(parser: Parser) -> None:
    parser.add_argument("path", nargs="?", metavar="PATH", help="a folder to import from, or a file in it")
    parser.add_argument("--mesh", metavar="MESH", help="the current mesh if not given")


def sync(mesh: DeviceMesh, arguments: argparse.Namespace) -> None:
    """Raises UsageValueError for a path that is not there, RemoteException with what a module raises on a worker."""
    path = [os.path.abspath(entry) for entry in sys.path]
    if arguments.path is not None:
        given = os.path.abspath(os.path.expanduser(arguments.path))
        if not os.path.exists(given):
            raise UsageValueError(f"%mesh sync: there is no {arguments.path}")
        path.insert(0, given if os.path.isdir(given) else os.path.dirname(given))
    by_rank = importlib.import_module("monarch_lab.controller.spmd").sync_modules(mesh, path)
    lines: dict[str, list[int]] = {}
    for rank, (reloaded, added) in by_rank.items():
        parts = [f"reloaded {', '.join(reloaded)}"] if reloaded else []
        parts += [f"{', '.join(added)} can be imported from"] if added else []
        lines.setdefault("; ".join(parts) or "all modules are current", []).append(rank)
    for text, ranks in lines.items():
        print(f"{named(ranks).capitalize()}: {text}.")
