"""Events at which two streams of a worker meet: one signals, the other waits, each once."""

from __future__ import annotations

import threading
from typing import Any

import torch

from monarch_lab.wire.engine import Op

# Executed whatever fails around them and also where ops are dropped: else the other stream would wait for ever.
WIDTHS = {Op.SIGNAL: 2, Op.WAIT: 2, Op.LEND: 3, Op.RETURN: 3}


class Event:
    def __init__(self) -> None:
        self.reached = threading.Event()
        self.on_gpu: Any = None


def signal(events: dict[int, Event], number: int) -> None:
    """What this stream did so far is seen by whoever waits."""
    event = events.setdefault(number, Event())
    if torch.cuda.is_initialized():
        event.on_gpu = torch.cuda.Event()
        event.on_gpu.record()
    event.reached.set()


def wait(events: dict[int, Event], number: int) -> None:
    event = events.setdefault(number, Event())
    while not event.reached.wait(0.2):  # not for ever at once: so that signals are handled meanwhile
        pass
    if event.on_gpu is not None:
        torch.cuda.current_stream().wait_event(event.on_gpu)
    events.pop(number, None)
