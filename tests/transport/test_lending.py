"""Segments that one writes and several map: filled again only when nobody can read them any more."""

from __future__ import annotations

import mmap
import os
from typing import Any

import pytest

from monarch_lab.transport import lending, segments
from monarch_lab.transport.lending import SegmentLender
from monarch_lab.transport.segments import LARGE_BYTES, SegmentReader

ME = os.getpid()
LARGE = LARGE_BYTES + 5


def fill(memory: mmap.mmap, frame: Any) -> None:
    memory[: len(frame)] = frame


def data(byte: int, size: int = LARGE) -> memoryview:
    return memoryview(bytes([byte]) * size)


@pytest.fixture
def lender() -> Any:
    lender = SegmentLender(fill)
    yield lender
    lender.close()


def open_segments() -> int:
    """Descriptors of them in this process; what else it opens meanwhile does not count."""
    paths = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    return sum("memfd:monarch_lab" in os.readlink(p) for p in paths if os.path.lexists(p))


class Reader:
    """One of several processes that map what is lent."""

    def __init__(self, lender: SegmentLender, number: int) -> None:
        self.lender, self.number, self.reader = lender, number, SegmentReader()
        self.values: list[Any] = []

    def open(self, put: Any) -> Any:
        frames, found, loans = put
        self.values = self.reader.open(ME, frames, found, loans)
        return self.values[-1]

    def give_back(self) -> None:
        self.values = []
        self.lender.returned(self.number, *self.reader.unmapped(ME))


def test_all_map_one_segment_and_what_one_writes_is_its_own(lender: SegmentLender) -> None:
    put = lender.put([b"small", data(7)], (0, 1))
    assert put[0] == [b"small", b""] and [(k, size) for k, _, size in put[1]] == [(1, LARGE)]
    first, second = (Reader(lender, k) for k in (0, 1))
    first.open(put)[:1] = b"x"
    assert second.open(put)[:] == bytes([7]) * LARGE and first.values[1][:2] == b"x\x07"


def test_a_segment_is_filled_again_when_the_last_reader_has_returned_it(lender: SegmentLender) -> None:
    readers = [Reader(lender, k) for k in (0, 1)]
    put = lender.put([data(1)], (0, 1))
    for reader in readers:
        reader.open(put)
    readers[0].give_back()
    other = lender.put([data(2)], (0,))
    assert other[1][0][1] != put[1][0][1] and readers[1].values[0][0] == 1
    readers[1].give_back()
    again = lender.put([data(3, LARGE - 1)], (0, 1))
    assert again[1][0][1] == put[1][0][1] and again[2] != put[2]
    lender.returned(0, put[2])  # told late, of the loan before: not of this one
    lender.returned(1, put[2])
    assert lender.put([data(4)], (0,))[1][0][1] != put[1][0][1]


@pytest.mark.parametrize("how", ["ended", "forked"])
def test_what_a_child_of_a_reader_may_read_is_closed_and_not_filled_again(lender: SegmentLender, how: str) -> None:
    put = lender.put([data(1)], (0, 1))
    readers = [Reader(lender, k) for k in (0, 1)]
    for reader in readers:
        reader.open(put)
    if how == "ended":
        lender.ended(0)
    else:
        child = os.fork()
        if not child:
            os._exit(0)
        os.waitpid(child, 0)
        readers[0].give_back()
    os.fstat(put[1][0][1])
    readers[1].give_back()
    with pytest.raises(OSError):
        os.fstat(put[1][0][1])


def test_few_segments_of_bounded_size_wait_to_be_filled_again(
    lender: SegmentLender, monkeypatch: pytest.MonkeyPatch
) -> None:
    puts = [lender.put([data(k)], (0,)) for k in range(7)]
    lender.returned(0, [loan for _, _, loans in puts for loan in loans])
    fds = [found[0][1] for _, found, _ in puts]
    assert [fd for fd in fds if os.path.exists(f"/proc/self/fd/{fd}")] == fds[-4:]
    monkeypatch.setattr(lending, "MAX_FREE_BYTES", 2 * LARGE)
    lender.returned(0, lender.put([data(9)], (0,))[2])
    assert sum(os.path.exists(f"/proc/self/fd/{fd}") for fd in fds) == 2


def test_the_descriptors_of_what_is_lent_for_long_are_closed(lender: SegmentLender) -> None:
    before = open_segments()
    kept, waiting, most = [], [], 0
    for k in range(40):
        reader = Reader(lender, 0)
        reader.open(lender.put([data(k)], (0,)))
        kept.append(reader)
        lender.trim(waiting.append)  # their orders have been sent ...
        most = max(most, len(lender._lent) + len(lender._leaving))
        if k % 8 == 7:  # ... and now and then they are known to have come
            while waiting:
                waiting.pop()()
    assert len(lender._lent) <= 17 and most <= 32
    assert [reader.values[0][0] for reader in kept] == list(range(40))
    for reader in kept:
        reader.give_back()
    assert open_segments() <= before + 2 * 4


def test_what_is_beyond_the_bounds_is_copied_and_as_whole(
    lender: SegmentLender, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lending, "_MAX_OPEN", 2)
    monkeypatch.setattr(segments, "_MAX_OPEN", 1)
    source = bytearray(data(1))
    puts = [lender.put([memoryview(source)], (0,)) for _ in range(3)]
    source[:] = bytes(LARGE)
    assert [len(found) for _, found, _ in puts] == [1, 1, 0] and puts[2][0] == [data(1)]
    reader = SegmentReader()
    mapped = reader.open(ME, *puts[0])[0]
    read = reader.open(ME, *puts[1])[0]
    assert read[:] == data(1) == mapped[:] and reader.unmapped(ME) == (puts[1][2], [])
    lender.close()
    assert lender.put([data(1)], (0,)) == ([data(1)], [], [])


def test_what_waits_to_be_filled_again_makes_room_where_memory_is_short(
    lender: SegmentLender, monkeypatch: pytest.MonkeyPatch
) -> None:
    puts = [lender.put([data(k)], (0,)) for k in range(3)]
    for _, _, loans in puts:
        lender.returned(0, loans)
    room = iter((False, False, True, False, False))

    def short(size: int) -> Any:
        if not next(room):
            raise OSError("no memory")
        return segments.new_segment(size)

    monkeypatch.setattr(lending, "new_segment", short)
    assert lender.put([data(1, 4 * LARGE)], (0,))[1] and len(lender._free) == 1
    assert not lender.put([data(1, 4 * LARGE)], (0,))[1] and not lender._free


def test_what_could_not_be_mapped_is_returned(lender: SegmentLender) -> None:
    reader = SegmentReader()
    frames, found, loans = lender.put([data(1), data(2)], (0,))
    with pytest.raises(OSError):
        reader.open(ME, frames, [found[0], (1, 1 << 20, LARGE)], loans)
    assert sorted(reader.unmapped(ME)[0]) == loans
