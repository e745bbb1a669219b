"""The text of many ranks as one, without a kernel."""

from __future__ import annotations

import random

import pytest

from monarch_lab.notebook.folding import folded, label_of, text_of
from monarch_lab.notebook.output_html import html
from monarch_lab.notebook.screen import Screen
from monarch_lab.wire.engine import OutputTail


def screens(*texts: str) -> dict[int, Screen]:
    """What each rank wrote to stdout."""
    made = {rank: Screen(f"{rank // 4}.{rank % 4}") for rank in range(len(texts))}
    for rank, text in enumerate(texts):
        made[rank].write("stdout", text)
    return made


def shown(made: dict[int, Screen]) -> list[str]:
    labels = {rank: screen.label for rank, screen in made.items()}
    rows = folded({rank: screen.shown_lines() for rank, screen in made.items()})
    return [f"[{label_of(row.ranks, labels)}] {text_of(row, labels)}" for row in rows]


def test_ten_ranks_that_print_their_number_are_ten_lines() -> None:
    assert shown(screens(*map(str, range(10)))) == [f"[{r // 4}.{r % 4}] {r}" for r in range(10)]


def test_equal_lines_are_one_and_the_others_stay_between_them_in_the_order_of_the_ranks() -> None:
    made = screens(*(f"begin\nloss 0.{rank}\n{'odd' if rank == 2 else 'step'}\n\nend\n" for rank in range(4)))
    assert shown(made) == [
        "[0.0-0.3] begin",
        "[0.0] loss 0.0",
        "[0.1] loss 0.1",
        "[0.2] loss 0.2",
        "[0.2] odd",
        "[0.3] loss 0.3",
        "[0.0-0.1,0.3] step",
        "[0.0-0.3] ",
        "[0.0-0.3] end",
    ]
    assert shown(screens("a 1\n", "a 1 \n")) == ["[0.0] a 1", "[0.1] a 1 "]


def test_each_ranks_lines_keep_their_order_and_number() -> None:
    numbers = random.Random(0)
    texts = ["".join(f"{numbers.randrange(6)}\n" for _ in range(numbers.randrange(40))) for _ in range(7)]
    made = screens(*texts)
    rows = folded({rank: screen.shown_lines() for rank, screen in made.items()})
    for rank, text in enumerate(texts):
        assert [row.line.text for row in rows if rank in row.ranks] == text.split("\n")[:-1]


def test_much_that_is_equal_and_out_of_step_does_not_take_long() -> None:
    made = screens("a\n" + "x\n" * 1000 + "end\n", "b\n" + "x\n" * 999 + "end\n")
    assert shown(made)[-1] == "[0.0-0.1] end" and len(shown(made)) <= 2002


@pytest.mark.parametrize(
    ("pieces", "lines"),
    [
        (["\r 10%", "\r 20%", "\r100%\n", "after"], ["100%", "after"]),
        (["windows\r\n", "one\r", "\ntwo"], ["windows", "one", "two"]),
        (
            ["outer 0%", "\n\r inner 0%\x1b[A", "\n\r inner 50%\x1b[A", "\router 50%", "\n\r     \r\x1b[A", "\n"],
            ["outer 50%"],
        ),
        (["a", "b\n\nc"], ["ab", "", "c"]),
        (["abc\rxy", "z"], ["xyz"]),
        (["x" * 70_000], ["x" * 70_000]),
    ],
)
def test_a_screen_shows_what_a_terminal_would(pieces: list[str], lines: list[str]) -> None:
    screen = Screen("0.0")
    for piece in pieces:
        screen.write("stderr", piece)
    assert [line.text for line in screen.shown_lines()] == lines


def test_streams_keep_lines_of_their_own_in_the_order_they_began() -> None:
    screen = Screen("0.0")
    for stream, text in [("stdout", "a"), ("stderr", "b\n"), ("stdout", "c\n"), ("stderr", "d")]:
        screen.write(stream, text)
    assert [(line.stream, line.text) for line in screen.shown_lines()] == [
        ("stdout", "ac"),
        ("stderr", "b"),
        ("stderr", "d"),
    ]


def test_bars_are_merged_by_name_and_nothing_else_that_is_rewritten() -> None:
    made = screens(*(f"\rtrain:  {n}%|█| {n}/100" for n in (40, 30, 52)))
    assert shown(made) == ["[0.0-0.2] train:  30%|█| 30/100 (slowest 0.1; fastest 0.2: 52%)"]
    made = screens("\r5/10 files\n", "\r7/10 files\n")
    assert shown(made) == ["[0.0-0.1] 5/10 files (slowest 0.0; fastest 0.1: 7/10)"]
    assert shown(screens("\rtrain: 5%", "\rtest: 5%")) == ["[0.0] train: 5%", "[0.1] test: 5%"]
    assert shown(screens("\rstep 5", "\rstep 6", "\rstep 6")) == ["[0.0] step 5", "[0.1-0.2] step 6"]
    assert shown(screens("30% done\n", "40% done\n")) == ["[0.0] 30% done", "[0.1] 40% done"]  # no bar: not rewritten


def test_the_tail_stands_below_what_is_left_out() -> None:
    [made] = screens("first\n").values()
    made.tail = OutputTail(1, 1200, "/logs/all.txt", "", [("stdout", "last")])
    assert [line.text for line in made.shown_lines()] == [
        "first",
        "… 1,200 lines are left out; all of them are in /logs/all.txt",
        "last",
    ]
    made.tail = OutputTail(1, 0, "", "the file cannot be written", [("stdout", "last")])
    assert [line.text for line in made.shown_lines()][1] == "… the file cannot be written"


def test_html_is_safe_and_keeps_colours() -> None:
    made = screens("<b>\x1b[1;31mred\x1b[0m\x1b[K\x1b]0;title\x07 &\x1b[38;5;3mx\n", "<b>")
    rows = folded({rank: screen.shown_lines() for rank, screen in made.items()})
    text = html(rows, {0: "0.0", 1: "0.1"})
    assert "&lt;b&gt;" in text and "<b>" not in text and "\x1b" not in text and "title" not in text
    assert '<span style="font-weight: bold; color: #e75c58">red</span> &amp;' in text
    assert html([], {}) == ""
