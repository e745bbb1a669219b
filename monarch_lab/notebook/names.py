"""What cells are called where a snapshot names them: a kernel's file names of cells hold its pid and a hash."""

from __future__ import annotations

import re
from pathlib import PurePath
from typing import Any

import msgspec
from IPython.core.getipython import get_ipython

from monarch_lab.wire.snapshot import MeshSnapshot

_OP = re.compile(r"(?P<file>.+?):(?P<line>\d+) (?P<source>.*)", re.DOTALL)


def readable(mesh: MeshSnapshot) -> MeshSnapshot:
    """The snapshot with each process's op as "In[3] line 2: y = x @ w", and where each debugger stands as "In[3]"."""
    if mesh.debuggers:
        debuggers = [msgspec.structs.replace(d, file=_file_text(d.file)) for d in mesh.debuggers]
        mesh = msgspec.structs.replace(mesh, debuggers=debuggers)
    if not any(process.op for process in mesh.processes):
        return mesh
    processes = [msgspec.structs.replace(p, op=op_text(p.op)) if p.op else p for p in mesh.processes]
    return msgspec.structs.replace(mesh, processes=processes)


def op_text(op: str) -> str:
    match = _OP.fullmatch(op)
    if match is None:
        return op
    file = match["file"]
    place = _file_text(file)
    return f"{PurePath(file).name if place == file else place} line {match['line']}: {match['source']}"


def _file_text(file: str) -> str:
    shell = get_ipython()
    known = shell.compile.format_code_name(file) if shell is not None else None
    return known[1] if known else file


def cell_number(shell: Any) -> int:
    """Of the cell that runs: newer IPythons count it in ``execution_count`` before it runs, older ones after."""
    return int(shell.displayhook.prompt_count)
