"""Names of the workers in the body of a ``%%spmd`` cell: completed, and described for Shift-Tab.

A worker answers beside what it runs, and is waited for half a second at most. The notebook's own variables are not
offered there, but for its mesh tensors. Runs on: the main thread.
"""

from __future__ import annotations

import contextlib
import importlib
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

from IPython.utils.tokenutil import token_at_cursor

from monarch_lab.arguments import split
from monarch_lab.errors import MeshError
from monarch_lab.notebook.meshes import Meshes
from monarch_lab.notebook.spmd import chosen_ranks, read_first_line, spmd_parser

_TOKEN = re.compile(r"(?P<path>(?:[^\W\d]\w*\.)*)(?P<begun>[^\W\d]\w*)?$")
_WORD = re.compile(r"[^\W\d]\w*")


class FarNames:
    def __init__(self, shell: Any, meshes: Meshes) -> None:
        self._shell = shell
        self._meshes = meshes

    def complete(self, cell: str, before: str) -> tuple[str, list[tuple[str, str]]] | None:
        """(what is begun, [(name, kind)]) for a cell with the cursor behind ``before``; None where that is no name in
        the body of a ``%%spmd`` cell, or no worker answers."""
        if not self._is_body(before):
            return None
        line = before.rpartition("\n")[2]
        if line.lstrip().startswith(("%", "!")):
            return None
        match = _TOKEN.search(line)
        assert match is not None
        path, begun = match["path"].rstrip("."), match["begun"] or ""
        if line[: match.start()].endswith((".", "'", '"', "/")):
            return None  # a call's result, a string: not a name that can be followed
        if not path and not begun:
            return None
        told = self._look_up(cell, path, begun)
        if told is None or not told.found:
            return None
        names = dict(told.names)
        if not path:
            names |= {name: "instance" for name in self._of_the_cell(cell, begun)}
        return begun, sorted(names.items())

    def describe(self, cell: str, position: int) -> str | None:
        """Of the name at the cursor; "" where the workers have none; None where the notebook is to answer."""
        if not self._is_body(cell[:position]):
            return None
        name = token_at_cursor(cell, position)
        told = self._look_up(cell, name) if _is_path(name) else None
        return None if told is None else told.text

    def _is_body(self, before: str) -> bool:
        first, newline, _ = before.partition("\n")
        return bool(newline) and re.match(r"%%spmd(\s|\[|$)", first) is not None

    def _look_up(self, cell: str, path: str, prefix: str | None = None) -> Any:
        if "monarch_lab.controller.spmd" not in sys.modules:  # no cell has run: there are no names
            return None
        try:
            options = spmd_parser().read(split(read_first_line(cell.splitlines(keepends=True))[0][6:], "%%spmd"))
            mesh = self._meshes.find(options.name)
            rank = chosen_ranks(mesh, options)[0]
        except (MeshError, IndexError, AttributeError):
            return None
        lookup = importlib.import_module("monarch_lab.controller.lookup")
        return lookup.look_up(mesh.client, rank, path, prefix)

    def _of_the_cell(self, cell: str, begun: str) -> set[str]:
        """What it writes itself, and mesh tensors of the notebook, which are shards there."""
        here = {word for word in _WORD.findall(cell.partition("\n")[2]) if word != begun}
        tensors = {n for n, v in self._shell.user_ns.items() if getattr(type(v), "is_mesh_tensor", False)}
        return {name for name in here | tensors if name.startswith(begun)}


def _is_path(name: str) -> bool:
    return bool(name) and all(part.isidentifier() for part in name.split("."))


@contextlib.contextmanager
def inspecting(shell: Any, far: FarNames) -> Iterator[None]:
    """Shift-Tab in the body of a ``%%spmd`` cell asks the workers."""
    kernel = getattr(shell, "kernel", None)
    if kernel is None:
        yield
        return
    before: Callable[..., Any] = kernel.do_inspect

    def inspect(code: str, cursor_pos: int, detail_level: int = 0, omit_sections: Any = ()) -> Any:
        text = far.describe(code, cursor_pos)
        if text is None:
            return before(code, cursor_pos, detail_level, omit_sections)
        return {"status": "ok", "found": bool(text), "data": {"text/plain": text} if text else {}, "metadata": {}}

    kernel.do_inspect = inspect
    try:
        yield
    finally:
        if vars(kernel).get("do_inspect") is inspect:
            del kernel.do_inspect
