"""Asks a worker for names and descriptions while it may be busy: editors do, and wait for no cell.

Runs on: the main thread, for at most ``WAIT_S``.
"""

from __future__ import annotations

import queue
from typing import Any

from monarch_lab.wire import engine as wire

WAIT_S = 0.4  # a completion that comes later than half a second is of no use, and the kernel stands still for it


def look_up(client: Any, rank: int, path: str, prefix: str | None = None) -> wire.LookedUp | None:
    """What this rank's ``%%spmd`` namespace has under ``path``: see wire.LookUp. None: no answer in time, or the rank
    is gone."""
    if client.state != "live" or client.is_gone(rank):
        return None
    pending = client.ask_aside(lambda ident: wire.LookUp(ident, path, prefix), [rank])
    try:
        pending.bell.get(timeout=WAIT_S)
    except queue.Empty:
        client.forget_question(pending)
    message, _ = pending.replies.get(rank, (None, []))
    return message if isinstance(message, wire.LookedUp) else None
