"""What many ranks printed as one text: in the order of the ranks, equal lines once, with the ranks that have them.

Lines are folded where they are equal to the last character. Progress bars alone are merged though they differ: the
slowest rank's is shown, and how far the fastest is.
"""

from __future__ import annotations

import heapq
import itertools
import re
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher

from monarch_lab.notebook.screen import Line

# Pairs of equal lines beyond which two texts are not aligned line by line: it would take too long.
_MOST_PAIRS = 200_000
_PERCENT = re.compile(r"(?P<name>.*?)(?P<value>\d+(?:\.\d+)?)\s?%")
_COUNT = re.compile(r"(?P<name>[^\d]*)(?P<value>\d+)\s?(?:/|of)\s?(?P<total>\d+)")
_CONTROL = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|[\x00-\x08\x0b-\x1f\x7f]")

Key = Hashable


@dataclass(slots=True)
class Row:
    """A line of some ranks; ``by_rank`` has each one's text where it is a bar."""

    key: Key
    line: Line
    ranks: list[int]
    by_rank: dict[int, str] = field(default_factory=dict)


def folded(lines: dict[int, list[Line]]) -> list[Row]:
    """``lines`` by rank."""
    groups: dict[tuple[Key, ...], list[int]] = {}
    for rank in sorted(lines):
        groups.setdefault(tuple(map(_key, lines[rank])), []).append(rank)
    rows: list[Row] = []
    for keys, ranks in groups.items():
        rows = _joined(rows, keys, ranks, lines)
    for row in rows:
        row.ranks.sort()
    return rows if len(groups) < 3 else _in_order(rows, [ranks[0] for ranks in groups.values()])


def label_of(ranks: Sequence[int], labels: dict[int, str]) -> str:
    """``0.0-0.3,1.2``."""
    runs: list[list[int]] = []
    known = sorted(labels)
    place = {rank: n for n, rank in enumerate(known)}
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1 and place[rank] == place[runs[-1][-1]] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    parts = [labels[run[0]] if len(run) == 1 else f"{labels[run[0]]}-{labels[run[-1]]}" for run in runs]
    return ",".join(parts)


def text_of(row: Row, labels: dict[int, str]) -> str:
    """The row's text, without its label."""
    if not row.by_rank:
        return row.line.text
    values = {rank: _progress(text) for rank, text in row.by_rank.items()}
    slowest = min(values, key=lambda rank: (values[rank], rank))
    fastest = max(values, key=lambda rank: (values[rank], -rank))
    text = row.by_rank[slowest].rstrip()
    if values[slowest] == values[fastest]:
        return text
    found = _PERCENT.match(row.by_rank[fastest]) or _COUNT.match(row.by_rank[fastest])
    ahead = found[0][len(found["name"]) :] if found else ""
    return f"{text} (slowest {labels[slowest]}; fastest {labels[fastest]}: {ahead})"


def plain(text: str) -> str:
    """Without colours and other codes of a terminal."""
    return _CONTROL.sub("", text)


def _key(line: Line) -> Key:
    if line.is_rewritten and (found := _PERCENT.match(line.text) or _COUNT.match(line.text)):
        return "bar", line.stream, found["name"].strip()
    return line.stream, line.text


def _progress(text: str) -> float:
    if found := _PERCENT.match(text):
        return float(found["value"])
    if found := _COUNT.match(text):
        return 100 * float(found["value"]) / max(1.0, float(found["total"]))
    return 0.0


def _joined(rows: list[Row], keys: tuple[Key, ...], ranks: list[int], lines: dict[int, list[Line]]) -> list[Row]:
    """``rows`` and the lines of ``ranks``, whose keys are ``keys``; the order of each is kept."""
    new = [Row(key, lines[ranks[0]][n], list(ranks), _by_rank(key, n, ranks, lines)) for n, key in enumerate(keys)]
    joined: list[Row] = []
    at_old = at_new = 0
    for old_place, new_place in [*_matches([row.key for row in rows], keys), (len(rows), len(new))]:
        joined += rows[at_old:old_place]  # lower ranks come first
        joined += new[at_new:new_place]
        if old_place < len(rows):
            row = rows[old_place]
            row.ranks += new[new_place].ranks
            row.by_rank |= new[new_place].by_rank
            joined.append(row)
        at_old, at_new = old_place + 1, new_place + 1
    return joined


def _in_order(rows: list[Row], ranks: list[int]) -> list[Row]:
    """Lower ranks first, as far as the order of each rank's own lines allows."""
    waits_for = [0] * len(rows)
    followers: list[list[int]] = [[] for _ in rows]
    for rank in ranks:
        own = [n for n, row in enumerate(rows) if rank in row.ranks]
        for before, after in itertools.pairwise(own):
            followers[before].append(after)
            waits_for[after] += 1
    free = [(row.ranks[0], n) for n, row in enumerate(rows) if not waits_for[n]]
    heapq.heapify(free)
    ordered = []
    while free:
        _, n = heapq.heappop(free)
        ordered.append(rows[n])
        for after in followers[n]:
            waits_for[after] -= 1
            if not waits_for[after]:
                heapq.heappush(free, (rows[after].ranks[0], after))
    return ordered


def _by_rank(key: Key, n: int, ranks: list[int], lines: dict[int, list[Line]]) -> dict[int, str]:
    if not (isinstance(key, tuple) and key[0] == "bar"):
        return {}
    return {rank: lines[rank][n].text for rank in ranks}


def _matches(old: Sequence[Key], new: Sequence[Key]) -> Iterable[tuple[int, int]]:
    """Places of equal lines, rising in both."""
    shorter = min(len(old), len(new))
    first = next((n for n in range(shorter) if old[n] != new[n]), shorter)
    last = next((n for n in range(shorter - first) if old[-1 - n] != new[-1 - n]), shorter - first)
    yield from ((n, n) for n in range(first))
    middle_old, middle_new = old[first : len(old) - last], new[first : len(new) - last]
    counts = Counter(middle_new)
    if sum(counts[key] for key in middle_old) <= _MOST_PAIRS:
        matcher = SequenceMatcher(None, middle_old, middle_new, autojunk=False)
        for block in matcher.get_matching_blocks():
            yield from ((first + block.a + n, first + block.b + n) for n in range(block.size))
    yield from ((len(old) - last + n, len(new) - last + n) for n in range(last))
