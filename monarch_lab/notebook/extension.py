"""``%load_ext monarch_lab``: puts the parts into IPython, and takes every one of them out again.

Nothing goes into the user's namespace, and torch is not imported: that happens with the first mesh.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from monarch_lab.controller.front import set_default_front
from monarch_lab.notebook import status, tracebacks
from monarch_lab.notebook.cell import CellRunner
from monarch_lab.notebook.comm import Panel
from monarch_lab.notebook.completion import MeshMatcher
from monarch_lab.notebook.elsewhere import advising
from monarch_lab.notebook.far_names import FarNames, inspecting
from monarch_lab.notebook.magics import MeshMagics, stopped
from monarch_lab.notebook.meshes import Meshes
from monarch_lab.notebook.names import readable
from monarch_lab.notebook.output import Front
from monarch_lab.notebook.shown import ShownValues
from monarch_lab.notebook.spmd import NameAdvice, SpmdMagics, read_first_line
from monarch_lab.notebook.transform import RUNNER, MarkFirstLine, WrapBody

MESH = ("monarch_lab.controller.mesh", "DeviceMesh")

# By shell: there is one in a process, but for tests.
_loaded: dict[int, Extension] = {}


def load(ip: Any) -> None:
    if id(ip) not in _loaded:
        extension = Extension(ip)
        extension.start()
        _loaded[id(ip)] = extension


def unload(ip: Any) -> None:
    """Also stops the meshes and says which."""
    extension = _loaded.pop(id(ip), None)
    if extension is None:
        return
    try:
        print(stopped(extension.stop()) or "monarch_lab is unloaded; no mesh was running.")
    except Exception as error:  # raised, IPython would take the extension for loaded
        print(f"monarch_lab is unloaded, but a mesh could not be stopped: {type(error).__name__}: {error}")


class Extension:
    """All that one shell has of us between ``start`` and ``stop``."""

    def __init__(self, ip: Any) -> None:
        self._ip = ip
        self.front = Front(ip)
        self.meshes = Meshes(lambda: _set_default_front(self.front))
        self._parts = contextlib.ExitStack()

    def start(self) -> None:
        with contextlib.ExitStack() as parts:
            for part in (_magics, _cells, _cards, _events, _panel):
                parts.enter_context(part(self._ip, self.meshes, self.front))
            tracebacks.install()
            parts.callback(tracebacks.remove)
            shown = ShownValues(self._ip.displayhook)
            shown.start()
            parts.callback(shown.stop)
            # At the end of the kernel; a kernel that is killed ends its workers by their agent.
            atexit.register(self._stop_at_exit)
            parts.callback(atexit.unregister, self._stop_at_exit)
            self._parts = parts.pop_all()

    def stop(self) -> list[Any]:
        """Stop the meshes, then take everything out; the meshes that were stopped."""
        with self._parts:
            try:
                return self.meshes.stop_all()
            finally:
                self.meshes.drop_spare()

    def _stop_at_exit(self) -> None:
        self.meshes.stop_all()


@contextlib.contextmanager
def _magics(ip: Any, meshes: Meshes, front: Front) -> Iterator[None]:
    ip.register_magics(MeshMagics(ip, meshes))
    ip.register_magics(SpmdMagics(ip, meshes, front))
    far = FarNames(ip, meshes)
    matcher = MeshMatcher(meshes, far).matcher
    ip.Completer.custom_matchers.append(matcher)
    try:
        with inspecting(ip, far), advising(ip):
            yield
    finally:
        ip.Completer.custom_matchers.remove(matcher)
        for kind in ("line", "cell"):
            for name in ("mesh", "spmd"):
                ip.magics_manager.magics[kind].pop(name, None)
        for magics in (MeshMagics, SpmdMagics):
            ip.magics_manager.registry.pop(magics.__name__, None)


@contextlib.contextmanager
def _cells(ip: Any, meshes: Meshes, front: Front) -> Iterator[None]:
    mark, wrap = MarkFirstLine(), WrapBody(ip)
    ip.input_transformers_cleanup.extend((mark, read_first_line))
    ip.ast_transformers.append(wrap)
    setattr(builtins, RUNNER, CellRunner(ip, meshes, front, mark))
    try:
        yield
    finally:
        # IPython itself takes out a transformer that raised.
        cleanup = ip.input_transformers_cleanup
        for transformers, ours in ((cleanup, mark), (cleanup, read_first_line), (ip.ast_transformers, wrap)):
            if ours in transformers:
                transformers.remove(ours)
        delattr(builtins, RUNNER)


@contextlib.contextmanager
def _cards(ip: Any, meshes: Meshes, front: Front) -> Iterator[None]:
    """A mesh as the value of a cell is its card, in a front end that shows HTML."""

    def card(mesh: Any) -> str | None:
        snapshot = mesh.status()
        is_whole = len(mesh) == len(snapshot.processes)
        return status.card_html(readable(snapshot)) if is_whole else None

    formatter = ip.display_formatter.formatters["text/html"]
    formatter.for_type_by_name(*MESH, card)
    try:
        yield
    finally:
        formatter.pop(".".join(MESH), None)


@contextlib.contextmanager
def _events(ip: Any, meshes: Meshes, front: Front) -> Iterator[None]:
    def begin_cell(info: object) -> None:
        # ipykernel triggers these also for the browser's messages, on threads of its own.
        if threading.current_thread() is threading.main_thread():
            front.move_here()
            _set_default_front(front)

    advice = NameAdvice(meshes)
    ip.events.register("pre_run_cell", begin_cell)
    ip.events.register("post_run_cell", advice)
    try:
        yield
    finally:
        ip.events.unregister("pre_run_cell", begin_cell)
        ip.events.unregister("post_run_cell", advice)
        _set_default_front(None)


@contextlib.contextmanager
def _panel(ip: Any, meshes: Meshes, front: Front) -> Iterator[None]:
    panel = Panel(meshes.snapshot, meshes)
    panel.start(ip)
    front.on_debugger = panel.debugger_news
    try:
        yield
    finally:
        front.on_debugger = lambda *_: None
        panel.stop()


def _set_default_front(front: Front | None) -> None:
    # The module and its package are light: torch comes with the first mesh, not with %load_ext.
    set_default_front(front)
