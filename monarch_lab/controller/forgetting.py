"""What was learned is let go, here and on the workers: what no later call can use, and all where there is too much.

Runs on: whoever issues ops, under the client's lock.
"""

from __future__ import annotations

import weakref
from typing import Any

from monarch_lab.controller.cache import Entry
from monarch_lab.transport.frames import HeldInterrupt
from monarch_lab.wire import engine as wire


def forget_template(client: Any, template: int) -> None:
    """Of a call whose arguments may change: the one order that used it has been sent."""
    with client.lock:
        client.define(wire.ForgetDef([template]))


def forget_entry(client: Any, entry: Entry, template: int) -> None:
    """Of such a call that was told its result: its op may be in the buffer still."""
    if client.recorder is not None:  # a replay does it again
        return
    with client.lock:
        client.flush()
        client.cache.layouts.pop(entry.number, None)
        client.cache.kinds.pop(entry.number, None)
        client.define(wire.ForgetDef([template], [entry.number]))


def make_room(client: Any) -> None:
    """Empty the cache where it is full; what recordings use stays. Called before something new is learned."""
    cache = client.cache
    if client.recorder is not None or client.is_waiting:
        return
    if cache.is_full_of_moves:
        _forget_moves(client)
    if not (cache.is_full or cache.is_full_of_plans):
        return
    with client.lock, HeldInterrupt():
        client.flush()
        client.send_definitions()  # what is forgotten is among what was sent
        used = {number for recording in client.published for number in recording.entries}
        old = [number for number in cache.layouts if number not in used and (number < 0 or cache.is_full)]
        templates, functions = client.defined.unused_by(used) if cache.is_full else ([], [])
        if cache.is_full:
            cache.entries.clear()
            cache.templates.clear()
            cache.never.clear()
            cache.functions.clear()
        cache.plans.clear()
        cache.forgotten &= used
        for number in old:
            del cache.layouts[number], cache.kinds[number]
        cache.generation += 1
        client.define(wire.ForgetDef(templates, [n for n in old if n > 0], [-n for n in old if n < 0], functions))


def _forget_moves(client: Any) -> None:
    """But for those that recordings use, and those that a gradient may come back over."""
    known = client.cache.moves
    with client.lock, HeldInterrupt():
        client.flush()
        client.send_definitions()
        used = {number for recording in client.published for number in recording.moves}
        spans = {key: span for key, span in known.items() if key[0] == "span"}
        moves = {key: move for key, move in known.items() if key not in spans}
        numbers = {key: move.number for key, move in moves.items()}
        held = {key: weakref.ref(move) for key, move in moves.items()}
        kept = {key: move for key, move in moves.items() if move.number in used}
        known.clear()
        moves.clear()
        kept.update((key, move) for key, ref in held.items() if (move := ref()) is not None)
        known.update(spans | kept)
        client.cache.generation += 1
        client.define(wire.ForgetDef([], moves=[number for key, number in numbers.items() if key not in kept]))
