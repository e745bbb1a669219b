"""What was learned is let go, here and on the workers: what no later call can use, and all where there is too much.

Runs on: whoever issues ops, under the client's lock.
"""

from __future__ import annotations

from typing import Any

from monarch_lab.controller.cache import Entry
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
    if not (cache.is_full or cache.is_full_of_plans) or client.recorder is not None or client.is_waiting:
        return
    with client.lock:
        client.flush()
        used = {number for recording in client.published for number in recording.entries}
        old = [number for number in cache.layouts if number not in used and (number < 0 or cache.is_full)]
        templates = client.defined.templates_but(used) if cache.is_full else []
        if cache.is_full:
            cache.entries.clear()
            cache.templates.clear()
            cache.never.clear()
        cache.plans.clear()
        cache.forgotten &= used
        for number in old:
            del cache.layouts[number], cache.kinds[number]
        cache.generation += 1
        client.define(wire.ForgetDef(templates, [n for n in old if n > 0], [-n for n in old if n < 0]))
