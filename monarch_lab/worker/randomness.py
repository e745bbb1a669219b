"""Random numbers: all ranks start from one seed and draw equal ones; a rank draws its own only on request.

There is one stream of numbers for each *scope*: the whole mesh (its stream is torch's own from the seed, so that
a cell draws what eager torch would), each part of it, calls on one process, and the user's functions, whose number of
draws may differ between ranks. What one scope draws never moves another, so the
ranks of each stay equal.

Source of the mixing: SplitMix64's finaliser (Steele, Lea, Flood 2014), so that neighbouring positions get unrelated
streams.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from monarch_lab.errors import InternalError

_MASK = (1 << 64) - 1
WHOLE = 0
ONE_PROCESS = -1
PRIVATE = -2


def mixed(seed: int, position: int) -> int:
    z = (seed + (position + 1) * 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return (z ^ (z >> 31)) & ((1 << 63) - 1)


_State = tuple[torch.Tensor, torch.Tensor | None]


def _state() -> _State:
    """Of torch's generators, that of this worker's GPU too where it has been used."""
    return torch.get_rng_state(), torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None


def _set_state(state: _State) -> None:
    torch.set_rng_state(state[0])
    if state[1] is not None:
        torch.cuda.set_rng_state(state[1])


@dataclass(slots=True)
class _Streams:
    seed: int
    private_seed: int | None = None  # of users' functions, where it is another
    states: dict[int, _State] = field(default_factory=dict)  # scope -> state, of the scopes not in use


class Randomness:
    """Which stream torch's generator is in. Runs on: the worker's main thread."""

    def __init__(self, seed: int) -> None:
        self._kept: list[_Streams] = []
        self._streams = _Streams(seed)
        self._scope = WHOLE
        torch.manual_seed(seed)

    @property
    def scope(self) -> int:
        """Whose stream is in use."""
        return self._scope

    def use(self, scope: int) -> None:
        """Draw from the stream of ``scope`` from now on."""
        if scope == self._scope:
            return
        self._streams.states[self._scope] = _state()
        self._scope = scope
        state = self._streams.states.pop(scope, None)
        if state is not None:
            _set_state(state)
        else:
            torch.manual_seed(self._first(scope))

    def _first(self, scope: int) -> int:
        seed = self._streams.seed
        if scope == PRIVATE and self._streams.private_seed is not None:
            seed = self._streams.private_seed
        return seed if scope == WHOLE else mixed(seed, scope & 0xFFFF_FFFF)

    @contextmanager
    def private(self) -> Iterator[None]:
        """What is drawn inside comes from a stream that ranks may leave at different places."""
        scope = self._scope
        if scope in (PRIVATE, ONE_PROCESS):
            yield
            return
        self.use(PRIVATE)
        try:
            yield
        finally:
            self.use(scope)

    def common(self) -> tuple[int, dict[int, _State]]:
        """The seed, and where each stream is that ranks draw equal numbers from. Asked in a call on one process, whose
        own stream is in use then."""
        return self._streams.seed, {scope: s for scope, s in self._streams.states.items() if scope >= WHOLE}

    def adopt(self, seed: int, states: dict[int, _State]) -> None:
        """Go on where another rank's ``common`` streams are. Before anything was drawn here."""
        self._streams = _Streams(seed, states=dict(states))
        state = self._streams.states.pop(self._scope, None)
        if state is not None:
            _set_state(state)
        else:
            torch.manual_seed(self._first(self._scope))

    def seed(self, seed: int, scope: int = WHOLE) -> None:
        """Every stream begins again. Of a part of the mesh, its own and that of users' functions alone: the other
        ranks hear nothing of it, and what all draw together must stay equal."""
        if scope == WHOLE:
            self._streams = _Streams(seed)
            torch.manual_seed(self._first(self._scope))
            return
        self.use(scope)
        torch.manual_seed(seed)
        self._streams.states.pop(PRIVATE, None)
        self._streams.private_seed = seed

    def vary(self, level: int, seed: int, position: int) -> None:
        """Draw numbers of this rank's own until ``position`` -1 brings the common streams of ``level`` back."""
        scope = self._scope
        self.use(WHOLE)
        if position >= 0:
            self._streams.states[WHOLE] = _state()
            self._kept.append(self._streams)
            self._streams = _Streams(mixed(seed, position))
            torch.manual_seed(self._streams.seed)
        else:
            while len(self._kept) > level:
                self._streams = self._kept.pop()
            state = self._streams.states.pop(WHOLE, None)
            if state is not None:
                _set_state(state)
        self.use(scope)


@contextmanager
def reseeded() -> Iterator[None]:
    """For a sampler that rejects: it draws from a stream seeded with one number of the common one, which moves by that
    number alone. Equal inputs give equal results, and unequal ones cannot part the ranks' common stream."""
    seed = int(torch.randint(1 << 62, ()))
    state = _state()
    torch.manual_seed(seed)
    try:
        yield
    finally:
        _set_state(state)


_own: Randomness | None = None


def install(randomness: Randomness) -> None:
    global _own
    _own = randomness


def common_streams() -> tuple[int, dict[int, _State]]:
    if _own is None:
        raise InternalError("random streams outside a worker")
    return _own.common()


def get_state() -> tuple[torch.Tensor, ...]:
    """The generators' states, of the scope that runs this: the CPU's, and the GPU's where the worker has one."""
    return (
        (torch.get_rng_state(), torch.cuda.get_rng_state()) if torch.cuda.is_available() else (torch.get_rng_state(),)
    )


def set_state(*state: torch.Tensor) -> None:
    torch.set_rng_state(state[0].cpu())
    if len(state) > 1:
        torch.cuda.set_rng_state(state[1].cpu())


def new_state(seed: int | torch.Tensor) -> tuple[torch.Tensor, ...]:
    """What the states are after ``torch.manual_seed(seed)``; the generators stay as they are."""
    before = get_state()
    try:
        torch.manual_seed(int(seed))
        return get_state()
    finally:
        set_state(*before)


def choose_deterministic_kernels() -> None:
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
