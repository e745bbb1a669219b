"""``%mesh push`` and ``%mesh pull``: between the notebook's variables and those of ``%%spmd`` cells.

Runs on: the main thread.
"""

from __future__ import annotations

import argparse
import importlib
from typing import TYPE_CHECKING, Any

from monarch_lab.arguments import Parser, suggestion
from monarch_lab.errors import UsageKeyError
from monarch_lab.notebook.rich import named

if TYPE_CHECKING:
    from monarch_lab.controller import DeviceMesh

_SPMD = "monarch_lab.controller.spmd"  # brings torch: when it is used, not before


def push_arguments(parser: Parser) -> None:
    parser.add_argument("names", nargs="+", metavar="NAME", help="variables of the notebook")
    parser.add_argument("--ranks", "-r", metavar="R", help="where to, as 3, -1, 0,2-5, ::2, gpu=0; all if not given")
    parser.add_argument("--mesh", metavar="MESH", help="the current mesh if not given")


def pull_arguments(parser: Parser) -> None:
    parser.add_argument("names", nargs="+", metavar="NAME", help="variables of %%%%spmd cells")
    parser.add_argument(
        "--from",
        dest="ranks",
        metavar="R",
        default="0",
        help="of several ranks, as in 0,1 or all, a dict rank -> value; of rank 0 alone if not given",
    )
    parser.add_argument("--mesh", metavar="MESH", help="the current mesh if not given")


def push(shell: Any, mesh: DeviceMesh, arguments: argparse.Namespace) -> None:
    """Raises UsageKeyError for a name that the notebook does not have."""
    names = shell.user_ns
    for name in arguments.names:
        if name not in names:
            known = [known for known in names if not known.startswith("_")]
            near = suggestion(name, known, "no name like it")
            raise UsageKeyError(f"%mesh push: the notebook has no variable {name!r}{near}")
    ranks = mesh.chosen(arguments.ranks)
    importlib.import_module(_SPMD).push(mesh, {name: names[name] for name in arguments.names}, ranks)
    print(f"Pushed {', '.join(arguments.names)} to {named(ranks)}.")


def pull(shell: Any, mesh: DeviceMesh, arguments: argparse.Namespace) -> None:
    """One rank's values as they are; of several, a dict by rank."""
    ranks = mesh.chosen(arguments.ranks)
    values = importlib.import_module(_SPMD).pull(mesh, arguments.names, ranks)
    for name in arguments.names:
        by_rank = {rank: values[rank][name] for rank in ranks}
        shell.user_ns[name] = by_rank if len(ranks) > 1 else by_rank[ranks[0]]
    print(f"Pulled {', '.join(arguments.names)} from {named(ranks)}.")
