"""A backward pass whose graph lies on several meshes: one pass on each, in an order that visits each graph once.

After a pass on one mesh, the gradients of what had come to it from other meshes go back there, and a pass begins from
where those values left. A mesh's turn comes when no gradient can reach it any more from the passes still to be run.
Where the graph of a mesh leads back to itself over another one, there is no such order: the crossings are taken one by
one then, the newest first, and the graphs are kept until their values die.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from monarch_lab.controller import locations
from monarch_lab.controller.crossings import Crossing
from monarch_lab.errors import InternalError, MeshError, UsageTypeError
from monarch_lab.transport.frames import HeldInterrupt
from monarch_lab.wire.engine import Op

# (mesh, roots, gradients, inputs, keep_graph, create_graph, dims along which the gradients may be equal)
# -> the crossings reached, dims along which the gradients are equal
Pass = Callable[[Any, Sequence[Any], Sequence[Any], Sequence[Any], bool, bool, int], tuple[list[Crossing], int]]
_one_at_a_time = threading.RLock()  # guards the gradients that wait on the workers to be sent back


def crossings_of(roots: Iterable[Any]) -> list[Crossing]:
    """Those of the roots' own graphs, oldest first."""
    found = {c.number: c for t in roots for c in t._crossings}
    return [found[number] for number in sorted(found)]


class _Ways:
    """Which mesh's gradients can reach which other."""

    def __init__(self, roots: Iterable[Any]) -> None:
        self._next: dict[Any, set[Any]] = {}
        todo, seen = crossings_of(roots), set()
        while todo:
            crossing = todo.pop()
            if crossing.number not in seen:
                seen.add(crossing.number)
                self._next.setdefault(crossing.move.far, set()).add(crossing.move.home)
                todo += crossing.stand_in._crossings

    def lead(self, start: Any, end: Any) -> bool:
        todo, seen = list(self._next.get(start, ())), set()
        while todo:
            mesh = todo.pop()
            if mesh is end:
                return True
            if mesh not in seen:
                seen.add(mesh)
                todo += self._next.get(mesh, ())
        return False


def check_stays(what: str, mesh: Any, roots: Iterable[Any]) -> None:
    """For what asks for the gradients of one mesh: UsageTypeError where a part of them would come over another one."""
    if _Ways(roots).lead(mesh, mesh):
        raise UsageTypeError(
            f"{what} does not go across meshes, and here the graph leaves {mesh} and comes back: call loss.backward() "
            "and read .grad"
        )


def backward(
    run: Pass,
    mesh: Any,
    roots: Sequence[Any],
    gradients: Sequence[Any],
    inputs: Sequence[Any],
    keep_graph: bool,
    create_graph: bool,
) -> None:
    if create_graph:
        raise UsageTypeError("backward(create_graph=True) does not go across meshes: move detached values (t.detach())")
    if inputs:
        check_stays("backward(inputs=...)", mesh, roots)
    ways = _Ways(roots)
    pending: dict[int, tuple[Crossing, int]] = {}
    chosen: list[Crossing] = []
    with _one_at_a_time:
        try:
            comes_back = ways.lead(mesh, mesh)
            found = run(mesh, roots, gradients, inputs, keep_graph or comes_back, False, mesh.all_equal)
            _note(pending, *found)
            while pending:
                chosen, again = _next(pending, ways)
                home = chosen[0].move.home
                limit = home.all_equal
                for crossing in chosen:
                    limit &= pending[crossing.number][1]
                    _send_back(crossing)
                stand_ins = [c.stand_in for c in chosen]
                found = run(home, stand_ins, [None] * len(chosen), [], keep_graph or again, False, limit)
                for crossing in chosen:
                    del pending[crossing.number]
                _note(pending, *found)
        except BaseException:
            for crossing, _ in pending.values():
                _give_up(crossing)
            raise


def _note(pending: dict[int, tuple[Crossing, int]], reached: list[Crossing], equal: int) -> None:
    for crossing in reached:
        mask = crossing.equal_at_home(equal)
        before = pending.get(crossing.number)
        pending[crossing.number] = (crossing, mask if before is None else mask & before[1])


def _next(pending: dict[int, tuple[Crossing, int]], ways: _Ways) -> tuple[list[Crossing], bool]:
    """The crossings to go back over now, to one mesh, and whether its graph may be needed again."""
    waiting = [pending[number][0] for number in sorted(pending)]
    for home in {c.move.home: None for c in waiting}:
        if not any(ways.lead(c.move.home, home) for c in waiting):
            return [c for c in waiting if c.move.home is home], False
    return waiting[-1:], True


def _send_back(crossing: Crossing, number: int | None = None) -> None:
    move = crossing.move
    client = move.home.client
    with client.lock, HeldInterrupt():
        client.use_scope(move.span)
        client.where.append(locations.here(4))
        client.code.extend((Op.MOVE_BACK, move.number if number is None else number, crossing.number))
        client.ties.move(move.span.ranks_key)


def _give_up(crossing: Crossing) -> None:
    """The gradients that wait on the workers are dropped there: a later pass would add to them."""
    with contextlib.suppress(MeshError):
        _send_back(crossing, 0)


def by_number(crossings: Sequence[Crossing], numbers: Sequence[int]) -> list[Crossing]:
    """Those that the workers have reached. InternalError for one that the roots are not known to hang on."""
    known = {c.number: c for c in crossings}
    if unknown := [n for n in numbers if n not in known]:
        raise InternalError(f"backward() reached crossings {unknown}, which the controller did not know in the graph")
    return [known[n] for n in numbers]
