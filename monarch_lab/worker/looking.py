"""What this worker does now: stacks of its threads, collectives that have not ended, memory.

Runs on: the reader thread, so that it answers while the main thread is in C code or waits for another rank.
"""

from __future__ import annotations

import bdb
import cmd
import json
import os
import pdb
import sys
import threading
import traceback
from types import FrameType
from typing import Any

import torch
import zmq

from monarch_lab.transport import worker_link
from monarch_lab.transport.platform import memory_bytes
from monarch_lab.wire.looking import Collective, Look, Looked, Memory, ThreadStack
from monarch_lab.worker.failures import is_ours, told_frame
from monarch_lab.worker.spmd import Spmd

_OUR_THREADS = ("monarch-output", "monarch-feeder")
_TRANSPORT = os.path.dirname(worker_link.__file__)
_ZMQ = os.path.dirname(zmq.__file__)  # a thread of its own lets go of what was sent without a copy
_MACHINERY = {threading.__file__, bdb.__file__, cmd.__file__, pdb.__file__}  # of a thread, of a debugger
_MAX_FRAMES = 100
_LARGEST = 5


def look(order: Look, cells: dict[int, Any], spmd: Spmd) -> Looked:
    memory = _memory(cells, spmd.variables()) if order.memory else None
    waits, begun = _collectives(spmd)
    return Looked(order.ident, _threads(), waits, begun, memory, dict(spmd.group.timeouts))


def _threads() -> list[ThreadStack]:
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main, own = threading.main_thread().ident, threading.get_ident()
    found = []
    for ident, top in sys._current_frames().items():  # noqa: SLF001
        name = names.get(ident, f"thread {ident}")
        if ident == own or name in _OUR_THREADS:
            continue
        frames = _frames(top)
        if frames or ident == main:
            found.append(ThreadStack(name, frames, ident == main))
    return sorted(found, key=lambda stack: not stack.is_main)


def _frames(top: FrameType) -> list[tuple[str, int, str, str]]:
    """Outermost first, without how we came to the user's."""
    stack = list(traceback.walk_stack(top))[::-1]
    ours = [k for k, (frame, _) in enumerate(stack) if is_ours(frame)]
    if ours and os.path.dirname(stack[ours[-1]][0].f_code.co_filename) == _TRANSPORT:
        del stack[ours[-1] :]  # it waits for an order, in C code of others
    elif any(frame.f_code.co_filename.startswith(_ZMQ) for frame, _ in stack) and not ours:
        return []
    told = [(frame, line) for frame, line in stack[ours[0] if ours else 0 :] if not is_ours(frame)]
    return [told_frame(f, line) for f, line in told if f.f_code.co_filename not in _MACHINERY][-_MAX_FRAMES:]


def _collectives(spmd: Spmd) -> tuple[list[Collective], dict[str, int]]:
    """Those that have not ended, and how many each group has begun: by torch's flight recorder, which notes each as it
    is begun. It does not count send and receive, which a group's own number does. Groups being formed wait too.
    """
    waits = spmd.group.forming()
    members = spmd.group.members()
    if not members:
        return waits, {}
    dump = getattr(torch._C._distributed_c10d, "_dump_fr_trace_json", None)  # noqa: SLF001
    entries = json.loads(dump()).get("entries") or [] if dump is not None else []
    most = spmd.group.sequences()
    begun: dict[str, int] = {}
    for entry in entries:
        group, number = entry["process_group"][0], entry["collective_seq_id"]
        # Entries of groups that were destroyed are never retired, nor are the mesh's own, which have no name.
        if entry["is_p2p"] or group not in members or number > most.get(group, -1):
            continue
        if entry["time_created_ns"] < spmd.group.formed_ns:
            continue
        begun[group] = max(number, begun.get(group, 0))
        if entry["retired"]:
            continue
        sizes = [_product(size) for size in entry["input_sizes"]]
        name = entry["profiling_name"].partition(":")[2] or entry["profiling_name"]
        waits.append(Collective(name, group, members[group], number, sizes, list(entry["input_dtypes"])))
    return waits, {**most, **begun}


def _product(size: list[int]) -> int:
    total = 1
    for n in size:
        total *= n
    return total


def _memory(cells: dict[int, Any], variables: dict[str, Any]) -> Memory:
    storages: dict[int, int] = {}
    count = 0
    for value in list(cells.values()):
        if isinstance(value, torch.Tensor):
            count += 1
            storages.update(_storages(value))
    sizes = sorted(((name, _size(value)) for name, value in variables.items()), key=lambda item: -item[1])
    rss, pss = memory_bytes()
    device = torch.cuda.memory_reserved() if torch.cuda.is_initialized() else 0
    return Memory(rss, pss, sum(storages.values()), count, device, [item for item in sizes[:_LARGEST] if item[1]])


def _storages(tensor: torch.Tensor) -> dict[int, int]:
    """Bytes by address: views of one memory count once."""
    try:
        storage = tensor.untyped_storage()
        return {storage.data_ptr(): storage.nbytes()}
    except (RuntimeError, NotImplementedError):  # sparse ones have none of their own
        values = tensor.coalesce().values() if tensor.layout is torch.sparse_coo else None
        return {} if values is None else {id(tensor): values.untyped_storage().nbytes()}


def _size(value: Any) -> int:
    try:
        if isinstance(value, torch.Tensor):
            return sum(_storages(value.detach()).values())
        if isinstance(value, torch.nn.Module):
            found: dict[int, int] = {}
            for tensor in [*value.parameters(), *value.buffers()]:
                found.update(_storages(tensor.detach()))
            return sum(found.values())
        return int(getattr(value, "nbytes", 0) or sys.getsizeof(value))
    except Exception:  # a user's class may do anything
        return 0
