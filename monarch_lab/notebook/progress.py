"""What is shown while a mesh starts: one display that changes in a notebook, a line a stage in a terminal."""

from __future__ import annotations

from html import escape
from typing import Any

from IPython.display import display

from monarch_lab.notebook.status import Bundle

# What a stage is called while it runs; the names are the session's.
WORDS = {"agent": "starting the agent", "import torch": "importing torch", "workers": "starting workers"}


class StartProgress:
    """Called by the session with each step, possibly on another thread; ``show`` puts the result in its place."""

    def __init__(self, shell: Any, mesh: str) -> None:
        self._mesh = mesh
        self._stages: dict[str, tuple[int, int]] = {}
        self._is_live = getattr(shell, "kernel", None) is not None
        self._handle: Any = None

    def __call__(self, stage: str, done: int, total: int) -> None:
        # A stage is over when it says so, or when the next one begins.
        steps = {earlier: (of, of) for earlier, (_, of) in self._stages.items() if earlier != stage}
        steps[stage] = (done, total)
        ended = [name for name, (k, of) in steps.items() if k >= of and self._stages.get(name) != (k, of)]
        is_news, self._stages = steps != self._stages, steps
        if self._is_live and is_news:
            self._update(self._bundle())
        elif not self._is_live:
            for name in ended:
                print(f'mesh "{self._mesh}": {_stage(name, *steps[name])}')

    def show(self, result: Bundle) -> None:
        """End with ``result`` where the progress was."""
        self._update(result)

    def fail(self) -> None:
        """End without a mesh; the error itself is shown by whoever raised it."""
        if self._handle is not None:
            text = f'mesh "{self._mesh}" did not start'
            self._update({"text/plain": text, "text/html": f"<div style='color: inherit;'>{escape(text)}</div>"})

    def _update(self, bundle: Bundle) -> None:
        if self._handle is not None:
            self._handle.update(bundle, raw=True)
        elif self._is_live:
            self._handle = display(bundle, raw=True, display_id=True)
        else:
            display(bundle, raw=True)

    def _bundle(self) -> Bundle:
        stages = [_stage(stage, *counts) for stage, counts in self._stages.items()]
        text = f'mesh "{self._mesh}": {" · ".join(stages)}'
        done = sum(min(1.0, d / t) if t else 1.0 for d, t in self._stages.values())
        bar = f"<progress value='{done:.2f}' max='{len(WORDS)}' style='vertical-align: middle;'></progress>"
        return {"text/plain": text, "text/html": f"<div style='color: inherit;'>{bar} {escape(text)}</div>"}


def _stage(stage: str, done: int, total: int) -> str:
    word = WORDS.get(stage, stage)
    if done >= total:
        return f"{word}: done"
    return f"{word} {done}/{total}" if total > 1 else f"{word} …"
