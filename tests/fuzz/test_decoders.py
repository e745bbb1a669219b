"""Every decoder, given anything: it understands or it refuses, and nothing is unpickled."""

from __future__ import annotations

import itertools
import pickle
import random
import tracemalloc
from collections.abc import Iterator

import cloudpickle
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from tests.fuzz.inputs import NASTY, TARGETS, Target, damaged, decodes_or_refuses, inputs, resident_bytes


@pytest.fixture(autouse=True)
def nothing_is_unpickled() -> Iterator[None]:
    def opened(*_: object, **__: object) -> None:
        raise AssertionError("bytes of a peer were unpickled")

    before = [(module, name, getattr(module, name)) for module in (pickle, cloudpickle) for name in ("loads", "load")]
    for module, name, _ in before:
        setattr(module, name, opened)
    yield
    for module, name, original in before:
        setattr(module, name, original)


@pytest.mark.parametrize("target", TARGETS, ids=str)
@pytest.mark.parametrize("data", NASTY, ids=lambda data: repr(data[:12]))
def test_what_breaks_naive_decoders_is_refused(target: Target, data: bytes) -> None:
    decodes_or_refuses(target, data)


@pytest.mark.parametrize("target", TARGETS, ids=str)
@given(data=st.binary(max_size=200), seed=st.integers(0, 1 << 32))
@hypothesis_settings(max_examples=50, deadline=None)
def test_any_bytes_and_any_damaged_message_are_understood_or_refused(target: Target, data: bytes, seed: int) -> None:
    rng = random.Random(seed)
    decodes_or_refuses(target, data)
    sample = target.samples(rng)
    assert decodes_or_refuses(target, sample)
    decodes_or_refuses(target, damaged(sample, rng))


def run_inputs(target: Target, count: int, rng: random.Random) -> int:
    """How many were understood."""
    return sum(decodes_or_refuses(target, data) for data in itertools.islice(inputs(target, rng), count))


@pytest.mark.parametrize("target", TARGETS, ids=str)
def test_refusals_keep_no_memory(target: Target) -> None:
    rng = random.Random(1)
    tracemalloc.start()
    try:
        run_inputs(target, 1_000, rng)
        before, _ = tracemalloc.get_traced_memory()
        found = run_inputs(target, 3_000, rng)
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert found > 700  # the inputs are not all noise
    assert after - before < 100_000


@pytest.mark.soak
@pytest.mark.parametrize("target", TARGETS, ids=str)
def test_a_million_inputs_are_understood_or_refused(target: Target) -> None:
    rng = random.Random(2)
    run_inputs(target, 10_000, rng)
    before = resident_bytes()
    run_inputs(target, 1_000_000, rng)
    assert resident_bytes() - before < 16 << 20
