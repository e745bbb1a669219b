"""IPython in this process, without a kernel: run a cell, look at what it printed."""

from __future__ import annotations

from typing import Any

from IPython.core.interactiveshell import ExecutionResult, InteractiveShell
from traitlets.config import Config

from tests.fakes import engine


class Shell:
    """``run`` keeps the last cell's output in ``text`` and its error in ``error``."""

    def __init__(self, capture: Any) -> None:
        config = Config()
        config.HistoryManager.enabled = False
        config.InteractiveShell.colors = "nocolor"
        self.ip = InteractiveShell.instance(config=config)
        self._capture = capture
        self.text = ""
        self.error: BaseException | None = None

    def run(self, cell: str, store_history: bool = True) -> ExecutionResult:
        self._capture.readouterr()
        result = self.ip.run_cell(cell, store_history=store_history)
        out, err = self._capture.readouterr()
        self.text, self.error = out + err, result.error_before_exec or result.error_in_exec
        return result

    def mesh(self, name: str = "mesh") -> engine.FakeMesh:
        return engine.meshes()[name]

    @property
    def names(self) -> dict[str, Any]:
        return dict(self.ip.user_ns)

    def close(self) -> None:
        self.ip.run_line_magic("xmode", "Context")
        self.ip.reset(new_session=True)
        self._capture.readouterr()
