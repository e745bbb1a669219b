"""The op stream between controller and workers: what its integers mean, and the definitions they stand for.

``Batch.code`` is a flat list of integers. An op is

    [entry, input refs ..., positions in Batch.numbers ..., output refs ...]

with the counts known from the entry's definition. Entries below FIRST_ENTRY are the instructions of ``Op``.
Refs are positive; an output learned from its first run has a negative one (see Learn.first_out).
"""

from __future__ import annotations

from enum import IntEnum

import msgspec

from monarch_lab.wire.supervision import Message

FIRST_ENTRY = 16


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

    ``shape`` and ``stride`` in elements; where it begins in its storage is left out, for nothing told of a result hangs
    on it, and each minibatch of a tensor would be another kind. dtype, layout and device by torch's names ("float32",
    "strided", "cpu"). ``stride`` is empty for layouts that have none.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str
    layout: str
    device: str
    requires_grad: bool
    is_leaf: bool
    is_conj: bool = False
    is_neg: bool = False
    is_view: bool = False
    is_inference: bool = False


class Related(msgspec.Struct, frozen=True):
    """An exception beside another. ``relation``: it was its "cause" (raise ... from), the "context" it was raised in,
    or is a "part" of it, an exception group."""

    relation: str
    type_name: str
    text: str
    frames: list[tuple[str, int, str, str]]
    notes: list[str] = []


class Failure(msgspec.Struct, frozen=True):
    """An exception of a worker. ``pickled`` is the exception itself where it could be pickled. ``related``: what it was
    raised from, the earliest first, then the parts of a group; ``notes``: lines added to it."""

    type_name: str
    text: str
    frames: list[tuple[str, int, str, str]]  # file, line, function, source line; line 0: the source is a remark
    pickled: bytes = b""
    interrupted: bool = False
    entry: int = 0  # the entry whose prediction was wrong
    rank: int = -1  # where it happened: others may hold it too, through a collective
    severed: bool = False  # a collective whose other ranks could not be reached: the end of one may be the cause
    related: list[Related] = []
    notes: list[str] = []


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


class ForgetDef(Message, frozen=True):
    """No order uses these any more."""

    templates: list[int]
    entries: list[int] = []
    plans: list[int] = []
    payloads: list[int] = []
    moves: list[int] = []


Definition = (
    TemplateDef | EntryDef | AmbientDef | PayloadDef | MeshDef | MoveDef | BackwardDef | RecordingDef | ForgetDef
)
