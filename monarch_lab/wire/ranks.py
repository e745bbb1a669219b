"""Sets of ranks as users write them. Pure: a text and the sizes of the dims in, ranks out.

all         every rank                  0:8:2, ::2      counted as Python counts a slice
3, -1       one, or from the end        gpu=0           all ranks at 0 of dim "gpu"
0,2-5       several; 2-5 holds both     host=1,gpu=0:2  both must hold; the right side is of the same grammar
"""

from __future__ import annotations

import difflib
import itertools
import math
import re
from collections.abc import Mapping

from monarch_lab.errors import UsageValueError

_RANGE = re.compile(r"(-?\d{1,9})\s*-\s*(-?\d{1,9})")
_INDEX = re.compile(r"-?\d{1,9}")


def parse_ranks(text: str, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """The ranks that ``text`` names on a mesh with these dims (row-major), in order, each once.

    Raises UsageValueError, one sentence with the valid range, for what is no rank, no dim, or names nothing.
    """
    total = math.prod(sizes.values())
    words = text.strip()
    if words.startswith("[") and words.endswith("]"):  # as in %%spmd[0,1]
        words = words[1:-1].strip()
    if words == "all":
        return tuple(range(total))
    if "=" in words:
        chosen = _read_dims(words, text, sizes)
        places = itertools.product(*(sorted(chosen.get(dim, range(size))) for dim, size in sizes.items()))
        found = {_rank(place, sizes) for place in places}
    else:
        found = set().union(*(_read_item(item, total, "rank", text) for item in words.split(",")))
    if not found:
        raise UsageValueError(f"{text!r} names no rank; {_valid('rank', total)}")
    return tuple(sorted(found))


def _read_dims(words: str, text: str, sizes: Mapping[str, int]) -> dict[str, set[int]]:
    chosen: dict[str, set[int]] = {}
    dim = ""
    for item in words.split(","):
        name, equals, value = item.partition("=")
        if equals:
            dim = name.strip()
            if dim not in sizes:
                near = difflib.get_close_matches(dim, sizes, 1)
                hint = f"did you mean {near[0]}?" if near else f"there is {', '.join(sizes)}"
                raise UsageValueError(f"{text!r}: no dim is named {dim!r}; {hint}")
            if dim in chosen:
                raise UsageValueError(f"{text!r}: dim {dim} is given twice; write {dim}=0,2 for two places of it")
            chosen[dim] = set()
        elif not dim:
            raise UsageValueError(f"{text!r} mixes ranks and dims; write either 0,2 or gpu=0,2")
        chosen[dim] |= _read_item(value if equals else item, sizes[dim], dim, text)
    return chosen


def _read_item(item: str, size: int, what: str, text: str) -> set[int]:
    item = item.strip()
    if item == "all":
        return set(range(size))
    if ":" in item:
        return _read_slice(item, size, what, text)
    if _INDEX.fullmatch(item):
        return {_index(int(item), size, what, text)}
    both = _RANGE.fullmatch(item)
    if both is None:
        raise UsageValueError(
            f"{text!r}: {item!r} is no {what}; write all, 1, -1, 0,2-5, ::2 or gpu=0; {_valid(what, size)}"
        )
    first, last = (_index(int(end), size, what, text) for end in both.groups())
    if first > last:
        raise UsageValueError(f"{text!r}: {item} runs backwards; write {last}-{first}")
    return set(range(first, last + 1))


def _read_slice(item: str, size: int, what: str, text: str) -> set[int]:
    ends = [end.strip() for end in item.split(":")]
    if len(ends) > 3 or any(end and not _INDEX.fullmatch(end) for end in ends):
        raise UsageValueError(f"{text!r}: {item!r} is no slice; write 0:8:2, 1: or ::2; {_valid(what, size)}")
    start, stop, step = (int(end) if end else None for end in (*ends, "", "")[:3])
    if step == 0:
        raise UsageValueError(f"{text!r}: the step of {item} is 0; write 1 or more")
    return set(range(size)[start:stop:step])


def _index(index: int, size: int, what: str, text: str) -> int:
    if not -size <= index < size:
        raise UsageValueError(f"{text!r}: there is no {what} {index}; {_valid(what, size)}")
    return index % size


def _valid(what: str, size: int) -> str:
    kind = "ranks are" if what == "rank" else f"{what} is"
    return f"{kind} 0 to {size - 1} (or -{size} to -1)"


def _rank(place: tuple[int, ...], sizes: Mapping[str, int]) -> int:
    rank = 0
    for at, size in zip(place, sizes.values(), strict=True):
        rank = rank * size + at
    return rank
