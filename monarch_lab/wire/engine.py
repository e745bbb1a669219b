"""Messages between the kernel's controller and the workers.

Orders go out on one PUB socket; the topic is ``ALL`` or ``topic(rank)``. Reports come back on one ROUTER socket.
A worker reads nothing before a Welcome that carries the mesh's key, the kernel nothing before a Hello that does.
Large data follow the header as further frames.

The op stream. ``Batch.code`` is a flat list of integers. An op is

    [entry, input refs ..., positions in Batch.numbers ..., output refs ...]

with the counts known from the entry's definition. Entries below FIRST_ENTRY are the instructions of ``Op``.
Refs are positive; an output learned from its first run has a negative one (see Learn.first_out).
"""

from __future__ import annotations

from enum import IntEnum

import msgspec

from monarch_lab.wire.debugging import (
    DebugBreakIn,
    DebugBreakpoints,
    DebugEnded,
    DebugListen,
    DebugPostMortem,
    DebugRead,
    DebugReply,
    DebugTold,
)
from monarch_lab.wire.supervision import Message

ALL = b"*"
CONTROL_ALL = b"!*"
FIRST_ENTRY = 16


def topic(rank: int) -> bytes:
    return b"r%d." % rank


def control_topic(rank: int) -> bytes:
    return b"!%d." % rank


class Op(IntEnum):
    """Instructions of the stream that are not calls."""

    DELETE = 0  # [0, ref]
    AMBIENT = 1  # [1, ambient]: the state of the following ops, see AmbientDef
    SET_GRAD = 2  # [2, ref, grad ref or 0]
    BACKWARD = 3  # [3, plan, refs as BackwardDef says ...]
    SIGNAL = 4  # [4, event]: what this stream did so far is done for whoever waits
    WAIT = 5  # [5, event]: until another stream has signalled it; each event serves once
    LEND = 6  # [6, ref, new ref]: the new one is the same data, for another stream
    RETURN = 7  # [7, lent ref, ref]: where the lent one failed, so has this
    MOVE = 8  # [8, move, ref, ref of the result, crossing]: see MoveDef
    MOVE_BACK = 9  # [9, move, crossing]: the gradient of a result, back to where the value came from
    REPLAY = 10  # [10, recording, input refs ..., positions in Batch.numbers ..., output refs ...], see RecordingDef


class TensorMeta(msgspec.Struct, frozen=True, array_like=True):
    """What the controller knows of a tensor without having it.

    ``shape``, ``stride`` and ``offset`` in elements; dtype, layout and device by torch's names ("float32",
    "strided", "cpu"). ``stride`` is empty for layouts that have none.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: str
    layout: str
    device: str
    requires_grad: bool
    is_leaf: bool
    is_conj: bool = False
    is_neg: bool = False
    is_view: bool = False
    is_inference: bool = False


class Failure(msgspec.Struct, frozen=True):
    """An exception of a worker. ``pickled`` is the exception itself where it could be pickled."""

    type_name: str
    text: str
    frames: list[tuple[str, int, str, str]]  # file, line, function, source line
    pickled: bytes = b""
    interrupted: bool = False
    entry: int = 0  # the entry whose prediction was wrong
    rank: int = -1  # where it happened: others may hold it too, through a collective
    severed: bool = False  # a collective whose other ranks could not be reached: the end of one may be the cause


# --- definitions; each has a number that is never reused, and is sent once to every worker


class TemplateDef(Message, frozen=True):
    """A call without its refs. ``tree`` is a pickled tensors.template.CallTree in one frame of the Define message."""

    template: int
    function: str  # what tensors/naming.py gives
    inputs: int
    numbers: int
    collective: bool  # takes part even where its input failed


class EntryDef(Message, frozen=True):
    """A template with the results it gave: checked on the worker at every call.

    ``keeps[i]``: output i is input keeps[i] itself (k >= 0), output -2-k itself (k <= -2), or a new value (-1).
    ``tree``: the structure of the result, see worker/learning.py. ``after``: inputs whose metadata changes.
    """

    entry: int
    template: int
    tree: list
    outputs: list[TensorMeta]
    keeps: list[int]
    after: list[tuple[int, TensorMeta]]
    inputs: list[TensorMeta]
    writes: list[int] = []  # inputs that are written
    private: bool = False  # a sampler that rejects: see worker/randomness.py, reseeded


class AmbientDef(Message, frozen=True):
    ambient: int
    values: dict[str, bool | int | str | tuple[int, ...]]


class PayloadDef(Message, frozen=True):
    """A function sent by value: ``frames`` frames of the Define message."""

    payload: int
    frames: int
    sources: dict[str, str]  # file name -> text, for tracebacks and pdb


class MeshDef(Message, frozen=True):
    """A mesh's dims and its ranks, row-major."""

    mesh: int
    names: list[str]
    sizes: list[int]
    ranks: list[int]


class MoveDef(Message, frozen=True):
    """A value from the processes of one mesh to those of another; each group is done by itself, in this order.

    ``spread``: a group's first rank has the value, the others get it. ``stack`` and ``sum``: the first gets what the
    others have. A rank that gets and has a value is named twice. ``meta``: of the result; ``given``: of what is moved.
    Where the stream has a crossing (not 0), gradients go back: it is the ref of a stand-in for the value, on the ranks
    that have it, whose backward pass goes on with what MOVE_BACK brings; ``home`` are all the ranks that have one.
    """

    move: int
    kind: str
    groups: list[list[int]]
    home: list[int]
    given: TensorMeta
    meta: TensorMeta


class BackwardDef(Message, frozen=True):
    """A backward pass with what it did the first time.

    Refs in the stream: ``roots`` roots, ``roots`` gradients or 0, ``inputs`` inputs, then for each touched leaf its
    ref, the ref of its new ``.grad`` or 0, and 0 or the ref of the gradient that it is added to; then the
    ``crossings`` whose gradient it reaches. ``grads``: metadata of the leaves' gradients.
    """

    plan: int
    roots: int
    inputs: int
    keep_graph: bool
    create_graph: bool
    grads: list[TensorMeta]
    crossings: int = 0


class RecordingDef(Message, frozen=True):
    """A stretch of the op stream to be run again, on values that each REPLAY names.

    ``code`` is as Batch.code with names of its own for refs: 1 to ``inputs`` are the inputs, what is above is made
    inside; it deletes nothing. A position in numbers below ``len(numbers)`` means those, what is above the
    ``varying`` ones of the REPLAY. ``outputs``: names of the values that get the REPLAY's output refs. ``copied``:
    inputs that stand for literals, so that each run gets a copy. Given up by a DELETE of its number, which is a ref.
    """

    recording: int
    inputs: int
    varying: int
    outputs: list[int]
    copied: list[int]
    code: list[int]
    numbers: list[int | float]


Definition = TemplateDef | EntryDef | AmbientDef | PayloadDef | MeshDef | MoveDef | BackwardDef | RecordingDef


# --- orders, kernel to worker


class Define(Message, frozen=True):
    definitions: list[Definition]


class Batch(Message, frozen=True):
    """Run ops in order. Answered by OpFailed for each that failed, and by Done where ``report``."""

    number: int
    cell: int
    scope: int  # the mesh its ops run on: 0 is the whole one
    code: list[int]
    numbers: list[int | float]
    report: bool


class Learn(Message, frozen=True):
    """Run one call and say what it gave. Answered once, by Learned or LearnFailed.

    Output i is kept under ref ``first_out - i``. ``inputs_meta`` only for collectives: a rank whose input failed
    takes part with zeros of that shape.
    """

    ident: int
    cell: int
    scope: int
    ambient: int
    template: int
    inputs: list[int]
    numbers: list[int | float]
    first_out: int
    inputs_meta: list[TensorMeta]


class LearnBackward(Message, frozen=True):
    """Run a backward pass and say which leaves got a gradient. Answered by BackwardLearned or LearnFailed.

    New gradients are kept under refs counted down from ``first_out``.
    """

    ident: int
    cell: int
    scope: int
    ambient: int
    roots: list[int]
    gradients: list[int]  # 0: none given
    inputs: list[int]
    keep_graph: bool
    create_graph: bool
    first_out: int


class Place(Message, frozen=True):
    """Keep the pickled tensors of the frames under these refs, moved to ``device`` ("": as they are, on the CPU).

    ``segments``: (frame, descriptor of the process ``pid``, bytes) of the frames that are in shared memory instead."""

    refs: list[int]
    device: str = ""
    segments: list[tuple[int, int, int]] = []
    pid: int = 0


class Fetch(Message, frozen=True):
    """Send these values, on the CPU. Answered by Fetched or FetchFailed.

    ``shared``: large ones may come in segments of shared memory; ``free`` and ``drop``: segments that are read no more,
    to be used again or not.
    """

    ident: int
    refs: list[int]
    shared: bool = False
    free: list[int] = []
    drop: list[int] = []


class CallAndFetch(Message, frozen=True):
    """Run one call and send back its result (tensors on the CPU). Answered by Fetched or FetchFailed."""

    ident: int
    cell: int
    ambient: int
    template: int
    inputs: list[int]
    numbers: list[int | float]


class Poison(Message, frozen=True):
    """These values hang on an op that failed on another rank: mark them."""

    refs: list[int]
    failure: Failure


class Retain(Message, frozen=True):
    """``retain_grad()`` on a value, so that a backward pass reports its gradient too."""

    ref: int


class Hook(Message, frozen=True):
    """Call the kernel's ``handler`` from the gradient graph of a value; see worker/callbacks.py for the kinds."""

    ref: int
    handler: int
    kind: str


class Unhook(Message, frozen=True):
    handler: int


class Resume(Message, frozen=True):
    """The answer to Called: refs of what the kernel's function gave (0: None), or ``is_none`` for None itself.

    ``error``: it raised, and the kernel keeps the exception; the call that asked fails. ``handler``: for a pack hook,
    the one to call for what it packed.
    """

    ident: int
    serial: int
    refs: list[int]
    is_none: bool = False
    error: str = ""
    handler: int = 0


class Seed(Message, frozen=True):
    """Begin the random streams again; of a part of the mesh, ``scope``, its own alone."""

    seed: int
    scope: int = 0


class Vary(Message, frozen=True):
    """From now on this rank draws numbers of its own: ``position`` mixed into the seed. -1 ends it."""

    level: int
    seed: int
    position: int


class RunSpmd(Message, frozen=True):
    """Run a ``%%spmd`` cell on ``ranks``; the others only take part in forming the default process group where
    ``group`` is a new number. Answered by SpmdEnded.

    ``source`` has the lines of the notebook's cell, the magic's own left blank. ``names`` and ``sizes``: the mesh's
    dims. ``shards``: (name, ref) of the notebook's tensors in it. ``out``: variables, and the refs to keep them under.
    ``group`` 0: the default group is left as it is. ``debug``: stop at its first line, and after an error.
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


Question = Learn | LearnBackward | Fetch | CallAndFetch | RunSpmd | PushSpmd | PullSpmd  # each rank answers


class Together(Message, frozen=True):
    """A batch, and the order after it for the same ranks: a worker wakes once."""

    batch: Batch
    order: Question


class OnStream(Message, frozen=True):
    """An order for a stream beside the default one (0), which is made at its first. It keeps the order of what comes
    to it; what a Define or Rejoin without a stream says holds on all."""

    stream: int
    order: Define | Batch | Together | Learn | LearnBackward | Place | Fetch | CallAndFetch | Retain


class Rejoin(Message, frozen=True):
    """Other processes have taken these ranks. Groups with them are formed anew, by files with this ``number``; a
    process that is one of them has none of the values made before, and says ``lost`` of those."""

    number: int
    ranks: list[int]
    lost: str


class AdoptStreams(Message, frozen=True):
    """Draw random numbers from these streams (the frames; see worker/randomness.py) from now on."""


class Exit(Message, frozen=True):
    pass


Order = (
    Define
    | Batch
    | Together
    | OnStream
    | Learn
    | LearnBackward
    | Place
    | Fetch
    | CallAndFetch
    | RunSpmd
    | PushSpmd
    | PullSpmd
    | Poison
    | Retain
    | Hook
    | Unhook
    | Resume
    | Seed
    | Vary
    | Rejoin
    | AdoptStreams
    | Exit
)


# --- control, kernel to a worker's reader thread: heard while an op runs


class Interrupt(Message, frozen=True):
    """Stop the user's function that runs, and drop those of every batch up to ``batch`` and call up to ``ident``.

    Torch's own ops go on, so that every rank ends at the same op, unless ``hard``: then they are dropped as well.
    """

    batch: int
    ident: int
    hard: bool


class FreeSpmd(Message, frozen=True):
    """A rank of this ``%%spmd`` cell has failed: end the wait of the others in a collective. Their group is of no use
    after it; the next cell has a new one."""

    ident: int


Control = Interrupt | DebugReply | FreeSpmd | DebugBreakIn | DebugPostMortem | DebugBreakpoints | DebugListen


# --- reports, worker to kernel


class Done(Message, frozen=True):
    """Every op up to this batch has run here. Since the last Done: ``poisoned`` are failures with the refs that hold
    them now, ``unwritten`` are (ref, scope) of values that a failed or dropped op should have written and did not."""

    batch: int
    poisoned: list[tuple[Failure, list[int]]]
    unwritten: list[tuple[int, int]] = []


class OpFailed(Message, frozen=True):
    """Op ``position`` (counted in ops) of a batch failed here; its outputs are marked. ``inside``: it is a REPLAY, and
    the op of that number in it failed."""

    batch: int
    position: int
    failure: Failure
    outputs: list[int]
    inside: int = -1


class Learned(Message, frozen=True):
    """What a call gave. Python values of the result are pickled, one frame each, in the order of ``tree``.

    ``aliases[i]``: shares storage with input k (k >= 0) or output -2-k (k <= -2); -1: neither.
    """

    ident: int
    tree: list
    outputs: list[TensorMeta]
    keeps: list[int]
    aliases: list[int]
    after: list[tuple[int, TensorMeta]]
    mutated: list[int]
    dynamic: bool
    random: bool
    private: bool = False
    # Leaves that got a .grad from a backward pass inside; it is kept under the refs after those of the outputs.
    grads: list[tuple[int, TensorMeta]] = []


class BackwardLearned(Message, frozen=True):
    """``touched``: ref of each leaf that got a gradient; ``outs[i]``: where it is a new tensor, its ref, else 0."""

    ident: int
    touched: list[int]
    outs: list[int]
    grads: list[TensorMeta]
    crossings: list[int] = []  # those whose gradient it reached


class LearnFailed(Message, frozen=True):
    """``dependent``: an input had failed before. ``written``: inputs that were written before it failed.
    ``partial``: which leaves a backward pass had reached by then."""

    ident: int
    failure: Failure
    dependent: bool = False
    written: list[int] = []
    partial: BackwardLearned | None = None


class Called(Message, frozen=True):
    """A gradient graph has come to a function of the kernel. Answered by Resume; orders are obeyed meanwhile.

    Sent while question ``ident`` runs. ``refs``: the arguments (0: None), of which ``split`` are of the first kind;
    ``leaves[i]``: the older ref of argument i where it is a leaf, else 0. ``touched``, ``outs``, ``grads``: the leaves
    that got a gradient since the last report; outs as in BackwardDef. ``grad``: grad mode there.
    """

    ident: int
    serial: int
    handler: int
    split: int
    refs: list[int]
    leaves: list[int]
    metas: list[TensorMeta | None]
    grad: bool
    touched: list[int]
    outs: list[int]
    grads: list[TensorMeta]


class Released(Message, frozen=True):
    """Nothing here can call these handlers any more."""

    handlers: list[int]


class Fetched(Message, frozen=True):
    """The values, pickled in the frames. ``segments``: (frame, descriptor of the worker, bytes) of those that are in
    shared memory instead, see transport/segments.py."""

    ident: int
    segments: list[tuple[int, int, int]] = []


class FetchFailed(Message, frozen=True):
    ident: int
    failure: Failure
    dependent: bool = False


class SpmdEnded(Message, frozen=True):
    """A ``%%spmd`` cell ended here. ``shown``: the repr of its last expression. ``freed``: it failed because its wait
    in a collective was ended. ``missing``: the name of a NameError. ``outs``: of each variable asked for, its metadata,
    or why it is no tensor. ``written``: refs of the notebook's tensors whose data has changed. ``sequences``:
    collectives begun, by group; empty where there is no default group that can be used. ``names``: the namespace's."""

    ident: int
    shown: str | None = None
    failure: Failure | None = None
    freed: bool = False
    missing: str = ""
    outs: list[TensorMeta | str] = []
    written: list[int] = []
    sequences: dict[str, int] = {}
    names: list[str] = []


class Output(Message, frozen=True):
    """What user code printed."""

    cell: int
    stream: str
    text: str


class DeviceMemory(Message, frozen=True):
    """What torch holds on the worker's GPU, when it has changed: at most once a second."""

    reserved_bytes: int


class Crashed(Message, frozen=True):
    """The worker's own loop met a bug of ours, drops the order, and goes on."""

    text: str


Report = (
    Done
    | OpFailed
    | Learned
    | BackwardLearned
    | LearnFailed
    | Called
    | Released
    | Fetched
    | FetchFailed
    | SpmdEnded
    | Output
    | DeviceMemory
    | DebugRead
    | DebugEnded
    | DebugTold
    | Crashed
)
