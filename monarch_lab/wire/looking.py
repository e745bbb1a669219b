"""What a worker's reader thread tells of the worker, while its main thread does whatever it does."""

from __future__ import annotations

import msgspec

from monarch_lab.wire.supervision import Message

Frame = tuple[str, int, str, str]  # file, line, function, source line


class Look(Message, frozen=True):
    """Kernel to reader thread: say what the worker does now. Answered by Looked, at once."""

    ident: int
    memory: bool = False


class ThreadStack(msgspec.Struct, frozen=True):
    """``frames``, outermost first, without ours; empty: it waits for orders."""

    thread: str
    frames: list[Frame]
    is_main: bool = False


class Collective(msgspec.Struct, frozen=True):
    """One that this rank has begun and that has not ended. ``number``: the how-manieth of its group. ``group`` is
    torch's name of it, ``members`` are ranks of the mesh. ``missing``: where it is known, who has not come to it."""

    name: str
    group: str
    members: list[int]
    number: int
    elements: list[int] = []  # of each input
    dtypes: list[str] = []
    missing: list[int] = []


class Memory(msgspec.Struct, frozen=True):
    """Bytes. ``pss``: the process's share of memory, pages that others map too counted in part; 0: not told here.
    ``largest``: variables of ``%%spmd`` cells."""

    rss: int
    pss: int
    tensors: int
    tensor_count: int
    device: int
    largest: list[tuple[str, int]]


class Looked(Message, frozen=True):
    """``begun``: collectives begun, by group of torch.distributed. ``timeouts``: seconds, of the groups that the user
    made with one."""

    ident: int
    threads: list[ThreadStack]
    collectives: list[Collective]
    begun: dict[str, int]
    memory: Memory | None = None
    timeouts: dict[str, float] = {}
