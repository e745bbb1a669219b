from __future__ import annotations

from pathlib import Path

import pytest

from monarch_lab.errors import UsageValueError
from monarch_lab.session.logs import LogFile, LogReader, compiled, files_of


def reader_of(*paths: Path, grep: str | None = None) -> LogReader:
    return LogReader([LogFile(n, f"0.{n}", str(path)) for n, path in enumerate(paths)], compiled(grep))


def test_the_end_of_each_file_is_shown_with_its_worker(tmp_path: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    first.write_text("one\ntwo\nthree\n")
    second.write_text("four\r\nfive")
    assert list(reader_of(first, second).last(2)) == ["[0.0] two", "[0.0] three", "[0.1] four", "[0.1] five"]
    assert len(list(reader_of(first, second, tmp_path / "none").last(0))) == 5


def test_a_pattern_chooses_lines_before_they_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_text("".join(f"line {n}\n" for n in range(100_000)))
    assert list(reader_of(path, grep="7$").last(2)) == ["[0.0] line 99987", "[0.0] line 99997"]
    with pytest.raises(UsageValueError, match=r"--grep: '\(' is no pattern"):
        compiled("(")


def test_what_is_written_later_follows_in_whole_lines(tmp_path: Path) -> None:
    path, late = tmp_path / "a", tmp_path / "late"
    path.write_text("before\nbeg")
    reader = reader_of(path, late)
    assert list(reader.last(0, to_the_end=False)) == ["[0.0] before"]
    steps = iter(["un\nmore", " and\nlast", ""])

    def wait() -> bool:
        step = next(steps)
        with path.open("a") as file:
            file.write(step)
        late.write_text("new\n")
        return step != ""

    followed = list(reader.follow(wait))
    assert followed == ["[0.0] begun", "[0.1] new", "[0.0] more and", "[0.0] last"]


def test_a_file_without_line_ends_is_shown_in_pieces(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"x" * 500_000)
    lines = list(reader_of(path).last(0))
    assert sum(line.count("x") for line in lines) == 500_000 and max(map(len, lines)) < 200_000


def test_files_are_those_of_the_ranks_and_only_where_there_are_any() -> None:
    processes = [(0, "0.0", "/l/0.out", "/l/0.err"), (1, "0.1", "/l/1.out", "/l/1.err"), (2, "0.2", "", "")]
    assert [file.label for file in files_of(processes)] == ["0.0", "0.0 stderr", "0.1", "0.1 stderr"]
    assert [file.path for file in files_of(processes, [1, 2])] == ["/l/1.out", "/l/1.err"]
