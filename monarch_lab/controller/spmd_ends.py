"""How a ``%%spmd`` cell ended: what is kept of it, what it gave, and one error of all that the ranks say.

Runs on: the thread that waits for the cell.
"""

from __future__ import annotations

import pickle
import weakref
from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from monarch_lab.controller import failures
from monarch_lab.controller.dispatch import make_handle
from monarch_lab.controller.refs import Ref
from monarch_lab.controller.waiting import Pending
from monarch_lab.errors import UsageValueError
from monarch_lab.tensors.meta import intern
from monarch_lab.wire import engine as wire

if TYPE_CHECKING:
    from monarch_lab.controller.spmd import SpmdCell

_CONNECTION_ENDED = {"RuntimeError", "DistBackendError", "DistNetworkError", "DistStoreError"}
_MISSING = "not defined"  # as worker/spmd.py has it
_STALLED = pickle.dumps(RuntimeError())  # for the class of the exception


@dataclass(slots=True)
class Story:
    """Of one run. ``first``: the ranks that had failed when that was first seen; ``freed``: those whose wait was ended;
    ``wrong``: why, where no failure was."""

    first: set[int] = field(default_factory=set)
    freed: set[int] = field(default_factory=set)
    wrong: str = ""


@dataclass(slots=True)
class State:
    """Of one mesh. ``group`` numbers its default process group, formed by the processes ``pids``. ``left``: cells that
    were left in a debugger: their answers, the ranks that had none, the notebook's tensors that they name."""

    group: int = 0
    pids: dict[int, int] = field(default_factory=dict)
    is_stale: bool = True
    sequences: dict[int, dict[str, int]] = field(default_factory=dict)
    given: dict[int, weakref.ref[Any]] = field(default_factory=dict)
    names: frozenset[str] = frozenset()
    left: list[tuple[Pending, frozenset[int], set[int]]] = field(default_factory=list)


def late(ranks: list[int], pending: Pending, cell: SpmdCell) -> str:
    where = waited(pending, cell)
    return f"%%spmd: {failures.named(ranks)} had not ended after {cell.timeout_s:g} s" + (f": {where}" if where else "")


def waited(pending: Pending, cell: SpmdCell) -> str:
    """Where the ranks were that an interrupt has ended."""
    ended = {r: m for r, (m, _) in sorted(pending.replies.items()) if isinstance(m, wire.SpmdEnded)}
    stopped = {r: m.failure for r, m in ended.items() if m.failure and (m.freed or m.failure.interrupted)}
    return _places(
        {r: f for r, f in stopped.items() if any(frame[0] == cell.filename for frame in f.frames)}, cell, "was"
    )


def ends(pending: Pending) -> dict[int, wire.SpmdEnded]:
    return {r: m for r, (m, _) in sorted(pending.replies.items()) if isinstance(m, wire.SpmdEnded)}


def note_left(state: State) -> None:
    """Of the cells that were left in a debugger, those that have ended since."""
    for left in list(state.left):
        pending, ranks, named = left
        if pending.done:
            state.left.remove(left)
            note(state, {r: m for r, m in ends(pending).items() if r in ranks}, ranks, named)


def note(state: State, ended: dict[int, wire.SpmdEnded], asked: Set[int], named: set[int]) -> None:
    """``asked``: the ranks that were to end."""
    for rank, message in ended.items():
        state.sequences[rank] = message.sequences
        state.names = frozenset(message.names)
    # A cell may have written what it names in ways that leave no trace (numpy, .data).
    for ref in named.union(*(m.written for m in ended.values())):
        tensor = state.given[ref]() if ref in state.given else None
        if tensor is not None:
            (tensor._store or tensor._ref).equal = 0
    state.given = {ref: tensor for ref, tensor in state.given.items() if tensor() is not None}
    is_whole = len(ended) == len(asked)
    is_there = all(state.sequences.get(rank) for rank in asked)
    is_out_of_step = any(m.failure is not None for m in ended.values()) and _differ(state.sequences)
    state.is_stale = state.is_stale or not is_whole or not is_there or is_out_of_step


def _differ(sequences: dict[int, dict[str, int]]) -> bool:
    """Whether ranks have begun different numbers of collectives of one group."""
    by_group: dict[str, set[int]] = {}
    for groups in sequences.values():
        for name, number in groups.items():
            by_group.setdefault(name, set()).add(number)
    return any(len(numbers) > 1 for numbers in by_group.values())


def raise_failure(client: Any, state: State, cell: SpmdCell, ended: dict[int, wire.SpmdEnded], story: Story) -> None:
    failed = {rank: m.failure for rank, m in ended.items() if m.failure is not None}
    if not failed:
        return
    client.blame_death(failed.values())
    # One of them may have lost its connection to another before it was told itself.
    waited = {
        r: f for r, f in failed.items() if ended[r].freed or (r in story.freed and f.type_name in _CONNECTION_ENDED)
    }
    if story.wrong:  # what the end of their connections said to them says nothing to the user
        told = f"{story.wrong}: {_places(waited, cell)}"
        waited = {rank: replace(f, type_name="RuntimeError", text=told, pickled=_STALLED) for rank, f in waited.items()}
        failed |= waited
    causes = {rank: f for rank, f in failed.items() if rank not in waited} or failed
    causes = dict(sorted(causes.items(), key=lambda item: (item[0] not in story.first, item[1].severed, item[0])))
    more = ""
    if len(causes) < len(failed):
        more += f"; {_places(waited, cell)}"
    names = [ended[rank].missing for rank in causes]
    missing = next((name for name in names if name in cell.shards or name in cell.notebook), "")
    if missing in cell.shards:
        there = list(cell.shards[missing]._ref.mesh.ranks_key)
        more += f"; {missing} is a tensor of the notebook on {failures.named(there)} alone"
    elif missing:
        more += f"; {missing} is a variable of the notebook: %mesh push {missing} sends it"
    if state.is_stale and len(client.alive) == client.world:
        more += "; the next cell has a new default process group: make DDP modules and groups of your own again"
    error = failures.build(causes, None, cell.filename, more)
    error.line = next((frame.line for frame in error.first.frames if frame.filename == cell.filename), None)
    raise error


def _places(failed: Mapping[int, wire.Failure], cell: SpmdCell, verb: str = "waited") -> str:
    """As in "ranks 0, 2 waited in line 3 (dist.all_reduce(t))"."""
    by_place: dict[str, list[int]] = {}
    for rank, failure in failed.items():
        frames = [f for f in failure.frames if f[0] == cell.filename]
        place = f"line {frames[-1][1]} ({frames[-1][3]})" if frames else "a collective"
        by_place.setdefault(place, []).append(rank)
    return "; ".join(f"{failures.named(ranks)} {_verb(verb, ranks)} in {place}" for place, ranks in by_place.items())


def _verb(verb: str, ranks: list[int]) -> str:
    return "were" if verb == "was" and len(ranks) > 1 else verb


def lifted(mesh: Any, cell: SpmdCell, ended: dict[int, wire.SpmdEnded], refs: list[Ref]) -> dict[str, Any]:
    handles = {}
    for k, (name, ref) in enumerate(zip(cell.out, refs, strict=True)):
        by_rank = {rank: m.outs[k] for rank, m in ended.items()}
        first = by_rank[cell.ranks[0]]
        if isinstance(first, str) or any(meta != first for meta in by_rank.values()):
            if all(meta == _MISSING for meta in by_rank.values()):
                raise UsageValueError(f"--out {name}: no rank has a variable of that name when the cell has ended")
            told = {rank: meta if isinstance(meta, str) else _text(meta) for rank, meta in by_rank.items()}
            folded: dict[str, list[int]] = {}
            for rank, text in told.items():
                folded.setdefault(text, []).append(rank)
            listed = "; ".join(f"{failures.named(ranks)}: {text}" for text, ranks in folded.items())
            raise UsageValueError(
                f"--out {name}: a mesh tensor has one shape and dtype on all ranks, and {name} is {listed}; "
                f"%mesh pull {name} --from all brings each rank's"
            )
        handles[name] = make_handle(intern(first), ref)
    return handles


def _text(meta: wire.TensorMeta) -> str:
    return f"{tuple(meta.shape)} {meta.dtype}" + ("" if meta.layout == "strided" else f" {meta.layout}")
