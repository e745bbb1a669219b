"""Which ranks' values may hang on one another's, since their failures were last shared.

A fetch waits for those of its rank alone: another half of the mesh may be busy, idle or dead.

Runs on: whoever issues ops, under the client's lock.
"""

from __future__ import annotations

from collections.abc import Iterable


class Ties:
    def __init__(self) -> None:
        # (ranks, whether a collective is among what tied them); no rank is in two
        self._groups: list[tuple[frozenset[int], bool]] = []

    def meet(self, ranks: Iterable[int]) -> None:
        """They take part in a collective: of a failure the others hear nothing by themselves."""
        self._add(ranks, True)

    def move(self, ranks: Iterable[int]) -> None:
        """Values go from some of them to others, and so do failures."""
        self._add(ranks, False)

    def _add(self, ranks: Iterable[int], is_collective: bool) -> None:
        for known, has_collective in self._groups:
            if has_collective >= is_collective and known.issuperset(ranks):
                return
        tied = frozenset(ranks)
        if len(tied) < 2:
            return
        apart = []
        for known, has_collective in self._groups:
            if known.isdisjoint(tied):
                apart.append((known, has_collective))
            else:
                tied, is_collective = tied | known, is_collective or has_collective
        self._groups = [*apart, (tied, is_collective)]

    def of(self, ranks: Iterable[int]) -> frozenset[int]:
        """They and all that are tied to one of them."""
        given = frozenset(ranks)
        return given.union(*[known for known, _ in self._groups if not known.isdisjoint(given)])

    def unsettled(self, ranks: Iterable[int]) -> frozenset[int]:
        """Those whose failures have to be shared before a value of these ranks can be believed; often none."""
        if not self._groups:
            return frozenset()
        given = frozenset(ranks)
        return frozenset().union(*[known for known, hot in self._groups if hot and not known.isdisjoint(given)])

    def settle(self, ranks: Iterable[int] | None) -> None:
        """The failures of these ranks have been shared; of all for None."""
        if ranks is None:
            self._groups = []
            return
        given = frozenset(ranks)
        self._groups = [g for g in self._groups if not g[0] <= given]

    def take(self) -> list[tuple[frozenset[int], bool]]:
        """All there are, which are forgotten here."""
        groups, self._groups = self._groups, []
        return groups

    def put_back(self, groups: Iterable[tuple[frozenset[int], bool]]) -> None:
        for ranks, is_collective in groups:
            self._add(ranks, is_collective)
