"""Displays of workers in the cell that caused them, under a line that says whose they are; equal ones once.

    ranks 0, 1:
    <the figure>

Each is two displays with ids: when another rank shows the same as its own n-th, only the line changes. Runs on: the
controller's I/O thread, but for ``begin``, ``settle`` and ``publish``.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import secrets
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from monarch_lab.wire.showing import Cleared, Displayed

KEPT_CELLS = 256
KEPT_NAMES = 4096
_NOTHING = '[{"text/plain": ""}, {}]'
_numbers = itertools.count(1)
_unique = secrets.token_hex(4)  # a notebook keeps displays of earlier kernels


@dataclass(slots=True)
class _Entry:
    bundle: str
    ranks: list[int]
    number: int = field(default_factory=lambda: next(_numbers))

    @property
    def id(self) -> str:
        return f"monarch-{_unique}-{self.number}"


class CellDisplays:
    """Of one cell: its message in a kernel, and the publisher it began with (``%%capture`` puts another there)."""

    def __init__(self, shell: Any) -> None:
        kernel = getattr(shell, "kernel", None)
        self._parent = kernel.get_parent() if kernel is not None else None
        self._publisher: Any = getattr(shell, "display_pub", None)
        # A terminal cannot change what it shows, nor can what %%capture keeps.
        self._is_live = hasattr(self._publisher, "set_thread_parent")
        self._slots: dict[int, list[_Entry]] = {}  # n -> what ranks show as their n-th
        self._next: dict[int, int] = {}  # rank -> n
        self._waits: set[int] = set()  # ranks that clear with their next display
        self._lock = threading.RLock()  # guards these: a cell that was interrupted ends while displays come

    def show(self, rank: int, bundle: str) -> None:
        with self._lock:
            self._show(rank, bundle)

    def _show(self, rank: int, bundle: str) -> None:
        if rank in self._waits:
            self._waits.discard(rank)
            self._leave(rank, after=1)
        n = self._next.get(rank, 0)
        self._next[rank] = n + 1
        entries = self._slots.setdefault(n, [])
        mine = next((entry for entry in entries if rank in entry.ranks), None)
        same = next((entry for entry in entries if entry.bundle == bundle), None)
        if mine is not None and mine is same:
            return
        if mine is not None and mine.ranks == [rank] and same is None:
            self.change(mine, bundle)
            return
        if mine is not None:
            self._withdraw(mine, rank, entries)
        if same is None or not self._is_live:
            entries.append(self.new(rank, bundle))
        else:
            same.ranks = sorted({*same.ranks, rank})
            self._label(same, update=True)

    def new(self, rank: int, bundle: str) -> _Entry:
        entry = _Entry(bundle, [rank])
        self._label(entry)
        self._publish(bundle, entry.id)
        return entry

    def change(self, entry: _Entry, bundle: str) -> None:
        entry.bundle = bundle
        self._publish(bundle, entry.id, update=True)

    def clear(self, rank: int, wait: bool) -> None:
        with self._lock:
            self._next[rank] = 0
            if wait:
                self._waits.add(rank)
            else:
                self._leave(rank, after=0)

    def settle(self) -> None:
        """At the cell's end: what is there in the order of ranks, whichever came first. A notebook that is run again
        reads the same."""
        with self._lock:
            wanted = [(entry.bundle, entry.ranks) for n in sorted(self._slots) for entry in self._of(n)]
            places = sorted((e for entries in self._slots.values() for e in entries), key=lambda e: e.number)
            self._slots, self._next, self._waits = {}, {}, set()
        if not self._is_live:
            return
        for place, (bundle, ranks) in zip(places, wanted, strict=True):
            if ranks != place.ranks:
                place.ranks = ranks
                self._label(place, update=True)
            if bundle != place.bundle:
                self.change(place, bundle)

    def _of(self, n: int) -> list[_Entry]:
        return sorted(self._slots[n], key=lambda entry: entry.ranks)

    def _leave(self, rank: int, after: int) -> None:
        for n, entries in self._slots.items():
            for entry in [entry for entry in entries if n >= after and rank in entry.ranks]:
                self._withdraw(entry, rank, entries)

    def _withdraw(self, entry: _Entry, rank: int, entries: list[_Entry]) -> None:
        entry.ranks = [r for r in entry.ranks if r != rank]
        if not entry.ranks:
            entries.remove(entry)
            if self._is_live:
                self.change(entry, _NOTHING)
        self._label(entry, update=True)

    def _label(self, entry: _Entry, update: bool = False) -> None:
        if update and not self._is_live:
            return
        self._publish(label(entry.ranks) if entry.ranks else _NOTHING, f"{entry.id}-ranks", update)

    def publish(self, data: dict[str, Any], metadata: dict[str, Any]) -> None:
        """As the cell's own. Any thread."""
        with self._in_its_cell() as publisher:
            publisher.publish(data, metadata)

    def _publish(self, bundle: str, display_id: str, update: bool = False) -> None:
        data, metadata = json.loads(bundle)
        with self._in_its_cell() as publisher:
            publisher.publish(data, metadata, transient={"display_id": display_id}, update=update)

    @contextlib.contextmanager
    def _in_its_cell(self) -> Iterator[Any]:
        """On a thread, ipykernel would show it in whatever it handled last."""
        if self._parent is None or not self._is_live:
            yield self._publisher
            return
        token = self._publisher.set_thread_parent(self._parent)
        try:
            yield self._publisher
        finally:
            self._publisher.reset_thread_parent(token)


class Displays:
    """Of one mesh, by the numbers of its client's cells."""

    def __init__(self, shell: Any) -> None:
        self._shell = shell
        self._cells: dict[int, CellDisplays] = {0: CellDisplays(shell)}
        self._named: dict[tuple[int, str], _Entry] = {}  # by rank and the code's own name

    def begin(self, number: int) -> None:
        self._cells[number] = CellDisplays(self._shell)
        for old in sorted(self._cells)[:-KEPT_CELLS]:
            del self._cells[old]

    def settle(self, number: int) -> None:
        """Its cell ends."""
        if number in self._cells:
            self._cells[number].settle()

    def publish(self, number: int, data: dict[str, Any], metadata: dict[str, Any]) -> None:
        if number in self._cells:
            self._cells[number].publish(data, metadata)

    def show(self, rank: int, message: Displayed | Cleared) -> None:
        cell = self._cells.get(message.cell) or self._cells[max(self._cells)]
        if isinstance(message, Cleared):
            cell.clear(rank, message.wait)
            return
        if not message.display_id:
            cell.show(rank, message.bundle)
            return
        key = rank, message.display_id
        if message.update:
            if key in self._named:  # else it is the name of nothing, as in a notebook
                cell.change(self._named[key], message.bundle)
            return
        self._named[key] = cell.new(rank, message.bundle)
        for oldest in list(self._named)[:-KEPT_NAMES]:
            del self._named[oldest]


def named(ranks: Iterable[int]) -> str:
    ranks = list(ranks)
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def values(shown: dict[int, str], rich: dict[int, str]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """(data, metadata) to display for a cell's last expression, by rank: the texts as one, each rich one under the
    ranks that have it."""
    by_value: dict[tuple[str, str], list[int]] = {}
    for rank, text in sorted(shown.items()):
        by_value.setdefault((text, rich.get(rank, "")), []).append(rank)
    lines = []
    for (text, bundle), ranks in by_value.items():
        if not bundle:
            lines.append(f"{named(ranks)}: " + text if "\n" not in text else f"{named(ranks)}:\n{text}")
    if lines:
        yield {"text/plain": "\n".join(lines)}, {}
    for (text, bundle), ranks in by_value.items():
        if bundle:
            yield json.loads(label(ranks))
            data, metadata = json.loads(bundle)
            yield {"text/plain": text, **data}, metadata


def label(ranks: list[int]) -> str:
    """As a bundle."""
    text = f"{named(ranks)}:"
    return json.dumps([{"text/plain": text, "text/html": f'<small style="opacity: 0.6">{text}</small>'}, {}])
