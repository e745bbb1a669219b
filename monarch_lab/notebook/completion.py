"""Tab completion of the line of ``%mesh``, ``%%mesh`` and ``%%spmd``: sub-commands, options, names of meshes, ranks;
and of the body of ``%%spmd`` cells (far_names.py)."""

from __future__ import annotations

from typing import Any

from IPython.core.completer import CompletionContext, SimpleCompletion, context_matcher

from monarch_lab.arguments import Parser
from monarch_lab.errors import MeshError
from monarch_lab.notebook.cell import cell_parser
from monarch_lab.notebook.far_names import FarNames
from monarch_lab.notebook.magics import SUB_COMMANDS
from monarch_lab.notebook.meshes import Meshes
from monarch_lab.notebook.spmd import spmd_parser

TAKE_A_NAME = {"status", "stop", "use", "interrupt", "restart", "kill", "logs", "stacks", "memory", "ranks"}


_TAKE_RANKS = ("--ranks", "-r", "--targets", "-t", "--from", "--dim")


def _before(context: CompletionContext) -> str:
    """All of the cell that is before the cursor."""
    lines = context.full_text.split("\n")[: context.cursor_line]
    return "\n".join([*lines, context.text_until_cursor])


def _matches(begun: str, found: list[tuple[str, str]]) -> dict[str, object]:
    matches = [SimpleCompletion(text, type=kind) for text, kind in found if text.startswith(begun)]
    return {"completions": matches, "matched_fragment": begun, "suppress": True}


class MeshMatcher:
    """Its ``matcher`` goes into ``ip.Completer.custom_matchers``."""

    def __init__(self, meshes: Meshes, far: FarNames) -> None:
        self._meshes = meshes
        self._far = far

        @context_matcher(identifier="monarch_lab.mesh", priority=200)
        def matcher(context: CompletionContext) -> Any:
            return self._match(context)

        self.matcher = matcher

    def _match(self, context: CompletionContext) -> dict[str, object]:
        before = _before(context)
        if (far := self._far.complete(context.full_text, before)) is not None:
            return _matches(*far)
        line = before.rpartition("\n")[2].lstrip().replace("%%spmd[", "%%spmd --ranks ", 1)
        words = line.split()
        if not words or words[0] not in ("%mesh", "%%mesh", "%%spmd") or line == words[0]:
            return {"completions": []}
        begun = "" if line[-1].isspace() else words.pop()
        if words[-1] in _TAKE_RANKS:
            return _matches(*self._ranks(words, begun))
        # Python names and other magics are no words of this line.
        return _matches(begun, self._candidates(words, begun))

    def _ranks(self, words: list[str], begun: str) -> tuple[str, list[tuple[str, str]]]:
        """The last of several, as in ``0,gpu=``; --dim takes a dim's alone."""
        piece = begun.rpartition(",")[2]
        try:
            mesh = self._meshes.find(words[words.index("--name") + 1] if "--name" in words[:-2] else None)
        except MeshError:
            return piece, []
        dim, equals, _ = piece.partition("=")
        if equals and dim in mesh.sizes:
            return piece, [(f"{dim}={k}", "rank") for k in range(mesh.sizes[dim])]
        dims = [(f"{name}=", "dim") for name in mesh.names]
        ranks = [] if words[-1] == "--dim" else [(text, "rank") for text in ("all", *map(str, range(len(mesh))))]
        return piece, [*ranks, *dims]

    def _candidates(self, words: list[str], begun: str) -> list[tuple[str, str]]:
        names = [(name, "mesh") for name in sorted(self._meshes.all())]
        if words[0] == "%%mesh":
            return names if words[-1] == "--name" else _options(cell_parser(), words)
        if words[0] == "%%spmd":
            return names if words[-1] == "--name" else _options(spmd_parser(), words)
        if len(words) == 1:
            return [(name, "sub-command") for name in SUB_COMMANDS]
        command = SUB_COMMANDS.get(words[1])
        if command is None:
            return []
        options = _options(command.parser(), words)
        return options if begun.startswith("-") or command.name not in TAKE_A_NAME else [*names, *options]


def _options(parser: Parser, words: list[str]) -> list[tuple[str, str]]:
    """What was not given yet, or may be given again."""
    again = ("--env", "--out", "--dim")
    return [(option, "option") for option in parser.options() if option not in words or option in again]
