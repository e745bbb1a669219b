"""``%%spmd`` cells from the kernel: one order to the ranks, the wait with its way out, and one error of all they say.

Runs on: the main thread; the I/O thread fills the Pending.
"""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field
from typing import Any

from monarch_lab.controller.calling import opened
from monarch_lab.controller.constants import materialise
from monarch_lab.controller.failures import named
from monarch_lab.controller.front import get_default_front
from monarch_lab.controller.locations import Location
from monarch_lab.controller.moves import settle_collectives
from monarch_lab.controller.refs import Ref
from monarch_lab.controller.spmd_ends import State, Story, ends, late, lifted, note, note_left, raise_failure, waited
from monarch_lab.controller.stall_watch import StallWatch
from monarch_lab.controller.waiting import Pending
from monarch_lab.errors import (
    DetachedError,
    DeviceException,
    InternalError,
    UsageRuntimeError,
    UsageTypeError,
    UsageValueError,
)
from monarch_lab.tensors import payload
from monarch_lab.wire import engine as wire
from monarch_lab.wire.codec import encode

_LOOK_S = 0.2
_TELL_S = 2.0  # a cell that takes longer may wait for a rank that was left in a debugger
GRACE_S = 1.0  # how long ranks may wait in a collective for one that has failed


@dataclass(frozen=True, slots=True)
class SpmdCell:
    """``shards``: the notebook's mesh tensors that it names. ``notebook``: every name of the notebook, for advice.
    ``code``: what is run, where that is not ``source`` itself. ``number``: of the cell; 0: the one that runs."""

    source: str
    filename: str
    ranks: tuple[int, ...]
    is_quiet: bool = False
    shards: Mapping[str, Any] = field(default_factory=dict)
    out: tuple[str, ...] = ()
    timeout_s: float | None = None
    notebook: Container[str] = ()
    code: str = ""
    number: int = 0
    on_sent: Callable[[], None] = lambda: None
    debug: bool = False


@dataclass(frozen=True, slots=True)
class SpmdResult:
    shown: dict[int, str]  # the last expression's repr, by rank
    out: dict[str, Any]  # mesh tensors
    rich: dict[int, str]  # its rich form where it has one, JSON of [data by mime type, metadata], by rank


_states: weakref.WeakKeyDictionary[Any, State] = weakref.WeakKeyDictionary()


def worker_names(client: Any) -> frozenset[str]:
    """Variables of ``%%spmd`` cells, as the last of them left them."""
    return _states[client].names if client in _states else frozenset()


def run_spmd(mesh: Any, cell: SpmdCell) -> SpmdResult:
    """Run the cell on its ranks and wait for them.

    Raises RemoteException (``by_rank``) where it failed, DeviceException where a rank died, TimeoutError after
    ``timeout_s``, KeyboardInterrupt, and UsageValueError for an ``out`` that is no mesh tensor.
    """
    client = mesh.client
    mesh.check_alive(cell.ranks)
    if cell.out and len(cell.ranks) < len(mesh):
        raise UsageValueError(
            "--out makes mesh tensors of the whole mesh: run the cell on all ranks, or use %mesh pull"
        )
    _take_turn(client)
    settle_collectives(client, client.all_ranks)
    client.after_all(lambda: None)  # an interrupt counts from here
    state = _states.setdefault(client, State())
    note_left(state)
    shards = _given(mesh, state, cell.shards, cell.ranks)
    asked = _joining(client, state, cell.ranks)
    refs = [Ref(next(client.refs), mesh, 0) for _ in cell.out]
    ident = 0
    story = Story()

    def make(number: int) -> wire.RunSpmd:
        nonlocal ident
        ident = number
        cell.on_sent()  # with the lock held: what others send now comes after it
        return wire.RunSpmd(
            number,
            cell.number or client.cell,
            list(cell.ranks),
            0 if state.is_stale else state.group,
            cell.source,
            cell.filename,
            cell.is_quiet,
            list(mesh.names),
            list(mesh.slice_.sizes),
            shards,
            [(name, ref.id) for name, ref in zip(cell.out, refs, strict=True)],
            cell.code,
            cell.debug,
        )

    pending = client.request(make, asked, where=_first_line(cell))
    named_refs = {ref for _, ref in shards}
    must_end = set(asked)
    try:
        _wait(client, pending, ident, cell, story)
    except (DetachedError, KeyboardInterrupt) as error:
        if isinstance(error, KeyboardInterrupt) and error is not client.left_prompt:
            raise KeyboardInterrupt(waited(pending, cell)) from None
        must_end = set(ends(pending))  # the others go on in the debugger
        state.left.append((pending, frozenset(asked) - must_end, named_refs))
        pending.add_callback(lambda: _tell_late(client, pending, cell))
        raise
    finally:
        ended = {r: m for r, m in ends(pending).items() if r in must_end}
        note(state, ended, must_end, named_refs)
    if pending.waiting or len(ended) < len(asked):
        client.check_alive()
        processes = client.supervisor.processes
        if others := [rank for rank in asked if processes[rank].pid != state.pids.get(rank)]:
            raise DeviceException(
                f"{named(others)} got another process while this %%spmd cell ran there: what it held is gone, run "
                "the cell again",
                tuple(others),
            )
        crashed = [m.failure.text for m, _ in pending.replies.values() if isinstance(m, wire.LearnFailed)]
        raise InternalError("; ".join(crashed) or f'mesh "{mesh.name}" gave no answer')
    raise_failure(client, state, cell, ended, story)
    shown = {rank: m.shown for rank, m in ended.items() if m.shown is not None}
    rich = {rank: m.rich for rank, m in ended.items() if m.rich}
    return SpmdResult(shown, lifted(mesh, cell, ended, refs), rich)


def push(mesh: Any, values: dict[str, Any], ranks: tuple[int, ...] | None = None) -> None:
    """Put values of the notebook into the namespace of ``%%spmd`` cells; a mesh tensor arrives as each rank's shard.

    Raises UsageTypeError for what cannot be sent.
    """
    client = mesh.client
    _take_turn(client)
    ranks = mesh.ranks_key if ranks is None else ranks
    state = _states.setdefault(client, State())
    shards = _given(mesh, state, {k: v for k, v in values.items() if _is_mesh(v)}, ranks)
    plain = {k: v for k, v in values.items() if not _is_mesh(v)}
    frames, sources = payload.dumps(list(plain.values())) if plain else ([], {})
    settle_collectives(client, client.all_ranks)
    pending = client.request(lambda ident: wire.PushSpmd(ident, list(plain), sources, shards), ranks, frames)
    client.wait(pending)
    for rank in ranks:
        if rank not in pending.replies or not isinstance(pending.replies[rank][0], wire.Fetched):
            opened(client, pending, rank)  # raises what became of it
    state.names |= values.keys()


def pull(mesh: Any, names: list[str], ranks: tuple[int, ...]) -> dict[int, dict[str, Any]]:
    """By rank: variables of ``%%spmd`` cells, tensors on the CPU. Raises RemoteException where one is not there."""
    client = mesh.client
    _take_turn(client)
    pending = client.request(lambda ident: wire.PullSpmd(ident, names), ranks)
    client.wait(pending)
    return {rank: dict(zip(names, opened(client, pending, rank), strict=True)) for rank in ranks}


def sync_modules(mesh: Any, path: list[str]) -> dict[int, tuple[list[str], list[str]]]:
    """By rank: the user's modules that were reloaded, for their files have changed, and what was added to sys.path.

    Raises RemoteException with what a module raises as it is loaded again.
    """
    client = mesh.client
    _take_turn(client)
    pending = client.request(lambda ident: wire.SyncModules(ident, path), mesh.ranks_key)
    client.wait(pending)
    return {rank: opened(client, pending, rank)[0] for rank in mesh.ranks_key}


def _is_mesh(value: Any) -> bool:
    return bool(getattr(type(value), "is_mesh_tensor", False))


# --- before it runs


def _take_turn(client: Any) -> None:
    """After a cell that was not waited for; raises what it failed with, UsageRuntimeError where it stands in a debugger
    that was left."""
    if client.late is not None:
        try:
            client.late()
        except DetachedError as error:
            raise UsageRuntimeError(f"a cell before this one has not ended: {error}; this one did not run") from None


def _given(mesh: Any, state: State, tensors: Mapping[str, Any], ranks: tuple[int, ...]) -> list[tuple[str, int]]:
    """Raises what an op on these tensors would: of another mesh, lent, dropped, or lost with a process."""
    given = []
    for name, tensor in tensors.items():
        tensor._ref.mesh.check_alive(set(ranks).intersection(tensor._ref.mesh.ranks_key))
        if tensor._ref.mesh.client is not mesh.client:
            raise UsageTypeError(f'{name} is on mesh "{tensor._ref.mesh.name}", and this cell runs on "{mesh.name}"')
        if tensor._ref.mesh.stream_number:
            raise UsageTypeError(f"{name} is on a stream of its own: borrow it to the default stream first")
        if hasattr(tensor, "_value"):
            materialise(tensor)
        ref = tensor._ref.id
        given.append((name, ref))
        state.given[ref] = weakref.ref(tensor)
    return given


def _joining(client: Any, state: State, ranks: tuple[int, ...]) -> tuple[int, ...]:
    """Who is asked: every rank where the default group is to be formed. A mesh with a dead rank has none."""
    pids = {rank: client.supervisor.processes[rank].pid for rank in client.alive}
    if pids == state.pids and not state.is_stale:
        return ranks
    state.is_stale = len(pids) < client.world
    if state.is_stale:
        return ranks
    state.group += 1
    state.pids = pids
    state.sequences.clear()
    return tuple(client.all_ranks)


def _first_line(cell: SpmdCell) -> Location:
    """Of its code, for displays of what a rank does."""
    lines = cell.source.split("\n")
    blank = next((k for k, line in enumerate(lines) if line.strip()), 0)
    code = compile("\n" * blank + "pass", cell.filename, "exec")
    return code, len(code.co_code) - 2  # its last instruction: the first is on no line


# --- while it runs


def _wait(client: Any, pending: Pending, ident: int, cell: SpmdCell, story: Story) -> None:
    """Until every rank has ended. Where one failed and others wait in a collective, they are freed after a moment.

    Who waits in vain for one that has not failed is freed as well: see stalls.py.
    """
    deadline = None if cell.timeout_s is None else time.monotonic() + cell.timeout_s
    failed_at: float | None = None
    is_freed = False
    watch = StallWatch(client, time.monotonic())
    telling_at = time.monotonic() + _TELL_S
    while not pending.done:
        until = time.monotonic() + _LOOK_S
        try:
            client.wait(pending, until)
        except TimeoutError:
            now = time.monotonic()
        else:
            return
        if not story.first:
            story.first.update(rank for rank, (m, _) in list(pending.replies.items()) if getattr(m, "failure", None))
        is_asked = len(client.prompts) > 0 or any(client.is_debugging(rank) for rank in pending.waiting)
        if now >= telling_at:
            telling_at = math.inf
            front = client.front or get_default_front()
            if left := client.prompts.left_behind(front.place):
                front.tell(f"{left}: who meets it in a collective waits until it goes on (%mesh debug)")
        if is_asked or now > until + _LOOK_S:  # the user thinks, or has answered a prompt of this wait
            failed_at = None
            deadline = deadline and deadline + (now - until) + _LOOK_S
            continue
        if deadline is not None and now >= deadline:
            ranks = sorted(pending.waiting)
            client.stop_cell()
            raise TimeoutError(late(ranks, pending, cell))
        if not is_freed and not _has_failed(pending):
            wrong, stuck = watch.look(set(pending.waiting), _begun(client, pending), now)
            if stuck and not story.wrong:
                story.wrong, story.freed = wrong, stuck
                client.supervisor.send_control(sorted(stuck), encode(wire.FreeSpmd(ident)))
        if not is_freed and _has_failed(pending):
            failed_at = failed_at or now
            if now - failed_at >= GRACE_S - _LOOK_S:
                is_freed = True
                story.freed = story.freed | pending.waiting
                client.supervisor.send_control(sorted(pending.waiting), encode(wire.FreeSpmd(ident)))


def _tell_late(client: Any, pending: Pending, cell: SpmdCell) -> None:
    """How a cell ended that was left in a debugger. Runs on: the I/O thread."""
    front = client.front
    for rank, message in ends(pending).items():
        if message.failure is not None:
            error = f"{message.failure.type_name}: {message.failure.text}"
            text = f"the %%spmd cell that was left in the debugger failed: {error}"
        elif message.shown is not None:
            text = message.shown
        else:
            continue
        if front is not None:
            front.output(client.cell, rank, client.label(rank), "stdout", f"{text}\n")


def _begun(client: Any, pending: Pending) -> dict[int, dict[str, int]]:
    """How many collectives each group had begun on the ranks that do not run the cell, or not any more."""
    others = {r: s for r, s in _states[client].sequences.items() if r not in pending.ranks} if client in _states else {}
    ended = {r: m.sequences for r, (m, _) in list(pending.replies.items()) if isinstance(m, wire.SpmdEnded)}
    return {**others, **ended}


def _has_failed(pending: Pending) -> bool:
    return any(getattr(m, "failure", None) is not None for m, _ in list(pending.replies.values()))
