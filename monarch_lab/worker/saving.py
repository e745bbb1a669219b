"""What autograd saves while hooks of the notebook, or a checkpoint, are around.

A ``Region`` is one checkpoint's forward: it keeps no tensor but its inputs. When a pass wants one that it dropped, the
kernel is asked to run the function again, under a ``Recording`` that takes the same tensors, in the same order, for
this pass. ``Asked`` hands each tensor to the notebook's own pack hook, and keeps the number of what that gave.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointError

from monarch_lab.errors import InternalError
from monarch_lab.tensors import saved
from monarch_lab.worker.callbacks import Ask, asking
from monarch_lab.worker.calls import refuse_failed

Facts = tuple[torch.Size, torch.dtype, torch.device]


class _Place:
    """Where a saved tensor was: what stands in the graph for it. ``again``: its value, by pass."""

    __slots__ = ("__weakref__", "again")

    def __init__(self) -> None:
        self.again: dict[int, torch.Tensor] = {}


class _Keep(torch.autograd.Function):
    """A node that saves the inputs of a region, so that the hooks around the region have them."""

    @staticmethod
    def forward(ctx: Any, dummy: torch.Tensor, *inputs: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*inputs)
        return dummy.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise InternalError("nothing is differentiated through the inputs of a checkpoint")


class Region:
    kind = saved.CHECKPOINT

    def __init__(self, ask: Ask, inputs: tuple[torch.Tensor, ...], is_checked: bool) -> None:
        refuse_failed(*inputs)
        self._ask = ask
        self._is_checked = is_checked
        self._places: list[weakref.ref[_Place]] = []
        self._facts: list[Facts] = []
        self.is_complete = False
        self.wanted = 0  # the pass that it is run again for
        with torch.enable_grad():
            dummy = torch.empty(0, requires_grad=True)
            self._inputs = _Keep.apply(dummy, *inputs).grad_fn if inputs else None

    def inputs(self) -> list[torch.Tensor]:
        found = [] if self._inputs is None else self._inputs.saved_tensors
        return [t.detach().requires_grad_(t.requires_grad) for t in found]

    def pack(self, tensor: torch.Tensor) -> _Place:
        place = _Place()
        self._places.append(weakref.ref(place))
        self._facts.append(_facts(tensor))
        return place

    def unpack(self, place: _Place) -> torch.Tensor:
        number = torch._C._current_graph_task_id()  # noqa: SLF001  there is no public one
        if number not in place.again:
            outer, self.wanted = self.wanted, number
            try:
                self._ask([], 0)
            finally:
                self.wanted = outer
        if number not in place.again:
            raise CheckpointError(
                "a checkpointed function saved fewer tensors for the backward pass when it was run again: it must do "
                "the same each time"
            )
        return place.again.pop(number)

    def take(self, index: int, tensor: torch.Tensor) -> None:
        if index >= len(self._places):
            if self.is_complete and self._is_checked:  # else a pass runs inside the function, before its end
                raise CheckpointError(
                    "a checkpointed function saved more tensors for the backward pass when it was run again: it must "
                    "do the same each time"
                )
            return
        if self._is_checked and _facts(tensor) != self._facts[index]:
            raise CheckpointError(
                f"a checkpointed function saved a tensor of {_text(_facts(tensor))} when it was run again, where it "
                f"had saved one of {_text(self._facts[index])}: it must do the same each time"
            )
        place = self._places[index]()
        if place is not None:
            place.again[self.wanted] = tensor


class Recording:
    kind = saved.CHECKPOINT

    def __init__(self, region: Region) -> None:
        self._region = region
        self._indices = itertools.count()

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.detach()
        self._region.take(next(self._indices), tensor)
        return tensor

    def unpack(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor


class Asked:
    kind = saved.ASKED

    def __init__(self, ask: Ask) -> None:
        self._ask = ask

    def pack(self, tensor: torch.Tensor) -> Ask:
        # An output comes as itself and gets its node later: kept under its name here, it would keep that node for as
        # long as the kernel keeps what the hook made of it, which the node keeps.
        return asking(self._ask.number_for(tensor.detach()))

    def unpack(self, packed: Ask) -> torch.Tensor:
        given = packed([], 0)
        if given is None or given[0] is None:
            raise TypeError("the unpack hook of a saved tensor gave no tensor")
        return given[0]


def _facts(tensor: torch.Tensor) -> Facts:
    return tensor.shape, tensor.dtype, tensor.device


def _text(facts: Facts) -> str:
    return f"shape {tuple(facts[0])}, {facts[1]}, on {facts[2]}"


class _Known(threading.local):
    """``open``: what the kernel is in; ``regions``: those that a graph may come to."""

    def __init__(self) -> None:
        self.open: dict[int, Any] = {}


_known = _Known()
_regions: weakref.WeakValueDictionary[int, Region] = weakref.WeakValueDictionary()  # a GPU's thread reads it too


def _turn_to(number: float) -> None:
    found = _known.open.get(int(number))
    saved.hold(None if found is None else (found.kind, found.pack, found.unpack))


def enter_region(number: float, inputs: tuple[torch.Tensor, ...], is_checked: bool) -> None:
    region = Region(asking(number), inputs, is_checked)
    _known.open[int(number)] = _regions[int(number)] = region
    _turn_to(number)


def enter_recording(number: float, region: float) -> None:
    """``region`` is run again, as ``number``."""
    _known.open[int(number)] = Recording(_regions[int(region)])
    _turn_to(number)


def enter_asked(number: float) -> None:
    _known.open[int(number)] = Asked(asking(number))
    _turn_to(number)


def leave(number: float, outer: float) -> None:
    """``outer``: what is around from now on; 0 for nothing."""
    left = _known.open.pop(int(number), None)
    if isinstance(left, Region):
        left.is_complete = True
    _turn_to(outer)


def inputs(region: float, kinds: str) -> list[torch.Tensor]:
    """``kinds`` says what they are like, for calls of one kind to give results of one kind."""
    return _regions[int(region)].inputs()


def inputs_of_inner(region: float, kinds: str) -> tuple[list[torch.Tensor], int]:
    """Where they may have to be made again themselves: with a number, which makes the kernel wait for each answer."""
    return _regions[int(region)].inputs(), 0
