"""The output area of one cell: where it prints and displays, from any thread.

Runs on: any thread.
"""

from __future__ import annotations

import io
import sys
from dataclasses import dataclass
from typing import Any, TextIO


@dataclass(frozen=True, slots=True)
class Place:
    """Of one cell: its message in a kernel, and the streams it began with.

    The streams too, because ``%%capture`` puts others in their place: what the cell caused is captured, even if it
    comes late.
    """

    parent: dict[str, Any] | None
    streams: dict[str, TextIO]
    publisher: Any = None  # of displays that can change; None where there are none

    @classmethod
    def here(cls, shell: Any) -> Place:
        kernel = getattr(shell, "kernel", None)
        parent = kernel.get_parent() if kernel is not None else None
        publisher = getattr(shell, "display_pub", None)
        streams: dict[str, TextIO] = {"stdout": sys.stdout, "stderr": sys.stderr}
        is_live = parent is not None and all(hasattr(s, "set_thread_parent") for s in (sys.stdout, publisher))
        return cls(parent, streams, publisher if is_live else None)

    @property
    def is_captured(self) -> bool:
        """By ``%%capture``: nobody looks at it while it grows."""
        return isinstance(self.streams["stdout"], io.StringIO)

    @property
    def can_update(self) -> bool:
        return self.publisher is not None and not self._is_in_output_widget()

    def write(self, stream: str, text: str) -> None:
        target: Any = self.streams[stream]
        if getattr(target, "closed", False):
            target = getattr(sys, stream)
        if self.parent is None or not hasattr(target, "set_thread_parent"):
            target.write(text)
            target.flush()
            return
        # On a thread, ipykernel would show the text in whatever it handled last. Not flushed: it sends batches by
        # itself, and one message for each line would have the server drop a flood.
        token = target.set_thread_parent(self.parent)
        try:
            target.write(text)
        finally:
            target.reset_thread_parent(token)

    def show(self, bundle: dict[str, str], display_id: str, update: bool) -> None:
        """Only where ``can_update``."""
        token = self.publisher.set_thread_parent(self.parent)
        try:
            self.publisher.publish(bundle, transient={"display_id": display_id}, update=update)
        finally:
            self.publisher.reset_thread_parent(token)

    def _is_in_output_widget(self) -> bool:
        """Whether an ``ipywidgets.Output`` takes what the cell shows: it drops changes of a display."""
        module = sys.modules.get("ipywidgets.widgets.widget")
        widgets = getattr(module, "_instances", None)
        if not widgets or self.parent is None:
            return False
        mine = self.parent.get("header", {}).get("msg_id")
        return any(getattr(widget, "msg_id", None) == mine for widget in list(widgets.values()))
