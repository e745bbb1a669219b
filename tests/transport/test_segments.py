"""Segments of shared memory: copied once, mapped privately, used again only when nobody reads them."""

from __future__ import annotations

import os

import pytest

from monarch_lab.transport.segments import LARGE_BYTES, SegmentPool, SegmentReader

LARGE = LARGE_BYTES + 5


def data(byte: int, size: int = LARGE) -> memoryview:
    return memoryview(bytes([byte]) * size)


def test_large_frames_are_mapped_and_small_ones_travel() -> None:
    pool, reader = SegmentPool(), SegmentReader()
    frames, segments = pool.put([b"small", data(7)])
    assert frames == [b"small", b""] and [(k, size) for k, _, size in segments] == [(1, LARGE)]
    assert reader.can_read(os.getpid())
    small, large = reader.open(os.getpid(), frames, segments)
    assert small == b"small" and large[:] == bytes([7]) * LARGE


def test_a_segment_is_used_again_when_its_last_mapping_is_gone() -> None:
    pool, reader = SegmentPool(), SegmentReader()
    frames, segments = pool.put([data(1)])
    (first,) = reader.open(os.getpid(), frames, segments)
    assert reader.unmapped(os.getpid()) == ([], [])
    _, others = pool.put([data(2)])
    assert others[0][1] != segments[0][1] and first[0] == 1
    del first
    free, drop = reader.unmapped(os.getpid())
    assert free == [segments[0][1]] and drop == [] and reader.unmapped(os.getpid()) == ([], [])
    pool.free(free)
    _, again = pool.put([data(3, LARGE - 1)])
    assert again[0][1] == segments[0][1]


def test_what_is_written_to_a_mapping_stays_there() -> None:
    pool, reader = SegmentPool(), SegmentReader()
    frames, segments = pool.put([data(1)])
    mapped = reader.open(os.getpid(), frames, segments)[0]
    mapped[0:1] = b"x"  # type: ignore[index]
    assert reader.open(os.getpid(), frames, segments)[0][0] == 1


def test_a_segment_that_a_child_may_read_is_not_used_again() -> None:
    pool, reader = SegmentPool(), SegmentReader()
    frames, segments = pool.put([data(1)])
    mapped = reader.open(os.getpid(), frames, segments)
    child = os.fork()
    if not child:
        os._exit(0)
    os.waitpid(child, 0)
    mapped.clear()
    free, drop = reader.unmapped(os.getpid())
    assert free == [] and drop == [segments[0][1]]
    pool.free(free, drop)
    with pytest.raises(OSError):
        os.fstat(segments[0][1])


def test_few_free_segments_are_kept() -> None:
    pool = SegmentPool()
    fds = [pool.put([data(k)])[1][0][1] for k in range(7)]
    pool.free(fds)
    kept = [fd for fd in fds if os.path.exists(f"/proc/self/fd/{fd}")]
    assert kept == fds[-4:]


def test_a_segment_that_cannot_be_made_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise OSError("no memory")

    monkeypatch.setattr(os, "memfd_create", refuse)
    given = bytearray(data(1)), bytearray(b"small")
    frames, segments = SegmentPool().put([memoryview(f) for f in given])
    for frame in given:
        frame[:] = bytes(len(frame))
    assert segments == [] and frames == [data(1), b"small"]
