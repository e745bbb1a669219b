"""What an interpreter loads. Which module may import which is import-linter's (pyproject.toml)."""

from __future__ import annotations

import subprocess
import sys

import pytest

import monarch_lab


def loaded_by(statement: str, *packages: str) -> list[str]:
    """Which of ``packages`` a fresh interpreter has loaded after ``statement``."""
    code = f"import sys\n{statement}\nprint(*sorted({set(packages)!r} & set(sys.modules)))"
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()


def test_importing_the_package_loads_nothing_heavy() -> None:
    heavy = ("torch", "IPython", "zmq", "numpy", "msgspec", "ipywidgets")
    assert loaded_by("import monarch_lab", *heavy) == []


def test_an_agent_loads_neither_torch_nor_jupyter() -> None:
    heavy = ("torch", "numpy", "IPython", "ipykernel", "ipywidgets")
    assert loaded_by("import monarch_lab.agent.main", *heavy) == []


def test_the_supervisor_loads_no_torch() -> None:
    assert loaded_by("import monarch_lab.supervisor", "torch", "IPython") == []


@pytest.mark.parametrize("name", [name for name in monarch_lab.__all__ if name != "__version__"])
def test_a_public_name_is_where_the_table_says(name: str) -> None:
    assert getattr(monarch_lab, name) is not None
    assert name in dir(monarch_lab)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nope'"):
        _ = monarch_lab.nope
