"""``ml.coalescing``: what a block issues goes to the workers at its end, as one batch.

Runs on: the thread of the block.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from monarch_lab.controller import state
from monarch_lab.controller.client import clients


@contextmanager
def coalescing() -> Iterator[None]:
    """Ops of the block are sent together when the outermost such block ends, also by an exception: what was issued
    before it is done, as without the block.

    A call of a kind that was not seen before still waits for its first result, and sends what was issued before it.
    Fetching a value inside raises NotImplementedError. Memory of values that end inside is freed at the end.
    """
    if state.coalescing.get():
        yield
        return
    token = state.coalescing.set(True)
    held = [client for client in list(clients) if client.state == "live"]
    for client in held:
        client.hold(1)
    try:
        yield
    finally:
        state.coalescing.reset(token)
        for client in held:
            client.hold(-1)
