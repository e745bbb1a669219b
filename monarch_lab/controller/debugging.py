"""What %mesh debug, %mesh pm and %mesh debugpy do. Runs on: the main thread."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterable
from typing import Any

from monarch_lab.controller.front import get_default_front
from monarch_lab.controller.waiting import Pending
from monarch_lab.errors import UsageRuntimeError
from monarch_lab.wire.debugging import DebugBreakIn, DebugListen, DebugPostMortem, DebugTold

ANSWER_S = 2.0  # a worker's reader thread answers at once
LISTEN_S = 15.0  # debugpy is imported first
STOP_S = 1.0  # its main thread when it comes out of C code
_LOOK_S = 0.2
_NOBODY = (
    "no rank waits in a debugger: write breakpoint() where it is to stop, set one with %mesh break, break into what a "
    "rank runs with %mesh debug RANK, or look at the last failure with %mesh pm"
)


def debug(mesh: Any, ranks: str | None) -> None:
    """Attach to the debuggers that wait (on ``ranks``, or on all), and ask until they go on or are left; where a named
    rank has none, break into the Python code that it runs.

    Raises UsageRuntimeError where there is nothing to attach to.
    """
    client = mesh.client
    wanted = None if ranks is None else mesh.chosen(ranks)
    found = client.prompts.attach(wanted)
    missing = set(wanted or ()) - {s.rank for s in found}
    reasons = _break_in(client, sorted(missing)) if missing else []
    if not client.prompts.attach(wanted):
        raise UsageRuntimeError("; ".join(reasons) or _NOBODY)
    ask_until_they_go_on(client)


def post_mortem(mesh: Any, ranks: str | None) -> None:
    """A debugger in the frames of the last failure, on the first rank (of ``ranks``) that had it.

    Raises UsageRuntimeError where no frames are kept.
    """
    client = mesh.client
    told = _ask(client, lambda ident: DebugPostMortem(ident), client.alive if ranks is None else mesh.chosen(ranks))
    failed = {rank: t for rank, t in told.items() if t.cell}
    if not failed:
        raise UsageRuntimeError(
            "no failure is kept: %mesh pm is for after a remote function, an autograd.Function or a %%spmd cell has "
            "failed on a worker"
        )
    newest = max(t.cell for t in failed.values())
    rank = min(r for r, t in failed.items() if t.cell == newest)
    if not failed[rank].kept:
        raise UsageRuntimeError(f"rank {rank}: {failed[rank].text}")
    before = {(s.rank, s.number) for s in client.prompts.sessions}
    _ask(client, lambda ident: DebugPostMortem(ident, start=True), [rank])
    _wait_until(lambda: any((s.rank, s.number) not in before for s in client.prompts.sessions), ANSWER_S)
    ask_until_they_go_on(client)


def forget_failure(mesh: Any) -> None:
    """Let go of the frames that are kept, on every rank."""
    _ask(mesh.client, lambda ident: DebugPostMortem(ident, forget=True), mesh.client.alive)


def listen(mesh: Any, ranks: str) -> dict[int, int]:
    """Rank -> the port of the loopback interface where debugpy listens in its process. Raises UsageRuntimeError."""
    told = _ask(mesh.client, lambda ident: DebugListen(ident), mesh.chosen(ranks), LISTEN_S)
    for rank, answer in told.items():
        if not answer.port:
            raise UsageRuntimeError(f"rank {rank}: {answer.text}")
    return {rank: answer.port for rank, answer in told.items()}


def ask_until_they_go_on(client: Any) -> None:
    """Until no session is attached: each went on, was left, or all were detached."""
    (client.front or get_default_front()).move_here()
    while client.prompts.is_attached:
        try:
            client.wait(Pending([-1]), time.monotonic() + _LOOK_S)
        except TimeoutError:
            continue


def _break_in(client: Any, ranks: list[int]) -> list[str]:
    """Why ranks have not stopped."""
    told = _ask(client, lambda ident: DebugBreakIn(ident), ranks, STOP_S)
    waited = {s.rank for s in client.prompts.sessions}
    stopping = [r for r in ranks if r in told and not told[r].text and r not in waited]
    _wait_until(lambda: not set(stopping) - {s.rank for s in client.prompts.sessions}, STOP_S)
    reasons = [f"rank {rank} {answer.text}" for rank, answer in told.items() if answer.text]
    late = [r for r in ranks if r not in told]
    if late:
        listed = ", ".join(map(str, late))
        reasons.append(
            f"rank {listed} is in C code (a collective, an op of torch): it stops when that ends, and %mesh debug then "
            "goes there"
        )
    return reasons


def _ask(
    client: Any, make: Callable[[int], Any], ranks: Iterable[int], within_s: float = ANSWER_S
) -> dict[int, DebugTold]:
    pending = client.ask_aside(make, list(ranks))
    last = time.monotonic() + within_s
    while not pending.done and (left := last - time.monotonic()) > 0:
        try:
            pending.bell.get(timeout=min(left, _LOOK_S))
        except queue.Empty:
            continue
    return {rank: message for rank, (message, _) in sorted(pending.replies.items())}


def _wait_until(is_so: Callable[[], bool], within_s: float) -> None:
    """What the I/O thread brings about."""
    last = time.monotonic() + within_s
    pause: queue.SimpleQueue[None] = queue.SimpleQueue()
    while not is_so() and time.monotonic() < last:
        try:
            pause.get(timeout=0.005)
        except queue.Empty:
            continue
