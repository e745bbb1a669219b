"""The source of a ``%%spmd`` cell: what the workers run of it, and which names it has.

``%magics`` and ``!`` become calls of ``get_ipython()``, which the workers have too (worker/spmd_shell.py). Runs on:
the main thread, before anything is sent.
"""

from __future__ import annotations

import ast
import re
from typing import Any

from IPython.core.inputtransformer2 import TransformerManager

from monarch_lab.notebook.names import cell_number

_FLAGS = ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
_MAGIC_CALLS = ("run_line_magic", "run_cell_magic")
_WORD = re.compile(r"[^\W\d]\w*")


def parsed(shell: Any, cell: str) -> tuple[str, ast.Module]:
    """(code, tree): the cell as Python, its lines where they are in the cell whose first line is the magic's.

    Raises SyntaxError, at the user's line, for what is none.
    """
    source = f"\n{cell}"
    try:
        return source, _tree(source, "<spmd>")
    except SyntaxError:
        code = _transformed(source)
    try:
        return code, _tree(code, "<spmd>")
    except SyntaxError:
        # Again under the cell's own name, for the traceback.
        return code, _tree(code, shell.compile.cache(source, cell_number(shell), raw_code=source))


def _tree(source: str, filename: str) -> ast.Module:
    tree = compile(source, filename, "exec", _FLAGS)
    assert isinstance(tree, ast.Module)
    compile(tree, filename, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)  # a return outside a function is found only now
    return tree


def _transformed(source: str) -> str:
    body = source.lstrip("\n")  # IPython takes leading empty lines away, and lines have to keep their numbers
    return "\n" * (len(source) - len(body)) + TransformerManager().transform_cell(body)


def names(tree: ast.AST) -> list[str]:
    """Every name that the cell reads or assigns, those in the text of a magic too."""
    found: dict[str, None] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            found[node.id] = None
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found[node.name] = None
        elif isinstance(node, ast.Global):
            found.update(dict.fromkeys(node.names))
        elif isinstance(node, ast.alias):
            found[(node.asname or node.name).partition(".")[0]] = None
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") in _MAGIC_CALLS:
            for text in [a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)][1:]:
                found.update(dict.fromkeys(_WORD.findall(text)))
    return list(found)
