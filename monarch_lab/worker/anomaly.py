"""What autograd's anomaly mode keeps of an op: a mark for the notebook's line, and the frames of users' functions.

Runs on: any thread of a stream.
"""

from __future__ import annotations

import bisect
import sys
from types import CodeType, FrameType

import torch.fx.traceback

from monarch_lab.tensors.anomaly import CALL, mark
from monarch_lab.wire.engine import Op
from monarch_lab.worker import failures
from monarch_lab.worker.engine import Engine
from monarch_lab.worker.op_stream import OpStream

_CALLS = {f.__code__ for f in (Engine.learn, Engine.learn_backward, Engine.call_and_fetch)}
_original = torch.fx.traceback.format_stack


def install() -> None:
    """torch asks this function for the stack whenever a node is made in anomaly mode."""
    torch.fx.traceback.format_stack = _stack


def _stack() -> list[str]:
    place = _place()
    if place is None:
        return _original()
    return [f"  {place}\n", *(text for text in _original() if not failures.is_our_text(text))]


def _place() -> str | None:
    """The mark of the op that this thread runs."""
    frame: FrameType | None = sys._getframe(2)
    replay: tuple[CodeType, int] | None = None
    while frame is not None:
        code = frame.f_code
        if code is OpStream.run_code.__code__:
            return _in_batch(frame, replay)
        if code in _CALLS:
            return mark(CALL, frame.f_locals["order"].ident)
        if code.co_name == "replay" and failures.is_our_text(code.co_filename):
            replay = (code, frame.f_lineno)
        frame = frame.f_back
    return None


def _in_batch(frame: FrameType, replay: tuple[CodeType, int] | None) -> str:
    found = frame.f_locals
    engine, batch, i, within = found["self"], found["batch"], found["i"], found["within"]
    position = engine.position(batch.code, i)
    if within >= 0:
        return mark(batch.number, within, position)
    if replay is None or batch.code[i] != Op.REPLAY:
        return mark(batch.number, position)
    recording = engine.known.recordings[batch.code[i + 1]]
    at = bisect.bisect_right(recording.starts, replay[1]) - 1
    inside = sum(part.number != Op.AMBIENT for part in recording.parts[:at])
    return mark(batch.number, position, inside)
