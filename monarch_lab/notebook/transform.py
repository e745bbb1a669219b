"""How a ``%%mesh`` cell becomes Python.

An ordinary cell magic gets its body as text and loses what IPython does for a cell: top-level ``await``, the shown
last expression, the cell's own line numbers. So the first line alone is replaced, by a marker call that keeps the
other lines where they are, and once IPython has parsed the cell, the marker becomes a ``with`` around the rest:

    %%mesh --time         get_ipython().run_cell_magic('mesh', '--time', '<body>')      with CELL('--time'):
    x = rand(3)      ->   x = rand(3)                                              ->       x = rand(3)
    x                     x                                                                 CELL.show(x)

Where only the first step happens (a magic above that runs the text itself, such as ``%%prun``), the marker is run
as it stands and raises: it never runs the body off the mesh in silence.

Runs on: the main thread, before the cell runs.
"""

from __future__ import annotations

import ast
import re
import tokenize
from typing import Any

from IPython.core.displayhook import DisplayHook

# The name of the CellRunner in builtins while the extension is loaded: transformed code finds it there, and the
# user's own namespace stays as the user left it.
RUNNER = "__monarch_lab_cell__"
# The marker's body, never a cell's own text: says to the AST step whether the cell ended in ";".
SHOWN, QUIET, HELP = "<body>", "<body>;", "<help>"

# "%%mesh?" is IPython's help, "%%meshes" somebody else's magic.
_FIRST_LINE = re.compile(r"%%mesh(?=\s|$)(?P<options>.*)")
_ASKS_FOR_HELP = re.compile(r"(^|\s)(-h|--help)(\s|$)")


class MarkFirstLine:
    """For ``ip.input_transformers_cleanup``."""

    # Left out where IPython asks whether the input is complete: a terminal then waits for the rest of the cell, as
    # for every "%%" cell, and does not run the first line alone.
    has_side_effects = True

    def __init__(self) -> None:
        self.source: list[str] = []

    def __call__(self, lines: list[str]) -> list[str]:
        match = _FIRST_LINE.match(lines[0]) if lines else None
        if match is None:
            return lines
        if _ASKS_FOR_HELP.search(match["options"]):  # nothing runs; IPython refuses a cell magic without a body
            return [_call("--help", HELP)]
        self.source = lines
        body = "".join(lines[1:])
        return [_call(match["options"].strip(), _ending(body)), *lines[1:]]


def _call(options: str, body: str) -> str:
    return f"get_ipython().run_cell_magic('mesh', {options!r}, {body!r})\n"


def _ending(body: str) -> str:
    try:
        return QUIET if DisplayHook.semicolon_at_end_of_expression(body) else SHOWN
    except (tokenize.TokenError, SyntaxError):  # IPython reports it a moment later, at the user's line
        return SHOWN


class WrapBody(ast.NodeTransformer):
    """For ``ip.ast_transformers``. ``shell`` says which expressions IPython would have shown."""

    def __init__(self, shell: Any) -> None:
        self._shell = shell

    def visit_Module(self, module: ast.Module) -> ast.Module:
        marker = _read_marker(module.body[0]) if module.body else None
        if marker is None:
            return module
        options, ending = marker
        # "from __future__ import ..." is allowed nowhere but at the top.
        future = [n for n in module.body[1:] if isinstance(n, ast.ImportFrom) and n.module == "__future__"]
        body = [node for node in module.body[1:] if node not in future]
        is_quiet = ending == QUIET
        if not is_quiet:
            body = _show(body, self._shell.ast_node_interactivity)
        # Parsed, so that every node is there that this Python's own parser makes.
        wrapper = ast.parse(f"with {RUNNER}({options!r}): pass").body[0]
        assert isinstance(wrapper, ast.With)
        for node in ast.walk(wrapper):
            ast.copy_location(node, module.body[0])
        wrapper.body = body or wrapper.body
        module.body = [*future, wrapper]
        return module


def _read_marker(statement: ast.stmt) -> tuple[str, str] | None:
    match statement:
        case ast.Expr(
            value=ast.Call(
                func=ast.Attribute(value=ast.Call(func=ast.Name(id="get_ipython")), attr="run_cell_magic"),
                args=[ast.Constant(value="mesh"), ast.Constant(value=str(options)), ast.Constant(value=str(ending))],
            )
        ) if ending in (SHOWN, QUIET):
            return options, ending
    return None


def _show(body: list[ast.stmt], interactivity: str) -> list[ast.stmt]:
    """The body with calls of ``show`` where ``InteractiveShell.ast_node_interactivity`` would display."""
    if not body or interactivity == "none":
        return body
    last = body[-1]
    if interactivity == "all":
        return [_shown(node, node.value) if isinstance(node, ast.Expr) else node for node in body]
    if isinstance(last, ast.Expr):
        return [*body[:-1], _shown(last, last.value)]
    if interactivity == "last_expr_or_assign":
        target: ast.expr | None = None
        if isinstance(last, ast.Assign) and len(last.targets) == 1:
            target = last.targets[0]
        elif isinstance(last, ast.AugAssign | ast.AnnAssign):
            target = last.target
        if isinstance(target, ast.Name):
            return [*body, _shown(last, ast.copy_location(ast.Name(target.id, ast.Load()), target))]
    return body


def _shown(statement: ast.stmt, value: ast.expr) -> ast.stmt:
    runner = ast.Attribute(ast.Name(RUNNER, ast.Load()), "show", ast.Load())
    call = ast.Expr(ast.Call(runner, [value], []))
    # Every new node sits where the expression did, so that a traceback underlines the expression.
    for node in (call, call.value, runner, runner.value):
        ast.copy_location(node, value)
    return ast.copy_location(call, statement)
