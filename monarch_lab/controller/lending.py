"""Tensors that may not be used, or not be written: dropped, or lent to another stream.

The path of an op asks nothing of this. A tensor that may not be used has a stand-in for its mesh, which refuses when
the op asks it for its client; a storage that may not be written has a Ref that refuses when the op notes what is equal.
"""

from __future__ import annotations

from typing import Any

from monarch_lab.controller.locations import frame_of, here
from monarch_lab.controller.refs import Ref
from monarch_lab.controller.state import active_stream
from monarch_lab.errors import UsageTypeError

DROPPED, BORROWED = "DROPPED", "BORROWED"
_equal: Any = Ref.__dict__["equal"]  # the slot


class Refusing:
    """In the place of a mesh: whoever wants to send an op to it gets the reason why not."""

    def __init__(self, mesh: Any, tag: str, text: str) -> None:
        self.mesh = mesh
        self.tag = tag
        self.text = text

    @property
    def client(self) -> Any:
        raise UsageTypeError(f"{self.tag}: {self.text}")

    def check_alive(self, *_: Any) -> None:
        raise UsageTypeError(f"{self.tag}: {self.text}")

    def __getattr__(self, name: str) -> Any:
        return getattr(self.mesh, name)

    def __repr__(self) -> str:
        return repr(self.mesh)


class LentRef(Ref):
    """Of a storage that is lent to be read. ``loans`` says where."""

    __slots__ = ()

    @property
    def equal(self) -> int:
        return int(_equal.__get__(self))

    @equal.setter
    def equal(self, value: int) -> None:
        places = "; ".join(loan.place for loan in self.loans)
        raise UsageTypeError(
            f"MUTATING_BORROW: this tensor would be mutated while it is lent to be read ({places}): end the loan with "
            "its drop() first, or write to a clone"
        )


def make_lent(ref: Ref) -> None:
    """Its storage can be read alone from now on."""
    ref.__class__ = LentRef
    ref.loans = []


def take_back(ref: Ref, loan: Any) -> None:
    """One loan of it has ended; it can be written after the last."""
    ref.loans.remove(loan)
    if not ref.loans:
        ref.__class__ = Ref


def is_refused(ref: Ref) -> bool:
    mesh: Any = ref.mesh
    return type(mesh) is Refusing


def behind(mesh: Any) -> Any:
    """The mesh itself, where a stand-in may be in its place."""
    return mesh.mesh if type(mesh) is Refusing else mesh


def line_here() -> str:
    """The user's line that runs, for messages."""
    frame = frame_of(here(2))
    return f"{frame.filename}:{frame.line} {frame.source}".strip() if frame is not None else ""


def handles_of(tensor: Any) -> list[Any]:
    """The tensor and every other live view of its storage."""
    return [tensor, *(tensor._store or tensor._ref).others(tensor)]


def refuse(handles: list[Any], tag: str, text: str) -> None:
    for handle in handles:
        handle._ref.mesh = Refusing(behind(handle._ref.mesh), tag, text)


def is_dropped(tensor: Any) -> bool:
    return type(tensor._ref.mesh) is Refusing and tensor._ref.mesh.tag == DROPPED


def drop(tensor: Any) -> None:
    """See MeshTensor.drop."""
    if is_dropped(tensor):
        return
    if type(tensor._ref.mesh) is Refusing:
        tensor._ref.mesh.check_alive()
    store = tensor._store or tensor._ref
    store.equal = store.equal  # refused while it is lent
    let_go(handles_of(tensor), f"this tensor was dropped at {line_here()}: make it again")


def let_go(handles: list[Any], text: str) -> None:
    refuse(handles, DROPPED, text)
    for handle in handles:
        handle._ref.end()


def check_stream(func: Any, mesh: Any) -> None:
    """A function that is told where to run: on the active stream. WRONG_STREAM."""
    wanted = active_stream.get()
    if mesh.stream is not wanted:
        from monarch_lab.controller.messages import wrong_stream

        raise wrong_stream(func, mesh.stream, wanted)


def turn_to(client: Any, mesh: Any) -> None:
    """An op that is not for the mesh and stream of the last one, or the first one after a stream was activated."""
    check_stream("an op", mesh)
    client.use_scope(mesh)


def refuse_write(tensors: list[Any]) -> None:
    """Before a call that writes to these: MUTATING_BORROW where one is lent to be read."""
    for tensor in tensors:
        store = tensor._store or tensor._ref
        store.equal = store.equal
