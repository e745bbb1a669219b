"""What workers say to the kernel of ops, calls, values and output; each of the other conversations has its own."""

from __future__ import annotations

from monarch_lab.wire.op_stream import Failure, TensorMeta
from monarch_lab.wire.supervision import Message


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


class Returned(Message, frozen=True):
    """No mapping of these loans is left here; ``dropped``: but a child of this process may have one."""

    loans: list[int]
    dropped: list[int] = []


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


class Output(Message, frozen=True):
    """What user code printed."""

    cell: int
    stream: str
    text: str


class OutputTail(Message, frozen=True):
    """A cell's output has become too much to send: its newest lines, (stream, text), in place of those of the last such
    message. ``left_out`` lines lie before them; ``path`` has all ("" for none), ``note`` what there is to say of it."""

    cell: int
    left_out: int
    path: str
    note: str
    lines: list[tuple[str, str]]


class DeviceMemory(Message, frozen=True):
    """What torch holds on the worker's GPU, when it has changed: at most once a second."""

    reserved_bytes: int


class Crashed(Message, frozen=True):
    """The worker's own loop met a bug of ours, drops the order, and goes on."""

    text: str
