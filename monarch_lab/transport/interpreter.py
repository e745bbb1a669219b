"""How a fresh interpreter comes to run our code: with this very package, not another one that is installed there.

A notebook in a clone of the project imports the package from its folder, and the processes it starts would import the
installed one: the two speak different messages.
"""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[1]


def code_with_ours(then: str) -> str:
    """Source for ``python -c``: the package is in sys.modules, and what lies beside it comes last on the path, so that
    a ``random.py`` there is not taken for another; then ``then``."""
    name, folder = _PACKAGE.name, str(_PACKAGE)
    return (
        f"import sys; sys.path.append({str(_PACKAGE.parent)!r})\n"
        "from importlib.util import module_from_spec, spec_from_file_location\n"
        f"spec = spec_from_file_location({name!r}, {str(_PACKAGE / '__init__.py')!r}, "
        f"submodule_search_locations=[{folder!r}])\n"
        f"sys.modules[{name!r}] = module_from_spec(spec)\n"
        f"spec.loader.exec_module(sys.modules[{name!r}])\n"
        f"{then}\n"
    )
