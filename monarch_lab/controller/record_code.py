"""The segments of a recording as the workers get them: code with names in place of refs.

Runs on: the thread that recorded, under the client's lock.
"""

from __future__ import annotations

from typing import Any

from monarch_lab.controller.recorder import Noted
from monarch_lab.controller.recording import Recording, Segment
from monarch_lab.controller.refs import Ref
from monarch_lab.wire import engine as wire
from monarch_lab.wire.engine import Op


def publish(recording: Recording) -> None:
    """Send what replays need: the literals, and each segment's code."""
    client = recording.client
    recording.is_published = True
    client.published.add(recording)
    for placed, mesh in recording.placed:
        ref = Ref(next(client.refs), mesh, 0)
        for device, ranks, frames in placed.orders:
            client.order(wire.Place([ref.id], device), ranks, frames, mesh.stream_number)
        recording.literals.append(ref)
    for segment in recording.segments:
        segment.number = next(client.refs)
        definition = _definition(segment, recording.copied)
        client.recordings[segment.number] = definition
        with client.lock:
            client.define(definition)
        recording.length += len(segment.ops)
        segment.ops, segment.refs, segment.made, segment.numbers = [], [], [], []


def _definition(segment: Segment, copied: set[int]) -> wire.RecordingDef:
    names: dict[int, int] = {ref: k + 1 for k, ref in enumerate(segment.refs)}
    names[0] = 0

    def name(ref: int) -> int:
        return names.setdefault(ref, len(names))

    fixed: list[Any] = []
    places: dict[tuple[type, str], int] = {}
    for row in segment.numbers:
        for is_varying, number in row:
            if not is_varying and (type(number), repr(number)) not in places:
                places[type(number), repr(number)] = len(fixed)
                fixed.append(number)
    code: list[int] = []
    ambient = -1
    for op, row in zip(segment.ops, segment.numbers, strict=True):
        if op.ambient != ambient:
            ambient = op.ambient
            code += (Op.AMBIENT, ambient)
        used = [name(ref) for ref in op.inputs]
        made = [name(ref) for ref in op.outputs]
        if op.number == Op.SET_GRAD:
            code += (Op.SET_GRAD, *used)
        elif op.number == Op.BACKWARD:
            code += (Op.BACKWARD, op.plan, *_interleaved(op, used, made))
        else:
            operands = [len(fixed) + n if is_varying else places[type(n), repr(n)] for is_varying, n in row]
            code += (op.number, *used, *operands, *made)
    return wire.RecordingDef(
        recording=segment.number,
        inputs=len(segment.refs),
        varying=len(segment.varying),
        outputs=[names[ref] for ref in segment.made],
        copied=[k + 1 for k, value in enumerate(segment.inputs) if value in copied],
        code=code,
        numbers=fixed,
    )


def _interleaved(op: Noted, used: list[int], made: list[int]) -> list[int]:
    """A backward pass as the stream has it: roots, gradients and inputs, then leaf, new gradient, gradient added to."""
    grads = len(made)
    first = len(used) - 2 * grads
    triples = zip(used[first : first + grads], made, used[first + grads :], strict=True)
    return used[:first] + [n for triple in triples for n in triple]
