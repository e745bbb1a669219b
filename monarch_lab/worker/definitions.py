"""What the kernel has defined for the op stream: each has a number, is sent once and never changes
until it is forgotten."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from monarch_lab.errors import ProtocolError
from monarch_lab.tensors import naming, payload
from monarch_lab.wire import engine as wire
from monarch_lab.worker import calls

if TYPE_CHECKING:
    from monarch_lab.worker.recording import Recording


class Definitions:
    """By number. ``make_entry`` turns an EntryDef and its template into an Entry, ``make_recording`` a RecordingDef
    into a Recording (they need the engine); ``drop_entry`` is told which are forgotten."""

    def __init__(
        self,
        make_entry: Callable[[wire.EntryDef, calls.Template], calls.Entry],
        make_recording: Callable[[wire.RecordingDef], Recording],
        drop_entry: Callable[[int], None],
    ) -> None:
        self.meshes: dict[int, wire.MeshDef] = {}
        self.templates: dict[int, calls.Template] = {}
        self.entries: dict[int, calls.Entry] = {}
        self.ambients: dict[int, dict[str, Any]] = {}
        self.plans: dict[int, wire.BackwardDef] = {}
        self.recordings: dict[int, Recording] = {}
        self.moves: dict[int, wire.MoveDef] = {}
        self._payloads: dict[int, Any] = {}
        self._make_entry = make_entry
        self._make_recording = make_recording
        self._drop_entry = drop_entry

    def add(self, order: wire.Define, frames: Sequence[bytes | memoryview]) -> None:
        rest = list(frames)
        for definition in order.definitions:
            match definition:
                case wire.TemplateDef():
                    tree = payload.unpack(rest.pop(0))
                    function = self._function(definition.function)
                    self.templates[definition.template] = calls.make_template(definition, function, tree)
                case wire.EntryDef():
                    template = self.templates[definition.template]
                    self.entries[definition.entry] = self._make_entry(definition, template)
                case wire.AmbientDef():
                    self.ambients[definition.ambient] = definition.values
                case wire.PayloadDef():
                    payload.remember_sources(definition.sources)
                    taken, rest = rest[: definition.frames], rest[definition.frames :]
                    if taken:  # without frames: sources alone
                        self._payloads[definition.payload] = _opened(taken)
                case wire.MeshDef():
                    self.meshes[definition.mesh] = definition
                case wire.MoveDef():
                    self.moves[definition.move] = definition
                case wire.BackwardDef():
                    self.plans[definition.plan] = definition
                case wire.RecordingDef():
                    self.recordings[definition.recording] = self._make_recording(definition)
                case wire.ForgetDef():
                    for known, numbers in (
                        (self.templates, definition.templates),
                        (self.entries, definition.entries),
                        (self.plans, definition.plans),
                        (self._payloads, definition.payloads),
                        (self.moves, definition.moves),
                    ):
                        for number in numbers:
                            known.pop(number, None)
                    for number in definition.entries:
                        self._drop_entry(number)

    def _function(self, name: str) -> Any:
        try:
            return naming.resolve(name, self._payloads)
        except ProtocolError as e:
            return _failing(e)


def _opened(frames: Sequence[bytes | memoryview]) -> Any:
    try:
        return payload.loads(frames)
    except Exception as e:
        return _failing(e)


def _failing(error: Exception) -> Callable[..., Any]:
    """The call that uses it fails with the reason, at the user's line; the other definitions stand."""

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise error

    return fail
