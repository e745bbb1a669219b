"""Tab completion of the line of ``%mesh``, ``%%mesh`` and ``%%spmd``: sub-commands, options, names of meshes."""

from __future__ import annotations

from typing import Any

from IPython.core.completer import CompletionContext, SimpleCompletion, context_matcher

from monarch_lab.arguments import Parser
from monarch_lab.notebook.cell import cell_parser
from monarch_lab.notebook.magics import SUB_COMMANDS
from monarch_lab.notebook.meshes import Meshes
from monarch_lab.notebook.spmd import spmd_parser

TAKE_A_NAME = {"status", "stop", "use", "interrupt", "restart", "kill", "logs", "stacks", "memory", "ranks"}


class MeshMatcher:
    """Its ``matcher`` goes into ``ip.Completer.custom_matchers``."""

    def __init__(self, meshes: Meshes) -> None:
        self._meshes = meshes

        @context_matcher(identifier="monarch_lab.mesh", priority=200)
        def matcher(context: CompletionContext) -> Any:
            return self._match(context)

        self.matcher = matcher

    def _match(self, context: CompletionContext) -> dict[str, object]:
        before = context.text_until_cursor.lstrip()
        words = before.replace("%%spmd[", "%%spmd [", 1).split()
        if not words or words[0] not in ("%mesh", "%%mesh", "%%spmd") or before == words[0]:
            return {"completions": []}
        begun = "" if before[-1].isspace() else words.pop()
        found = self._candidates(words, begun)
        matches = [SimpleCompletion(text, type=kind) for text, kind in found if text.startswith(begun)]
        # Python names and other magics are no words of this line.
        return {"completions": matches, "matched_fragment": begun, "suppress": True}

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
