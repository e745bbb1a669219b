from __future__ import annotations

import ast

import pytest
from IPython.core.inputtransformer2 import TransformerManager

from monarch_lab.notebook.transform import RUNNER, MarkFirstLine, WrapBody


class Interactivity:
    def __init__(self, mode: str = "last_expr") -> None:
        self.ast_node_interactivity = mode


def python(cell: str, mode: str = "last_expr") -> str:
    """The cell as Python runs it, with CELL for the runner."""
    manager = TransformerManager()
    manager.cleanup_transforms.append(MarkFirstLine())
    tree = ast.parse(manager.transform_cell(cell))
    tree = ast.fix_missing_locations(WrapBody(Interactivity(mode)).visit(tree))
    compile(tree, "cell", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    return ast.unparse(tree).replace(RUNNER, "CELL")


@pytest.mark.parametrize(
    ("cell", "expected"),
    [
        ("%%mesh\nx = 1\nx", "with CELL(''):\n    x = 1\n    CELL.show(x)"),
        ("\n\n%%mesh\nx", "with CELL(''):\n    CELL.show(x)"),
        ("%%mesh --name 'a b'\nx;", "with CELL(\"--name 'a b'\"):\n    x"),
        ("%%mesh\nx;  # quiet", "with CELL(''):\n    x"),
        ("%%mesh\nx = 1", "with CELL(''):\n    x = 1"),
        ("%%mesh", "with CELL(''):\n    pass"),
        ("%%mesh\n# only a comment", "with CELL(''):\n    pass"),
        ("%%mesh\nawait x", "with CELL(''):\n    CELL.show(await x)"),
        ("%%mesh\n!ls", "with CELL(''):\n    CELL.show(get_ipython().system('ls'))"),
        (
            "%%mesh\nfrom __future__ import annotations\nx",
            "from __future__ import annotations\nwith CELL(''):\n    CELL.show(x)",
        ),
        ("%%meshes\nx", "get_ipython().run_cell_magic('meshes', '', 'x\\n')"),
        ("x = '''\n%%mesh\n'''", "x = '\\n%%mesh\\n'"),
        ("%%mesh --help\nx = 1", "get_ipython().run_cell_magic('mesh', '--help', '<help>')"),
    ],
)
def test_a_cell_becomes(cell: str, expected: str) -> None:
    assert python(cell) == expected


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("none", "1\n    x = 2"),
        ("last_expr", "1\n    x = 2"),
        ("all", "CELL.show(1)\n    x = 2"),
        ("last_expr_or_assign", "1\n    x = 2\n    CELL.show(x)"),
    ],
)
def test_what_ipython_would_show_is_shown(mode: str, expected: str) -> None:
    assert python("%%mesh\n1\nx = 2", mode) == f"with CELL(''):\n    {expected}"


def test_lines_keep_their_numbers() -> None:
    manager = TransformerManager()
    manager.cleanup_transforms.append(MarkFirstLine())
    tree = WrapBody(Interactivity()).visit(ast.parse(manager.transform_cell("%%mesh\n\nx = 1\nx")))
    body = tree.body[0].body
    assert [node.lineno for node in body] == [3, 4]
    assert body[1].value.col_offset == body[1].value.args[0].col_offset


def test_a_terminal_waits_for_the_rest_of_the_cell() -> None:
    manager = TransformerManager()
    manager.cleanup_transforms.append(MarkFirstLine())
    assert manager.check_complete("%%mesh")[0] == "incomplete"
    assert manager.check_complete("%%mesh\nx = 1\n")[0] == "incomplete"
    assert manager.check_complete("%%mesh\nx = 1\n\n")[0] == "complete"
