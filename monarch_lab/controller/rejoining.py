"""Ranks that got another process: what the workers know and what the kernel holds made to fit again.

Runs on: the thread that restarts, which holds the client's lock all the while, so that nothing is sent in between.
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from monarch_lab.controller.calling import send_call
from monarch_lab.controller.lending import behind
from monarch_lab.controller.random import kernel_seed
from monarch_lab.controller.refs import Ref
from monarch_lab.errors import UsageError
from monarch_lab.tensors import payload
from monarch_lab.wire import engine as wire

if TYPE_CHECKING:
    from monarch_lab.controller.client import Client
    from monarch_lab.controller.mesh import DeviceMesh

_STREAMS = "monarch_lab.worker.randomness.common_streams"
_numbers = itertools.count(1)


def check_can_restart(client: Client) -> None:
    """Before anything is ended. UsageError, ClosedError."""
    client.check_open()
    if client.vary_level:
        raise UsageError("a rank cannot be restarted inside `with ml.random.vary()`: leave the block first")


def rejoin(mesh: DeviceMesh, ranks: tuple[int, ...]) -> None:
    """The processes of ``ranks`` are new and ready; ``mesh`` is the whole one."""
    client = mesh.client
    told = f"rank {ranks[0]} was" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))} were"
    lost = f"LOST: this value was made before {told} restarted, and is gone there"
    survivors = [rank for rank in client.alive if rank not in ranks]
    client.take_back(ranks)
    client.order(wire.Rejoin(next(_numbers), list(ranks), lost), None)
    _share_streams(mesh, survivors, ranks)
    kept = ": fetch it from another rank (ml.fetch_shard), or make it again" if survivors else ": make it again"
    lose_values(client, ranks, lost + kept)


def _share_streams(mesh: DeviceMesh, survivors: list[int], ranks: Iterable[int]) -> None:
    """The new processes draw what the others draw: each scope's stream goes on where one of its other ranks has it."""
    client = mesh.client
    if not survivors:
        client.order(wire.Seed(kernel_seed()), None)
        return
    calls = {rank: send_call(mesh, rank, _STREAMS, ()) for rank in survivors}
    told = {rank: call.result() for rank, call in calls.items()}
    for rank in ranks:
        states: dict[int, Any] = {}
        for other, (_, streams) in told.items():
            for scope, state in streams.items():
                members = client.scope_ranks.get(scope, ())
                if rank in members and other in members:
                    states[scope] = state
        frames, _ = payload.dumps((told[survivors[0]][0], states))
        client.order(wire.AdoptStreams(), [rank], frames)


def lose_values(client: Client, ranks: Iterable[int], lost: str) -> None:
    """Every value with a part on ``ranks`` was made before now: an op on it is refused here, before it is sent.

    The op path checks nothing for it: such values move to a stand-in of their mesh, which is never in scope. They
    are found among the interpreter's objects, for a list of them would cost each op.
    """
    gone = frozenset(ranks)
    past: dict[int, DeviceMesh] = {}
    for found in gc.get_objects():
        if not issubclass(type(found), Ref) or not hasattr(found, "mesh"):  # one whose __init__ was cut short
            continue
        home = behind(found.mesh)
        if home.client is not client or gone.isdisjoint(home.ranks_key):
            continue
        if id(home) not in past:
            past[id(home)] = home.before(gone.intersection(home.ranks_key), lost)
        if home is found.mesh:
            found.mesh = past[id(home)]
        else:
            found.mesh.mesh = past[id(home)]
