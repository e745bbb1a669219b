"""The user's modules on this process: which have changed since they were imported, and reloading them in order.

The user's are those outside the interpreter's and the packages' folders. Runs on: the main thread.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import os
import site
import sys
import sysconfig
import time
import types
from collections.abc import Iterable, Iterator
from typing import Any


class Modules:
    def __init__(self) -> None:
        self._began_ns = time.time_ns()
        self._count = 0
        self._due: set[str] = set()
        self._seen: dict[str, int] = {}  # module -> when its file was changed last, as it was imported

    def note(self) -> None:
        """After user code: what it has imported is current now."""
        if len(sys.modules) != self._count:
            for name, module in _users():
                if name not in self._seen:
                    self._seen[name] = _changed_ns(module)
            self._count = len(sys.modules)

    def sync(self, path: list[str], namespace: dict[str, Any]) -> tuple[list[str], list[str]]:
        """(modules that were reloaded, entries added to sys.path).

        Names of ``namespace`` that are functions and classes of such a module become the new ones. Raises what a module
        raises as it is loaded; it and those that use it stay due then.
        """
        there = {os.path.abspath(entry) for entry in sys.path}
        added = [entry for entry in path if entry not in there]
        sys.path[:0] = added
        importlib.invalidate_caches()
        users = dict(_users())
        changed = {n for n, m in users.items() if n in self._due or _changed_ns(m) > self._seen.get(n, self._began_ns)}
        reloaded = _in_order(changed, users)
        self._due.update(reloaded)
        for name in reloaded:
            old = {id(value): key for key, value in vars(users[name]).items()}
            self._reload(users[name])
            for mine, value in list(namespace.items()):
                key = old.get(id(value))
                if key in vars(users[name]) and isinstance(value, types.FunctionType | type):
                    namespace[mine] = vars(users[name])[key]
            self._seen[name] = _changed_ns(users[name])
            self._due.discard(name)
        return reloaded, added

    def _reload(self, module: types.ModuleType) -> None:
        file = str(module.__file__)
        # It counts whole seconds: of two edits in one it would keep the first.
        with contextlib.suppress(OSError, NotImplementedError):
            os.remove(importlib.util.cache_from_source(file))
        importlib.reload(module)


def _in_order(changed: set[str], users: dict[str, types.ModuleType]) -> list[str]:
    """The changed modules and those that use them, each after what it uses."""
    uses = {name: _uses(module, users) for name, module in users.items()}
    due = set(changed)
    while more := {name for name, used in uses.items() if name not in due and used & due}:
        due |= more
    ordered: list[str] = []

    def visit(name: str, above: frozenset[str]) -> None:
        if name in ordered or name in above:  # modules that use each other: as they come
            return
        for used in sorted(uses[name] & due):
            visit(used, above | {name})
        ordered.append(name)

    for name in sorted(due):
        visit(name, frozenset())
    return ordered


def _uses(module: types.ModuleType, users: dict[str, types.ModuleType]) -> set[str]:
    found = set()
    for value in list(vars(module).values()):
        name = value.__name__ if isinstance(value, types.ModuleType) else getattr(value, "__module__", None)
        if isinstance(name, str) and name in users and name != module.__name__:
            found.add(name)
    return found


def _users() -> Iterator[tuple[str, types.ModuleType]]:
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if (
            isinstance(module, types.ModuleType)
            and isinstance(file, str)
            and file.endswith(".py")
            and name != "__main__"
            and name.partition(".")[0] != "monarch_lab"
            and not file.startswith(_packages())
        ):
            yield name, module


@functools.cache
def _packages() -> tuple[str, ...]:
    folders: Iterable[str] = (*site.getsitepackages(), site.getusersitepackages(), *sysconfig.get_paths().values())
    return tuple({os.path.join(folder, "") for folder in folders if folder})


def _changed_ns(module: types.ModuleType) -> int:
    try:
        return os.stat(str(module.__file__)).st_mtime_ns
    except OSError:
        return 0  # its file is gone: what there is stays
