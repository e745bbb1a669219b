"""Lines of workers, on their way to a cell; the cell itself is tests/notebook/test_in_kernel.py's."""

from __future__ import annotations

import io
import sys

import pytest

from monarch_lab.notebook.output import Front
from monarch_lab.notebook.screen import LONGEST_LINE


class Terminal:
    """A shell without a kernel."""


@pytest.fixture
def front() -> Front:
    return Front(Terminal())


def shown(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().out


def test_each_line_has_its_workers_label(front: Front, capsys: pytest.CaptureFixture[str]) -> None:
    with front.cell(1):
        front.output(1, 0, "0.0", "stdout", "one\ntwo\n")
        front.output(1, 1, "0.1", "stdout", "three\n")
        assert shown(capsys) == "[0.0] one\n[0.0] two\n[0.1] three\n"


def test_pieces_of_a_line_are_one_line_and_ranks_do_not_mix(front: Front, capsys: pytest.CaptureFixture[str]) -> None:
    with front.cell(1):
        front.output(1, 0, "0.0", "stdout", "a")
        front.output(1, 1, "0.1", "stdout", "b")
        assert shown(capsys) == ""
        front.output(1, 0, "0.0", "stdout", "c\nd")
        assert shown(capsys) == "[0.0] ac\n"
    assert shown(capsys) == "[0.0] d\n[0.1] b\n"


def test_streams_are_kept_apart(front: Front, capsys: pytest.CaptureFixture[str]) -> None:
    with front.cell(1):
        front.output(1, 0, "0.0", "stderr", "careful\n")
    assert capsys.readouterr() == ("", "[0.0] careful\n")


@pytest.mark.parametrize(
    ("pieces", "line"),
    [
        (["\r 10%", "\r 20%", "\r100%\n"], "100%"),
        (["windows\r\n"], "windows"),
        (["windows\r", "\n"], "windows"),
        (["\r 10%", "\r 20%"], " 20%"),
    ],
)
def test_of_a_rewritten_line_the_last_version_is_shown(
    front: Front, capsys: pytest.CaptureFixture[str], pieces: list[str], line: str
) -> None:
    with front.cell(1):
        for piece in pieces:
            front.output(1, 0, "0.0", "stdout", piece)
    assert shown(capsys) == f"[0.0] {line}\n"


def test_a_line_without_end_does_not_fill_the_memory(front: Front, capsys: pytest.CaptureFixture[str]) -> None:
    with front.cell(1):
        front.output(1, 0, "0.0", "stdout", "x" * (LONGEST_LINE + 1))
        assert len(shown(capsys)) > LONGEST_LINE


def test_late_output_goes_to_the_streams_its_cell_began_with(
    front: Front, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    captured = io.StringIO()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", captured)
        with front.cell(1):
            pass
    with front.cell(2):
        front.output(1, 0, "0.0", "stdout", "late\n")
        front.output(2, 0, "0.0", "stdout", "now\n")
    assert captured.getvalue() == "[0.0] late\n"
    assert shown(capsys) == "[0.0] now\n"


def test_what_no_cell_caused_goes_to_the_cell_that_runs(front: Front, capsys: pytest.CaptureFixture[str]) -> None:
    front.move_here()
    front.output(0, 0, "0.0", "stdout", "hello\n")
    assert shown(capsys) == "[0.0] hello\n"


def test_each_mesh_counts_its_own_cells(front: Front) -> None:
    class Client:
        front = None

    one, two = Client(), Client()
    assert front.for_client(one) is front.for_client(one) is one.front
    assert front.for_client(two) is not front.for_client(one)
