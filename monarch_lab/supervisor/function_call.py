"""A function with its arguments, to be run by a process of its own.

The call is the first thing a process is handed, over its link to the agent: nothing of it is in a command line.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from monarch_lab.errors import UsageTypeError, UsageValueError
from monarch_lab.supervisor.letters import pack_letter

# What a file that is run as "file.py:function" is called in the process.
ENTRY_MODULE = "__entry__"

Target = str | Callable[..., Any]


class FunctionCall:
    """``target`` is "package.module.function", "path/file.py:function", or the function itself.

    A function of a notebook, or of the script that runs, travels by value with all it needs from there.
    """

    def __init__(self, target: Target, *args: Any, **kwargs: Any) -> None:
        if isinstance(target, str):
            _split(target)
        elif not callable(target):
            raise UsageTypeError(f"FunctionCall takes a function or the name of one, not {target!r}")
        self.target = target
        self.args = args
        self.kwargs = kwargs

    @property
    def name(self) -> str:
        if isinstance(self.target, str):
            return self.target
        return str(getattr(self.target, "__qualname__", type(self.target).__name__))

    def __repr__(self) -> str:
        return f"FunctionCall({self.name!r}, {len(self.args)} arguments, {len(self.kwargs)} by name)"

    def pack(self, largest_bytes: int) -> bytes:
        """For the process: where modules of this one are found, and the call in a pickle of its own."""
        target = self.target
        if isinstance(target, str) and ":" in target:
            path, function = _split(target)
            target = f"{os.path.abspath(path)}:{function}"
        call = pack_letter((target, self.args, self.kwargs), largest_bytes)
        return pack_letter(([os.path.abspath(entry) for entry in sys.path], call), largest_bytes)


def run_call(packed: bytes) -> None:
    """In the process: find the function and call it; what it returns is dropped."""
    python_path, call = pickle.loads(packed)
    adopt_path(python_path)  # first: the call itself may need modules from there
    target, args, kwargs = pickle.loads(call)
    function = find_function(target) if isinstance(target, str) else target
    function(*args, **kwargs)


def adopt_path(python_path: list[str]) -> None:
    """Modules that the caller could import can be imported here, after what this interpreter has itself."""
    sys.path += [entry for entry in python_path if entry not in sys.path and os.path.exists(entry)]


def find_function(target: str) -> Callable[..., Any]:
    """Raises what the import raises, or UsageValueError where there is no such function."""
    place, name = _split(target)
    module = _load_file(place) if place.endswith(".py") else importlib.import_module(place)
    function = getattr(module, name, None)
    if not callable(function):
        raise UsageValueError(f"{place} has no function {name!r}")
    return function


def _split(target: str) -> tuple[str, str]:
    place, _, name = target.rpartition(":" if ".py:" in target else ".")
    is_place = place.endswith(".py") or all(part.isidentifier() for part in place.split("."))
    if not is_place or place == ".py" or not name.isidentifier():
        raise UsageValueError(f"{target!r} is no target: write 'package.module.function' or 'path/file.py:function'")
    return place, name


def _load_file(path: str) -> Any:
    import cloudpickle

    spec = importlib.util.spec_from_file_location(ENTRY_MODULE, path)
    if spec is None or spec.loader is None or not Path(path).exists():
        raise UsageValueError(f"there is no file {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[ENTRY_MODULE] = module
    sys.path.insert(0, os.path.dirname(path))  # as `python file.py` would
    # The supervisor has no module of this name: what the file defines travels by value.
    cloudpickle.register_pickle_by_value(module)
    spec.loader.exec_module(module)
    return module
