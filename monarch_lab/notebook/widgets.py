"""MeshView: a mesh as it is now, in a cell's output.

One widget for the whole mesh, whatever its size: a widget for each process makes a front end crawl at 256 and
loses output at 1,024. Up to ROWS processes are rows of a table; more are a heat map, one square a process, sent as
a PNG of one byte a square.

Runs on: the main thread, and "mesh-view", which alone changes the widget once it is shown.
"""

from __future__ import annotations

import math
import struct
import threading
import zlib
from typing import TYPE_CHECKING, Any

import ipywidgets

from monarch_lab.notebook.names import readable
from monarch_lab.notebook.status import COLOURS, card_html
from monarch_lab.wire.snapshot import MeshSnapshot, ProcessState

if TYPE_CHECKING:
    from monarch_lab.controller import DeviceMesh

PERIOD_S = 0.5
ROWS = 8
SQUARE_PX = 12
STATES: tuple[ProcessState, ...] = ("starting", "idle", "busy", "debugging", "lost", "exited")


class MeshView(ipywidgets.VBox):
    """``display(MeshView(mesh))``; it refreshes itself until ``close()``, or until the mesh is stopped."""

    children: Any

    def __init__(self, mesh: DeviceMesh) -> None:
        self._mesh = mesh
        self._summary = ipywidgets.HTML()
        self._map = ipywidgets.Image(format="png")
        self._legend = ipywidgets.HTML(_legend())
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        super().__init__(children=[self._summary])
        self._draw(readable(mesh.status()))

    def _repr_mimebundle_(self, **options: Any) -> Any:
        # Shown, not made: a view that nobody sees needs no thread.
        if self._thread is None and not self._closing.is_set():
            self._thread = threading.Thread(target=self._refresh, name="mesh-view", daemon=True)
            self._thread.start()
        return super()._repr_mimebundle_(**options)

    def close(self) -> None:
        self._closing.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        for part in (self._summary, self._map, self._legend):
            part.close()
        super().close()

    def _refresh(self) -> None:
        while not self._closing.wait(PERIOD_S):
            snapshot = readable(self._mesh.status())
            self._draw(snapshot)
            if snapshot.state == "closed":
                return

    def _draw(self, mesh: MeshSnapshot) -> None:
        as_rows = len(mesh.processes) <= ROWS
        self._summary.value = card_html(mesh, with_processes=as_rows)
        if not as_rows:
            image = heat_map([process.state for process in mesh.processes], columns(mesh))
            self._map.value = image
        children = (self._summary,) if as_rows else (self._summary, self._map, self._legend)
        if len(children) != len(self.children):
            self.children = children


def columns(mesh: MeshSnapshot) -> int:
    """Squares a row: the last dim where it makes a map of a fair shape, else about a square."""
    number = len(mesh.processes)
    last = mesh.dims[-1][1] if mesh.dims else number
    is_fair = last > 1 and last <= 64 and number // last <= 4 * last
    return last if is_fair else math.ceil(math.sqrt(number))


def heat_map(states: list[ProcessState], width: int) -> bytes:
    """A PNG with a square for each state, in rows of ``width``; gaps and what is left over are clear."""
    clear = len(STATES)
    height = math.ceil(len(states) / width)
    codes = [STATES.index(state) for state in states] + [clear] * (width * height - len(states))
    rows = []
    for first in range(0, width * height, width):
        line = b"".join(bytes([code]) * (SQUARE_PX - 1) + bytes([clear]) for code in codes[first : first + width])
        rows += [b"\0" + line] * (SQUARE_PX - 1) + [b"\0" + bytes([clear]) * len(line)]  # b"\0": not filtered
    palette = b"".join(bytes.fromhex(COLOURS[state][1:]) for state in STATES) + b"\0\0\0"
    header = struct.pack(">IIBBBBB", width * SQUARE_PX, height * SQUARE_PX, 8, 3, 0, 0, 0)
    chunks = (
        (b"IHDR", header),
        (b"PLTE", palette),
        (b"tRNS", b"\xff" * clear + b"\0"),
        (b"IDAT", zlib.compress(b"".join(rows), 1)),
        (b"IEND", b""),
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(*chunk) for chunk in chunks)


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def _legend() -> str:
    return " ".join(f"<span style='color: {COLOURS[state]};'>■</span> {state}" for state in STATES)
