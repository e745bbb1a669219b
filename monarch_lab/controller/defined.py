"""What the workers were told and still know, for processes and streams that come later.

Runs on: whoever issues ops, under the client's lock.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from monarch_lab.wire import engine as wire

Frame = bytes | memoryview


class Defined:
    def __init__(self) -> None:
        self._known: dict[tuple[type, int], tuple[wire.Definition, list[Frame]]] = {}

    def __len__(self) -> int:
        return len(self._known)

    def note(self, definitions: Iterable[wire.Definition], frames: Sequence[Frame]) -> None:
        """These were sent, with their frames one after the other. Recordings are not kept: their owner has them."""
        rest = list(frames)
        for definition in definitions:
            match definition:
                case wire.RecordingDef():
                    continue
                case wire.ForgetDef():
                    self._forget(definition)
                    continue
                case wire.TemplateDef():
                    count = 1
                case wire.PayloadDef():
                    count = definition.frames
                case _:
                    count = 0
            taken, rest = rest[:count], rest[count:]
            number: int = getattr(definition, definition.__struct_fields__[0])
            self._known[type(definition), number] = (definition, taken)

    def unused_by(self, entries: Iterable[int]) -> tuple[list[int], list[int]]:
        """The templates that none of these entries is of, and the functions sent by value that none of them calls."""
        told = [self._known[key][0] for key in ((wire.EntryDef, n) for n in entries) if key in self._known]
        kept = {entry.template for entry in told if isinstance(entry, wire.EntryDef)}
        templates = [d for d, _ in self._known.values() if isinstance(d, wire.TemplateDef)]
        called = {d.function for d in templates if d.template in kept}
        functions = [number for kind, number in self._known if kind is wire.PayloadDef and number > 0]
        return (
            [d.template for d in templates if d.template not in kept],
            [number for number in functions if f"payload:{number}" not in called],
        )

    def _forget(self, told: wire.ForgetDef) -> None:
        for kind, numbers in (
            (wire.TemplateDef, told.templates),
            (wire.PayloadDef, [-n for n in told.templates]),  # its sources
            (wire.EntryDef, told.entries),
            (wire.BackwardDef, told.plans),
            (wire.PayloadDef, told.payloads),
            (wire.MoveDef, told.moves),
        ):
            for number in numbers:
                self._known.pop((kind, number), None)

    def order(self) -> tuple[wire.Define, list[Any]]:
        """All of it, in the order in which it was told, with its frames."""
        known = list(self._known.values())
        return wire.Define([d for d, _ in known]), [f for _, frames in known for f in frames]
