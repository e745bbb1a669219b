"""Gradients one by one: each runs only the part of the graph that it needs and that has not been run before."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge


class GradientWalk:
    """Over the graph of ``roots``, for gradients with respect to ``wrt``. ``grads``: those of the roots; None is one,
    for a root with one element.

    Each node is run once, by torch's engine, which frees what it had saved. Raises RuntimeError for a root that
    requires no grad, or that has more elements and no gradient.
    """

    def __init__(self, roots: Sequence[torch.Tensor], grads: Sequence[Any], wrt: Sequence[torch.Tensor]) -> None:
        self._targets = [get_gradient_edge(t) if t.requires_grad else None for t in wrt]
        self._gradients: dict[Any, dict[int, torch.Tensor]] = {}  # node -> what has come to each of its inputs
        self._before: dict[Any, list[Any]] = {}  # node -> the nodes that send to it
        self._todo: list[Any] = []  # nodes not yet run, each behind those that send to it
        self._given: list[torch.Tensor] = [g for g in grads if g is not None]
        edges = [get_gradient_edge(t) for t in roots]
        self._explore([e.node for e in edges])
        for root, gradient, edge in zip(roots, grads, edges, strict=True):
            if gradient is None:
                if root.numel() != 1:
                    raise RuntimeError("grad can be implicitly created only for scalar outputs")
                gradient = torch.ones_like(root)
            self._add(edge, gradient)

    def _explore(self, starts: Sequence[Any]) -> None:
        """Depth first; a node is finished after all that it sends to."""
        finished: list[Any] = []
        seen: set[Any] = set()
        stack = [(node, False) for node in starts]
        while stack:
            node, is_done = stack.pop()
            if is_done:
                finished.append(node)
                continue
            if node in seen:
                continue
            seen.add(node)
            stack.append((node, True))
            for follower, _ in node.next_functions:
                if follower is not None:
                    self._before.setdefault(follower, []).append(node)
                    stack.append((follower, False))
        self._todo = finished[::-1]

    def _add(self, edge: GradientEdge, gradient: Any) -> None:
        if gradient is None:
            return
        there = self._gradients.setdefault(edge.node, {})
        had = there.get(edge.output_nr)
        there[edge.output_nr] = gradient if had is None else had + gradient

    def gradient(self, k: int) -> torch.Tensor | None:
        """The gradient for ``wrt[k]``; None where no root hangs on it. A tensor of its own each time."""
        target = self._targets[k]
        if target is None:
            return None
        needed = self._ancestors(target.node)
        with torch.no_grad():
            for node in [n for n in self._todo if n in needed]:
                self._run(node)
        self._todo = [n for n in self._todo if n not in needed]
        found = self._gradients.get(target.node, {}).get(target.output_nr)
        if found is None:
            return None
        if any(found is t for t in self._given):
            return found.clone()
        self._given.append(found)
        return found

    def _ancestors(self, node: Any) -> set[Any]:
        found: set[Any] = set()
        stack = list(self._before.get(node, ()))
        while stack:
            node = stack.pop()
            if node not in found:
                found.add(node)
                stack.extend(self._before.get(node, ()))
        return found

    def _run(self, node: Any) -> None:
        there = self._gradients.get(node, {})
        kept = {t.output_nr for t in self._targets if t is not None and t.node is node}
        edges = list({(n, i): GradientEdge(n, i) for n, i in node.next_functions if n is not None}.values())
        if there and edges:
            outputs = [GradientEdge(node, i) for i in there]
            given = torch.autograd.grad(outputs, edges, list(there.values()), allow_unused=True)
            for edge, gradient in zip(edges, given, strict=True):
                self._add(edge, gradient)
        for i in [i for i in there if i not in kept]:
            del there[i]


def execution_order(roots: Sequence[torch.Tensor], wrt: Sequence[torch.Tensor]) -> list[int]:
    """Indices of ``wrt`` in the order in which torch's engine comes to their nodes in a pass from ``roots``; those that
    it does not come to last.

    Of the nodes that have got all their gradients the engine runs the one with the highest sequence number (made last;
    a leaf's is above all) first: pytorch.org, "Autograd mechanics".
    """
    starts = list(dict.fromkeys(get_gradient_edge(t).node for t in roots))
    missing: dict[Any, int] = {}  # node -> edges that lead to it and have given nothing yet
    todo, seen = starts[:], set(starts)
    while todo:
        for follower in _followers(todo.pop()):
            missing[follower] = missing.get(follower, 0) + 1
            if follower not in seen:
                seen.add(follower)
                todo.append(follower)
    tie = itertools.count()
    ready = [(-_sequence(node), next(tie), node) for node in starts if not missing.get(node)]
    heapq.heapify(ready)
    place: dict[Any, int] = {}
    while ready:
        node = heapq.heappop(ready)[2]
        place[node] = len(place)
        for follower in _followers(node):
            missing[follower] -= 1
            if not missing[follower]:
                heapq.heappush(ready, (-_sequence(follower), next(tie), follower))
    nodes = [get_gradient_edge(t).node if t.requires_grad else None for t in wrt]
    return sorted(range(len(wrt)), key=lambda k: place.get(nodes[k], len(place)))


def _sequence(node: Any) -> int:
    return node._sequence_nr()  # noqa: SLF001  torch has no public name for it


def _followers(node: Any) -> list[Any]:
    return [follower for follower, _ in node.next_functions if follower is not None]
