"""Random numbers: all ranks start from one seed and draw equal ones; a rank draws its own only on request.

Source of the mixing: the position is added to the seed through SplitMix64's finaliser (Steele, Lea, Flood 2014),
so that neighbouring ranks get unrelated streams.
"""

from __future__ import annotations

import torch

_MASK = (1 << 64) - 1


def mixed(seed: int, position: int) -> int:
    z = (seed + (position + 1) * 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return (z ^ (z >> 31)) & ((1 << 63) - 1)


class Randomness:
    """Keeps the common state while a rank draws its own numbers, and brings it back."""

    def __init__(self) -> None:
        self._kept: list[torch.Tensor] = []

    def seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def vary(self, level: int, seed: int, position: int) -> None:
        if position >= 0:
            self._kept.append(torch.get_rng_state())
            torch.manual_seed(mixed(seed, position))
            return
        while len(self._kept) > level:
            torch.set_rng_state(self._kept.pop())
