"""The user's lines of ops that have been run, for the warnings of autograd's anomaly mode (tensors/anomaly.py).

Kept from the first op in that mode on, and of the last ones alone. Runs on: whoever sends notes, the I/O thread reads.
"""

from __future__ import annotations

from typing import Any

from monarch_lab.controller.locations import Location, frame_of
from monarch_lab.tensors.anomaly import CALL, has_marks, resolve

_KEPT = 2_000  # batches and calls


class Lines:
    def __init__(self) -> None:
        self.is_kept = False
        self._sent: dict[tuple[bool, int], list[Any]] = {}

    def note(self, number: int, where: list[Location], *, is_call: bool = False) -> None:
        if self.is_kept:
            self._sent[is_call, number] = where
            if len(self._sent) > _KEPT:
                self._sent.pop(next(iter(self._sent)))

    def put_into(self, text: str) -> str:
        """What a worker printed, with lines in place of its marks."""
        return resolve(text, self._line) if has_marks(text) else text

    def _line(self, batch: int, position: int, inside: int) -> str:
        where = self._sent.get((True, position) if batch == CALL else (False, batch), [])
        position = 0 if batch == CALL else position
        location = where[position] if position < len(where) else None
        frame = frame_of(getattr(location, "inside", {}).get(inside, location))
        if frame is None:
            return "an op whose line is not known any more"
        return f'File "{frame.filename}", line {frame.line}, in {frame.function}\n    {frame.source}'
