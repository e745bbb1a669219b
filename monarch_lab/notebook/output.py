"""Where what workers print is shown: in the cell that caused it, with the workers' labels.

    [0.0-0.1] a line that both workers printed

Runs on: ``Front.output`` on the controller's I/O thread; the painter's thread shows it while the cell runs, the main
thread when it ends.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from monarch_lab.controller.debug_console import with_names
from monarch_lab.notebook import asking, debugger
from monarch_lab.notebook.block import Block
from monarch_lab.notebook.place import Place
from monarch_lab.notebook.rich import Displays

if TYPE_CHECKING:
    from monarch_lab.controller.front import DebugPrompt, InputPrompt
    from monarch_lab.wire.engine import OutputTail
    from monarch_lab.wire.showing import Cleared, Displayed

log = logging.getLogger(__name__)

# Places of cells that ended are kept for late output; of older cells it goes to the newest.
KEPT_CELLS = 256
# Their text too, of so many: late output of older ones begins a display of its own in its cell.
KEPT_BLOCKS = 8
# Between two paintings. What is long takes longer, and is painted less often.
PAINT_S = 0.1
IDLE_S = 5.0  # so long the painter waits for more
_SHARE = 10  # of the time, one in so many parts is painting


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
        self.on_debugger: Callable[..., None] = lambda *_: None  # the panel's
        self._blocks: dict[int, Block] = {}  # by cell; 0 is whichever is newest
        self._lock = threading.Lock()  # guards the blocks
        self._news = threading.Event()
        self._painter: threading.Thread | None = None

    def for_client(self, client: Any) -> Front:
        """The front of one mesh, made and set when first asked for."""
        front = client.front
        if not (isinstance(front, Front) and front.client is client and front._shell is self._shell):  # noqa: SLF001
            client.front = front = Front(self._shell, client)
        front.on_debugger = self.on_debugger
        return front

    def move_here(self) -> None:
        """What no ``%%mesh`` cell caused is shown in the cell that runs now."""
        self._newest = Place.here(self._shell)
        with self._lock:
            old = self._blocks.pop(0, None)
        if old is not None:
            old.paint(at_end=True)

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
        block = self._block(cell)
        block.add(rank, label, stream, text)
        self._tell(block)

    def output_tail(self, rank: int, label: str, tail: OutputTail) -> None:
        block = self._block(tail.cell)
        block.set_tail(rank, label, tail)
        self._tell(block)

    def end_lines(self) -> None:
        """Show all that is there, also lines that workers began and did not end."""
        with self._lock:
            blocks = list(self._blocks.values())
        for block in blocks:
            block.paint(at_end=True)

    def begin_block(self) -> None:
        """What comes now is shown below what the cell has shown until now."""
        self.end_lines()
        with self._lock:
            self._blocks.clear()

    def ask(self, prompt: DebugPrompt) -> str | None:
        """See debugger.ask; on the thread that waits for the cell's ops."""
        self.begin_block()
        return debugger.ask(self._shell, prompt)

    def tell(self, text: str) -> None:
        """Lines of the debugger that are no rank's own; on the thread that waits."""
        self.end_lines()
        print(text, flush=True)

    def debugger_news(self, mesh: str, session: str, text: str, prompt: str) -> None:
        """For the panel. Any thread."""
        self.on_debugger(mesh, session, with_names(text, self.place), prompt)

    def place(self, file: str) -> str:
        """In[3] for a cell's file."""
        return debugger.cell_name(self._shell, file)

    def show(self, rank: int, message: Displayed | Cleared) -> None:
        """See rich.py. Below the text, which the painter would show a moment later."""
        with self._lock:
            block = self._blocks.get(message.cell)
        if block is not None and not block.has_begun:
            block.paint()
        self._displays.show(rank, message)

    def settle(self, cell: int) -> None:
        """It has ended: what it began is shown, its displays by rank."""
        self.end_lines()
        self._displays.settle(cell)
        with self._lock:
            if (block := self._blocks.get(cell)) is not None:
                block.has_ended = True
            dropped = [self._blocks.pop(old) for old in sorted(self._blocks)[:-KEPT_BLOCKS]]
        for block in dropped:
            block.paint(at_end=True)

    def publish(self, cell: int, data: dict[str, Any], metadata: dict[str, Any]) -> None:
        """Display it in this cell, also when it has ended. Any thread."""
        self._displays.publish(cell, data, metadata)

    def ask_input(self, prompt: InputPrompt) -> str | None:
        """As ``[0.1] name? ``; on the thread that waits for the cell's ops."""
        self.begin_block()
        question = f"[{prompt.label}] {prompt.prompt}"
        try:
            return asking.ask(self._shell, question, prompt.alive, password=prompt.hidden)
        except asking.CannotAskError:
            from monarch_lab.controller.front import NobodyToAskError  # it brings torch: a mesh runs, so it is there

            raise NobodyToAskError(
                "this front end cannot ask for input (it has no box to type a line into); give the value to the cell "
                "in a variable"
            ) from None
        except asking.WorkerGoneError:
            print(f"[{prompt.label}] the worker is gone: its prompt ended")
            return None

    def _block(self, cell: int) -> Block:
        key = cell if cell in self._places else 0
        with self._lock:
            if key not in self._blocks:
                self._blocks[key] = Block(self._places.get(cell, self._newest))
            return self._blocks[key]

    def _tell(self, block: Block) -> None:
        if block.is_append_only:
            block.paint()
            return
        self._news.set()
        with self._lock:
            if self._painter is None:
                self._painter = threading.Thread(target=self._paint, name="monarch-painter", daemon=True)
                self._painter.start()

    def _paint(self) -> None:
        """Ends where there is nothing to do for a while; the next output begins another."""
        while True:
            if not self._news.wait(IDLE_S):
                with self._lock:
                    if not self._news.is_set():
                        self._painter = None
                        return
            self._news.clear()
            with self._lock:
                dirty = [block for block in self._blocks.values() if block.is_dirty]
            for block in dirty:
                try:
                    block.paint()
                except Exception:  # a stream that is closed: the next cell has another
                    log.exception("output of workers could not be shown")
            time.sleep(max([PAINT_S, *(_SHARE * block.paint_s for block in dirty)]))
