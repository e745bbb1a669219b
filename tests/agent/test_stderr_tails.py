from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from monarch_lab.agent.stderr_tails import StderrTails


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    yield ends
    os.close(ends[0])


def test_what_a_process_prints_is_passed_on_and_its_end_kept(pipe: tuple[int, int]) -> None:
    tails = StderrTails(pipe[1])
    fd = tails.open(1)
    os.write(fd, b"one\ntwo\n")
    (source,) = tails.sources()
    assert tails.read(source)
    os.write(fd, b"".join(b"line %d\n" % n for n in range(100)))
    assert os.read(pipe[0], 8) == b"one\ntwo\n"
    assert tails.last_lines(1).splitlines() == [f"line {n}" for n in range(80, 100)]
    assert tails.last_lines(1) == "" == tails.last_lines(2)
    os.write(fd, b"a grandchild writes on\n")
    assert tails.read(source)
    os.close(fd)
    assert not tails.read(source)
    assert tails.sources() == []
    tails.close()
    os.close(pipe[1])
    with open(os.dup(pipe[0]), "rb") as rest:
        assert rest.read().endswith(b"line 99\na grandchild writes on\n")


def test_a_long_end_is_cut_to_its_last_bytes(pipe: tuple[int, int]) -> None:
    tails = StderrTails(pipe[1])
    fd = tails.open(1)
    (source,) = tails.sources()
    for _ in range(10):
        os.write(fd, b"x" * 4096)
        tails.read(source)
    assert tails.last_lines(1) == "x" * 8192
    os.close(fd)
    tails.close()
    os.close(pipe[1])


def test_a_reader_that_is_gone_costs_nothing_but_the_display() -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    tails = StderrTails(write_end)
    fd = tails.open(1)
    os.write(fd, b"last words\n")
    assert tails.last_lines(1) == "last words"
    os.close(fd)
    tails.close()
    os.close(write_end)
