"""IPython on a worker: ``display``, figures and the rich form of a value; ``%magics``, ``!`` and ``get_ipython()``.

The shell is made when something asks for it (0.2 s), and shares the namespace of ``%%spmd`` cells. What it shows goes
to the kernel as mime bundles. Runs on: the thread of the user's code; IPython is imported here and nowhere else.
"""

from __future__ import annotations

import base64
import builtins
import codecs
import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import threading
import types
from collections.abc import Callable
from typing import Any

from monarch_lab.wire.engine import Cleared, Displayed
from monarch_lab.worker.engine import Engine

INLINE = "module://matplotlib_inline.backend_inline"
# A cell with one of these gets its shell before it runs: IPython.display.display prints text where there is none.
_NEED_A_SHELL = ("IPython", "display", "matplotlib", "plt.", "get_ipython")
_RICH = tuple(f"_repr_{kind}_" for kind in "html mimebundle png jpeg svg latex markdown json javascript pdf".split())
_OF_THE_SHELL = ("In", "Out", "exit", "quit", "open", "get_ipython", "_ih", "_oh", "_", "__", "___")
_OF_THE_NOTEBOOK = {
    "mesh": "%mesh is a magic of the notebook: put it into a cell of its own",
    "debug": "%debug looks at no worker: %mesh pm, in a cell of its own, opens the last failure",
    "spmd": "%%spmd is a magic of the notebook: it is the first line of a cell, once",
    "pip": "%pip is a magic of the notebook, whose packages are the workers' too: put it into a cell of its own",
    "conda": "%conda is a magic of the notebook, whose packages are the workers' too: put it into a cell of its own",
}
# A widget lives in the kernel's own process, and nothing answers for one of a worker.
_UNSHOWABLE = "application/vnd.jupyter.widget-view+json"


class SpmdShell:
    def __init__(self, module: types.ModuleType, engine: Engine, flush: Callable[[], None]) -> None:
        self._module = module
        self._engine = engine
        self._flush = flush
        self._shell: Any = None
        self._lock = threading.RLock()  # guards the making of the shell
        self._has_figures = False

    def install(self) -> None:
        """Names that cells find without an import, as in a notebook."""
        names: dict[str, Any] = vars(builtins)
        names["get_ipython"] = self.get
        names["display"] = self._display
        # As in a kernel, whose environment says so; elsewhere figures of a worker would have no place to be shown.
        os.environ.setdefault("MPLBACKEND", INLINE)

    def get(self) -> Any:
        """The worker's InteractiveShell; ``get_ipython()``."""
        with self._lock:
            if self._shell is None:
                self._shell = self._make()
            return self._shell

    def begin_cell(self, source: str) -> None:
        if self._shell is None and ("IPython" in sys.modules or any(word in source for word in _NEED_A_SHELL)):
            self.get()
        if self._shell is not None:
            self._shell.events.trigger("pre_run_cell", types.SimpleNamespace(raw_cell=source))

    def end_cell(self) -> None:
        """Figures that are open are shown and closed, as matplotlib's inline backend does."""
        if self._shell is not None:
            self._shell.events.trigger("post_execute")
        pyplot: Any = sys.modules.get("matplotlib.pyplot")
        if pyplot is None or not pyplot.get_fignums() or "inline" not in str(sys.modules["matplotlib"].get_backend()):
            return
        self._prepare_figures().show(True)

    def bundle(self, value: object) -> str:
        """The value's rich form, JSON of [data, metadata]; "" where it has none but its text."""
        kind = type(value)
        if callable(getattr(kind, "_ipython_display_", None)):
            value._ipython_display_()  # type: ignore[attr-defined]
            return ""
        is_figure = kind.__module__.startswith("matplotlib.figure")
        if is_figure:
            self._prepare_figures()
        if not is_figure and self._shell is None and not any(hasattr(kind, name) for name in _RICH):
            return ""
        data, metadata = self.get().display_formatter.format(value, exclude={"text/plain"})
        data.pop("text/plain", None)
        return _json(data, metadata) if data else ""

    def _prepare_figures(self) -> Any:
        from matplotlib_inline import backend_inline

        if not self._has_figures:
            self._has_figures = True
            shell = self.get()
            backend_inline.configure_inline_support(shell, INLINE)
            with contextlib.suppress(ValueError):  # end_cell does it, and lets errors be the cell's
                shell.events.unregister("post_execute", backend_inline.flush_figures)
        return backend_inline

    def _display(self, *objects: Any, **options: Any) -> Any:
        """IPython's own."""
        self.get()
        from IPython.display import display

        return display(*objects, **options)

    def publish(self, data: dict[str, Any], metadata: dict[str, Any], display_id: str, update: bool) -> None:
        self._flush()  # what was printed before it comes before it
        self._engine.report(Displayed(self._engine.cell, _json(data, metadata), display_id, update))

    def clear(self, wait: bool) -> None:
        self._flush()
        self._engine.report(Cleared(self._engine.cell, wait))

    def _make(self) -> Any:
        shell_class = _shell_class()
        from traitlets.config import Config

        config = Config()
        config.HistoryManager.enabled = False  # no threads, and no file that is the notebook's
        config.InteractiveShell.colors = "nocolor"
        names = self._module.__dict__
        before, main = dict(names), sys.modules["__main__"]
        shell = shell_class.instance(config=config, user_module=self._module)
        sys.modules["__main__"] = main
        shell.display_pub.owner = self
        for name in _OF_THE_SHELL:
            if name in before:
                names[name] = before[name]
            else:
                names.pop(name, None)
        for kind in ("line", "cell"):
            for name, text in _OF_THE_NOTEBOOK.items():
                shell.register_magic_function(functools.partial(_refuse, text), kind, name)
        shell.register_magic_function(lambda line: None, "line", "matplotlib")  # figures are shown as it is
        vars(builtins)["get_ipython"] = self.get
        return shell


def _refuse(text: str, *_: str) -> None:
    from IPython.core.error import UsageError

    raise UsageError(text)


def _json(data: dict[str, Any], metadata: dict[str, Any]) -> str:
    """A front end gets strings and JSON: images in base64."""
    encoded = {
        kind: base64.b64encode(value).decode("ascii") if isinstance(value, bytes) else value
        for kind, value in data.items()
        if kind != _UNSHOWABLE
    }
    return json.dumps([encoded, metadata], default=str)


@functools.cache
def _shell_class() -> Any:
    from IPython.core import page
    from IPython.core.displaypub import DisplayPublisher
    from IPython.core.interactiveshell import InteractiveShell
    from IPython.utils.text import SList

    class Publisher(DisplayPublisher):
        owner: SpmdShell

        def publish(
            self,
            data: dict[str, Any],
            metadata: dict[str, Any] | None = None,
            *_: Any,
            transient: dict[str, Any] | None = None,
            update: bool = False,
            **__: Any,
        ) -> None:
            self.owner.publish(data, metadata or {}, str((transient or {}).get("display_id") or ""), update)

        def clear_output(self, wait: bool = False) -> None:
            self.owner.clear(wait)

    class WorkerShell(InteractiveShell):
        """Commands run without a terminal: in pipes, and ended by an interrupt."""

        display_pub_class = Publisher

        def init_virtualenv(self) -> None:
            pass  # the worker's paths are the kernel's

        def init_hooks(self) -> None:
            super().init_hooks()
            self.set_hook("show_in_pager", page.as_hook(page.display_page), 99)

        def system(self, command: str) -> None:
            self.user_ns["_exit_code"] = _run(self.var_expand(command, depth=1), sys.stdout.write)

        system_piped = system_raw = system

        def getoutput(self, command: str, split: bool = True, depth: int = 0) -> Any:
            parts: list[str] = []
            _run(self.var_expand(command, depth=depth + 1), parts.append)
            text = "".join(parts)
            return SList(text.splitlines()) if split else text

    return WorkerShell


def _run(command: str, write: Callable[[str], Any]) -> int:
    """A shell's command to its end, its output as it comes."""
    if command.rstrip().endswith("&"):
        raise OSError("background processes are not supported: use subprocess.Popen")
    process = subprocess.Popen(
        command,
        shell=True,
        executable=os.environ.get("SHELL") or None,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        start_new_session=True,
    )
    assert process.stdout is not None
    try:
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        while chunk := os.read(process.stdout.fileno(), 1 << 16):
            write(decoder.decode(chunk))
        return process.wait()
    except BaseException:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise
    finally:
        process.stdout.close()
