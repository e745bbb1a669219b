"""Messages of ``%%spmd`` cells, between the kernel's controller and the workers: orders, control, report."""

from __future__ import annotations

from monarch_lab.wire.op_stream import Failure, TensorMeta
from monarch_lab.wire.supervision import Message


class RunSpmd(Message, frozen=True):
    """Run a ``%%spmd`` cell on ``ranks``; the others only take part in forming the default process group where
    ``group`` is a new number. Answered by SpmdEnded.

    ``source`` has the lines of the notebook's cell, the magic's own left blank. ``names`` and ``sizes``: the mesh's
    dims. ``shards``: (name, ref) of the notebook's tensors in it. ``out``: variables, and the refs to keep them under.
    ``group`` 0: the default group is left as it is. ``code``: what is run, where magics were made Python.
    ``debug``: stop at its first line, and after an error.
    """

    ident: int
    cell: int
    ranks: list[int]
    group: int
    source: str
    filename: str
    is_quiet: bool
    names: list[str]
    sizes: list[int]
    shards: list[tuple[str, int]]
    out: list[tuple[str, int]]
    code: str = ""
    debug: bool = False


class PushSpmd(Message, frozen=True):
    """Put values (pickled in the frames) and tensors of the notebook into the namespace of ``%%spmd`` cells. Answered
    by Fetched, without values, or FetchFailed."""

    ident: int
    names: list[str]
    sources: dict[str, str]
    shards: list[tuple[str, int]]


class PullSpmd(Message, frozen=True):
    """Send variables of ``%%spmd`` cells, tensors on the CPU. Answered by Fetched or FetchFailed."""

    ident: int
    names: list[str]


class FreeSpmd(Message, frozen=True):
    """A rank of this ``%%spmd`` cell has failed: end the wait of the others in a collective. Their group is of no use
    after it; the next cell has a new one."""

    ident: int


class SpmdEnded(Message, frozen=True):
    """A ``%%spmd`` cell ended here. ``shown``: the repr of its last expression; ``rich``: its other forms, as
    Displayed.bundle. ``freed``: it failed because its wait in a collective was ended. ``missing``: the name of a
    NameError. ``outs``: of each variable asked for, its metadata, or why it is no tensor. ``written``: refs of the
    notebook's tensors whose data has changed. ``sequences``: collectives begun, by group; empty where there is no
    default group that can be used. ``names``: the namespace's."""

    ident: int
    shown: str | None = None
    rich: str = ""
    failure: Failure | None = None
    freed: bool = False
    missing: str = ""
    outs: list[TensorMeta | str] = []
    written: list[int] = []
    sequences: dict[str, int] = {}
    names: list[str] = []
