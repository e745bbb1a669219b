"""Messages between the kernel's controller and the workers.

Orders go out on one PUB socket; the topic is ``ALL`` or ``topic(rank)``. Reports come back on one ROUTER socket.
A worker reads nothing before a Welcome that carries the mesh's key, the kernel nothing before a Hello that does.
Large data follow the header as further frames.

The op stream itself is in op_stream.py, the messages of ``%%spmd`` cells in spmd.py, those of debuggers in
debugging.py; all are named here too.
"""

from __future__ import annotations

from monarch_lab.wire.asking import InputRead as InputRead
from monarch_lab.wire.asking import InputReply as InputReply
from monarch_lab.wire.debugging import DebugBreakIn as DebugBreakIn
from monarch_lab.wire.debugging import DebugBreakpoints as DebugBreakpoints
from monarch_lab.wire.debugging import DebugEnded as DebugEnded
from monarch_lab.wire.debugging import DebugListen as DebugListen
from monarch_lab.wire.debugging import DebugPostMortem as DebugPostMortem
from monarch_lab.wire.debugging import DebugRead as DebugRead
from monarch_lab.wire.debugging import DebugReply as DebugReply
from monarch_lab.wire.debugging import DebugTold as DebugTold
from monarch_lab.wire.looking import Look as Look
from monarch_lab.wire.looking import Looked as Looked
from monarch_lab.wire.lookup import LookedUp as LookedUp
from monarch_lab.wire.lookup import LookUp as LookUp
from monarch_lab.wire.op_stream import FIRST_ENTRY as FIRST_ENTRY
from monarch_lab.wire.op_stream import AmbientDef as AmbientDef
from monarch_lab.wire.op_stream import BackwardDef as BackwardDef
from monarch_lab.wire.op_stream import Definition as Definition
from monarch_lab.wire.op_stream import EntryDef as EntryDef
from monarch_lab.wire.op_stream import Failure as Failure
from monarch_lab.wire.op_stream import ForgetDef as ForgetDef
from monarch_lab.wire.op_stream import MeshDef as MeshDef
from monarch_lab.wire.op_stream import MoveDef as MoveDef
from monarch_lab.wire.op_stream import Op as Op
from monarch_lab.wire.op_stream import PayloadDef as PayloadDef
from monarch_lab.wire.op_stream import RecordingDef as RecordingDef
from monarch_lab.wire.op_stream import Related as Related
from monarch_lab.wire.op_stream import TemplateDef as TemplateDef
from monarch_lab.wire.op_stream import TensorMeta as TensorMeta
from monarch_lab.wire.reports import BackwardLearned as BackwardLearned
from monarch_lab.wire.reports import Called as Called
from monarch_lab.wire.reports import Crashed as Crashed
from monarch_lab.wire.reports import DeviceMemory as DeviceMemory
from monarch_lab.wire.reports import Done as Done
from monarch_lab.wire.reports import Fetched as Fetched
from monarch_lab.wire.reports import FetchFailed as FetchFailed
from monarch_lab.wire.reports import Learned as Learned
from monarch_lab.wire.reports import LearnFailed as LearnFailed
from monarch_lab.wire.reports import OpFailed as OpFailed
from monarch_lab.wire.reports import Output as Output
from monarch_lab.wire.reports import OutputTail as OutputTail
from monarch_lab.wire.reports import Released as Released
from monarch_lab.wire.reports import Returned as Returned
from monarch_lab.wire.showing import Cleared as Cleared
from monarch_lab.wire.showing import Displayed as Displayed
from monarch_lab.wire.spmd import FreeSpmd as FreeSpmd
from monarch_lab.wire.spmd import PullSpmd as PullSpmd
from monarch_lab.wire.spmd import PushSpmd as PushSpmd
from monarch_lab.wire.spmd import RunSpmd as RunSpmd
from monarch_lab.wire.spmd import SpmdEnded as SpmdEnded
from monarch_lab.wire.supervision import Message
from monarch_lab.wire.syncing import SyncModules as SyncModules

ALL = b"*"
CONTROL_ALL = b"!*"


def topic(rank: int) -> bytes:
    return b"r%d." % rank


def control_topic(rank: int) -> bytes:
    return b"!%d." % rank


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

    ``segments``: (frame, descriptor of the process ``pid``, bytes) of the frames that are in shared memory instead;
    ``loans``: what Returned calls them, see transport/lending.py. ``batch``: its number among the batches; a failure is
    reported as of that one's first op."""

    refs: list[int]
    device: str = ""
    segments: list[tuple[int, int, int]] = []
    pid: int = 0
    loans: list[int] = []
    batch: int = 0


class Fetch(Message, frozen=True):
    """Send these values, on the CPU. Answered by Fetched or FetchFailed.

    ``shared``: large ones may come in segments of shared memory; ``free`` and ``drop``: by rank, segments that are read
    no more, to be used again or not.
    """

    ident: int
    refs: list[int]
    shared: bool = False
    free: dict[int, list[int]] = {}
    drop: dict[int, list[int]] = {}


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


Question = (  # each rank answers
    Learn | LearnBackward | Fetch | CallAndFetch | RunSpmd | PushSpmd | PullSpmd | SyncModules
)


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
    | SyncModules
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


Control = (
    Interrupt
    | InputReply
    | FreeSpmd
    | Look
    | LookUp
    | DebugReply
    | DebugBreakIn
    | DebugPostMortem
    | DebugBreakpoints
    | DebugListen
)


# --- reports, worker to kernel

Report = (
    Done
    | OpFailed
    | Learned
    | BackwardLearned
    | LearnFailed
    | Called
    | Released
    | Returned
    | Fetched
    | FetchFailed
    | SpmdEnded
    | Output
    | OutputTail
    | DeviceMemory
    | DebugRead
    | DebugEnded
    | DebugTold
    | InputRead
    | LookedUp
    | Displayed
    | Cleared
    | Crashed
    | Looked
)
