"""Where what workers print is shown: in the cell that caused it, a line at a time, with the worker's label.

    [0.1] a line that the worker printed

Runs on: ``Front.output`` on the controller's I/O thread, and then writes as if it were the cell; the rest on the
main thread.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TextIO

from monarch_lab.notebook import asking, debugger
from monarch_lab.notebook.rich import Displays

if TYPE_CHECKING:
    from monarch_lab.controller.front import DebugPrompt, InputPrompt
    from monarch_lab.wire.showing import Cleared, Displayed

# Places of cells that ended are kept for late output; of older cells it goes to the newest.
KEPT_CELLS = 256
# A line longer than this is shown in pieces: a worker that never ends a line must not fill the kernel's memory.
LONGEST_LINE = 64 * 1024


@dataclass(frozen=True, slots=True)
class Place:
    """The output area of one cell: its message in a kernel, and the streams it began with.

    The streams too, because ``%%capture`` puts others in their place: what the cell caused is captured, even if it
    comes late.
    """

    parent: dict[str, Any] | None
    streams: dict[str, TextIO]

    @classmethod
    def here(cls, shell: Any) -> Place:
        kernel = getattr(shell, "kernel", None)
        parent = kernel.get_parent() if kernel is not None else None
        return cls(parent, {"stdout": sys.stdout, "stderr": sys.stderr})

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


@dataclass(slots=True)
class _Lines:
    """Unfinished lines by (cell, rank, stream); ``lock`` guards them, added on one thread and ended on another."""

    labels: dict[tuple[int, int, str], str] = field(default_factory=dict)
    texts: dict[tuple[int, int, str], str] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)


class Front:
    """What the controller calls to show and to ask (controller.front.Front); one for each mesh.

    ``client``: the mesh's, None for the one that new meshes begin with. Cells are numbered by their client.
    """

    def __init__(self, shell: Any, client: object | None = None) -> None:
        self._shell = shell
        self.client = client
        self._places: dict[int, Place] = {}
        self._newest = Place.here(shell)
        self._displays = Displays(shell)
        self._lines = _Lines()

    def for_client(self, client: Any) -> Front:
        """The front of one mesh, made and set when first asked for."""
        front = client.front
        if not (isinstance(front, Front) and front.client is client and front._shell is self._shell):  # noqa: SLF001
            client.front = front = Front(self._shell, client)
        return front

    def move_here(self) -> None:
        """What no ``%%mesh`` cell caused is shown in the cell that runs now."""
        self._newest = Place.here(self._shell)

    @contextlib.contextmanager
    def cell(self, number: int) -> Iterator[None]:
        """Output of this cell belongs where the main thread prints now."""
        self.move_here()
        self._places[number] = self._newest
        self._displays.begin(number)
        for old in sorted(self._places)[:-KEPT_CELLS]:
            del self._places[old]
        try:
            yield
        finally:
            self.settle(number)

    def output(self, cell: int, rank: int, label: str, stream: str, text: str) -> None:
        key = (cell, rank, stream)
        with self._lines.lock:
            self._lines.labels[key] = label
            whole, newline, rest = (self._lines.texts.pop(key, "") + text).rpartition("\n")
            shown = [_line(label, line) for line in whole.split("\n")] if newline else []
            if len(rest) > LONGEST_LINE:
                shown.append(_line(label, rest))
            elif rest:
                self._lines.texts[key] = _what_a_return_leaves(rest) + ("\r" if rest.endswith("\r") else "")
        if shown:
            self._place(cell).write(stream, "".join(shown))

    def end_lines(self) -> None:
        """Show the lines that workers began and did not end."""
        with self._lines.lock:
            begun, self._lines.texts = sorted(self._lines.texts.items()), {}
        for (cell, rank, stream), text in begun:
            self._place(cell).write(stream, _line(self._lines.labels[cell, rank, stream], text))

    def ask(self, prompt: DebugPrompt) -> str | None:
        """See debugger.ask; on the thread that waits for the cell's ops."""
        self.end_lines()
        return debugger.ask(self._shell, prompt)

    def show(self, rank: int, message: Displayed | Cleared) -> None:
        """See rich.py."""
        self._displays.show(rank, message)

    def settle(self, cell: int) -> None:
        """It has ended: what it began is shown, its displays by rank."""
        self.end_lines()
        self._displays.settle(cell)

    def publish(self, cell: int, data: dict[str, Any], metadata: dict[str, Any]) -> None:
        """Display it in this cell, also when it has ended. Any thread."""
        self._displays.publish(cell, data, metadata)

    def ask_input(self, prompt: InputPrompt) -> str | None:
        """As ``[0.1] name? ``; on the thread that waits for the cell's ops."""
        self.end_lines()
        question = f"[{prompt.label}] {prompt.prompt}"
        try:
            return asking.ask(self._shell, question, prompt.alive, password=prompt.hidden)
        except asking.CannotAskError:
            raise NotImplementedError(
                "this front end cannot ask for input (it has no box to type a line into); give the value to the cell "
                "in a variable"
            ) from None
        except asking.WorkerGoneError:
            print(f"[{prompt.label}] the worker is gone: its prompt ended")
            return None

    def _place(self, cell: int) -> Place:
        return self._places.get(cell, self._newest)


def _line(label: str, text: str) -> str:
    return f"[{label}] {_what_a_return_leaves(text)}\n"


def _what_a_return_leaves(text: str) -> str:
    """What a terminal would show of a line that a progress bar rewrote: the last version."""
    return text.rstrip("\r").rpartition("\r")[2]
