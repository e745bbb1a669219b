"""What a recording does between its segments: values lent to another stream and back, events, moves to another mesh.

Not part of what the workers run as one function, as several streams or meshes take part: a replay puts these into the
stream as the run did, with events of its own.

Runs on: the thread that calls, under the client's lock.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from monarch_lab.controller import dispatch
from monarch_lab.controller.lending import handles_of
from monarch_lab.controller.streams import next_event
from monarch_lab.wire.engine import Op

WIDTHS = {Op.LEND: 3, Op.RETURN: 3, Op.SIGNAL: 2, Op.WAIT: 2, Op.MOVE: 5}


@dataclass(slots=True)
class Step:
    """``ops``: the one as it was noted. ``inputs`` and ``outputs`` are values of the recording."""

    mesh: Any
    ops: list[Any]
    inputs: list[int] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)


def noted(code: list[int], i: int, events: dict[int, int]) -> tuple[list[int], list[int], list[int]]:
    """(inputs, numbers, outputs) of the instruction at ``i``. Events are numbered from 0 in each recording."""
    match code[i]:
        case Op.LEND:
            return [code[i + 1]], [], [code[i + 2]]
        case Op.RETURN:
            return [code[i + 1], code[i + 2]], [], []
        case Op.MOVE:
            return [code[i + 2]], [], [code[i + 3]]
    return [], [events.setdefault(code[i + 1], len(events))], []


def send(client: Any, step: Step, refs: list[int], inputs: list[Any], events: dict[int, int], where: Any) -> None:
    """``refs`` of all values, ``inputs`` the handles of the first of them, ``events`` those of this replay."""
    op = step.ops[0]
    client.use_scope(step.mesh)
    if client.urgent:
        client.drain_dead()
    if not client.code:
        client.dirty()
    if op.number == Op.MOVE and op.ambient != client.ambient:
        dispatch.start_ambient(client, op.ambient)
    for code in _codes(client, op, step, refs, inputs, events):
        client.where.append(where)
        client.code += code


def _codes(
    client: Any, op: Any, step: Step, refs: list[int], inputs: list[Any], events: dict[int, int]
) -> Iterator[tuple[int, ...]]:
    used = [refs[v] for v in step.inputs]
    match op.number:
        case Op.LEND:
            yield Op.LEND, used[0], refs[step.outputs[0]]
        case Op.RETURN:
            lent, origin = step.inputs
            # Its views now, which may be others than when it was recorded.
            back = [h._ref.id for h in handles_of(inputs[origin])] if origin < len(inputs) else [used[1]]
            client.lent[refs[lent]] = back
            client.ended_loans.append(refs[lent])
            for ref in back:
                yield Op.RETURN, refs[lent], ref
        case Op.MOVE:
            client.ties.move(step.mesh.ranks_key)
            yield Op.MOVE, op.plan, used[0], refs[step.outputs[0]], 0
        case _:
            yield op.number, events.setdefault(op.numbers[0], next_event())
