"""n-dimensional slices of ranks: an offset, sizes and strides, as of a strided array. Pure arithmetic."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Slice:
    offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def dense(cls, *sizes: int, offset: int = 0) -> Slice:
        """Row-major over ``sizes``."""
        return cls(offset, sizes, tuple(math.prod(sizes[k + 1 :]) for k in range(len(sizes))))

    def __len__(self) -> int:
        return math.prod(self.sizes)

    def __iter__(self) -> Iterator[int]:
        """The ranks in row-major order of the coordinates."""
        for at in itertools.product(*map(range, self.sizes)):
            yield self.rank(at)

    def rank(self, coordinates: tuple[int, ...]) -> int:
        return self.offset + sum(c * s for c, s in zip(coordinates, self.strides, strict=True))

    def coordinates(self, rank: int) -> tuple[int, ...]:
        """Raises ValueError for a rank that is not of this slice."""
        for at in itertools.product(*map(range, self.sizes)):
            if self.rank(at) == rank:
                return at
        raise ValueError(f"rank {rank} is not in {list(self)}")

    def fix(self, dim: int, index: int) -> Slice:
        """Without ``dim``, at ``index`` of it (in range)."""
        return Slice(
            self.offset + index * self.strides[dim],
            self.sizes[:dim] + self.sizes[dim + 1 :],
            self.strides[:dim] + self.strides[dim + 1 :],
        )

    def cut(self, dim: int, part: slice) -> Slice:
        """Every ``part.step``-th of ``dim`` from ``part.start`` to ``part.stop``, counted as Python does."""
        chosen = range(*part.indices(self.sizes[dim]))
        sizes, strides = list(self.sizes), list(self.strides)
        sizes[dim], strides[dim] = len(chosen), strides[dim] * chosen.step
        return Slice(self.offset + chosen.start * self.strides[dim], tuple(sizes), tuple(strides))

    @property
    def is_dense(self) -> bool:
        return self.strides == Slice.dense(*self.sizes).strides
