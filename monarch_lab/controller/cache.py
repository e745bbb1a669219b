"""What was learned: calls and the results they gave, templates, backward plans. Bounded (forgetting.py)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from monarch_lab.tensors.meta import Meta
from monarch_lab.wire.engine import TensorMeta


@dataclass(slots=True)
class Entry:
    """A kind of call and its result. ``single`` is the metadata of the only output where it is one new tensor
    without side effects: the common case, kept apart so that it costs nothing more."""

    number: int
    single: Meta | None
    shares: int  # single: index of the input whose storage it shares, or -1
    tree: list
    outputs: list[Meta]
    keeps: list[int]
    aliases: list[int]
    after: list[tuple[int, Meta]]
    mutated: list[int]
    random: bool
    opaque: bool  # a user's function: may give each rank its own values
    private: bool = False  # draws as many random numbers as the values ask for
    random_single: bool = False
    plain: bool = False  # single, no view, nothing random: what operators.py handles
    in_place: int = -1  # the input that is the result and all that was written
    news: int = 0  # outputs that get a ref
    fails: bool = False  # may fail on values: see tries.py
    told: tuple[list, list[Any]] | None = None  # (tree, its Python values), of a propagator that gave some


@dataclass(slots=True)
class Plan:
    """A backward pass over a graph of one kind. Leaves by ref: they outlive the graph."""

    number: int
    leaves: list[int]
    fresh: list[bool]
    grads: list[TensorMeta]
    reached: list[bool] = field(default_factory=list)  # of the crossings in its graph, oldest first


class Cache:
    def __init__(self, limit: int) -> None:
        self.entries: dict[tuple[Any, ...], Entry] = {}
        self.templates: dict[tuple[Any, ...], int] = {}
        self.plans: dict[tuple[Any, ...], Plan] = {}
        self.moves: dict[tuple[Any, ...], Any] = {}  # see crossings.py
        self.functions: dict[bytes, int] = {}  # sent by value: the number of each, by digest
        self.never: set[tuple[Any, ...]] = set()  # kinds whose result was another than the first time
        self.forgotten: set[int] = set()  # numbers whose prediction was wrong: recordings with them are not used
        # What of each entry is in the stream: (inputs, numbers, new outputs); of a plan, under its number made
        # negative: (roots, inputs, gradients, crossings).
        self.layouts: dict[int, tuple[int, ...]] = {}
        self.kinds: dict[int, tuple[Any, ...]] = {}  # what an entry (or, negative, a plan) is, whatever its number
        self.generation = 0  # how often it was emptied
        self.misses = 0  # calls that waited to learn
        self.asked = 0  # calls that wait every time
        self.dynamic = 0  # of these, calls whose result hangs on values
        self._limit = limit
        self._template_numbers = 0
        self._function_numbers = 0
        self._entry_numbers = 15  # FIRST_ENTRY - 1
        self._plan_numbers = 0

    def next_template(self) -> int:
        self._template_numbers += 1
        return self._template_numbers

    def next_entry(self) -> int:
        self._entry_numbers += 1
        return self._entry_numbers

    def next_function(self) -> int:
        self._function_numbers += 1
        return self._function_numbers

    def next_plan(self) -> int:
        self._plan_numbers += 1
        return self._plan_numbers

    def keep(self, key: tuple[Any, ...], entry: Entry) -> None:
        self.entries[key] = entry

    def keep_plan(self, key: tuple[Any, ...], plan: Plan) -> None:
        self.plans[key] = plan

    @property
    def is_full(self) -> bool:
        """More is known than is to be: see forgetting.py."""
        most = max(len(self.templates), len(self.entries), len(self.never), 10 * len(self.functions))
        return most >= self._limit

    @property
    def is_full_of_plans(self) -> bool:
        return len(self.plans) >= self._limit // 10

    @property
    def is_full_of_moves(self) -> bool:
        return len(self.moves) >= self._limit // 10

    def forget(self, number: int) -> None:
        """Drop the entry (or, negative, the plan) of this number. Calls of its kind are asked each time from now on."""
        self.forgotten.add(number)
        if number > 0:
            self.never.update(k for k, e in self.entries.items() if e.number == number)
            self.entries = {k: e for k, e in self.entries.items() if e.number != number}
        else:
            self.plans = {k: p for k, p in self.plans.items() if p.number != -number}
