from __future__ import annotations

import pytest

from tests.architecture.diagrams import PAGE, TABLES, draw, pattern


@pytest.mark.parametrize("name", TABLES)
def test_a_diagram_of_the_docs_is_the_table(name: str) -> None:
    found = pattern(name).findall(PAGE.read_text())
    assert found == [draw(name)], "run python -m tests.architecture.diagrams"
