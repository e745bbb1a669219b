from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch_lab.errors import UsageValueError
from monarch_lab.wire.ranks import parse_ranks

MESH = {"host": 2, "gpu": 4}


@pytest.mark.parametrize(
    ("text", "ranks"),
    [
        ("all", (0, 1, 2, 3, 4, 5, 6, 7)),
        ("3", (3,)),
        ("-1", (7,)),
        ("0,2-5", (0, 2, 3, 4, 5)),
        ("0:8:2", (0, 2, 4, 6)),
        ("::2", (0, 2, 4, 6)),
        ("6:", (6, 7)),
        (":-6", (0, 1)),
        ("::-1", (0, 1, 2, 3, 4, 5, 6, 7)),
        ("0:100", (0, 1, 2, 3, 4, 5, 6, 7)),
        ("-3--1", (5, 6, 7)),
        ("5, 1 ,1", (1, 5)),
        ("[0,1]", (0, 1)),
        ("gpu=0", (0, 4)),
        ("gpu=-1", (3, 7)),
        ("host=1,gpu=0:2", (4, 5)),
        ("gpu=0,2", (0, 2, 4, 6)),
        ("gpu=0,2-3,host=0", (0, 2, 3)),
        ("host=all,gpu=1", (1, 5)),
    ],
)
def test_the_grammar_names_these_ranks(text: str, ranks: tuple[int, ...]) -> None:
    assert parse_ranks(text, MESH) == ranks


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("8", r"'8': there is no rank 8; ranks are 0 to 7 \(or -8 to -1\)"),
        ("-9", "there is no rank -9; ranks are 0 to 7"),
        ("0,2-9", "there is no rank 9; ranks are 0 to 7"),
        ("gpu=4", r"there is no gpu 4; gpu is 0 to 3 \(or -4 to -1\)"),
        ("gpus=0", "no dim is named 'gpus'; did you mean gpu?"),
        ("x=0", "no dim is named 'x'; there is host, gpu"),
        ("0,gpu=1", "mixes ranks and dims"),
        ("gpu=0,gpu=1", "dim gpu is given twice; write gpu=0,2"),
        ("5-2", "5-2 runs backwards; write 2-5"),
        ("::0", "the step of ::0 is 0"),
        ("1:2:3:4", "is no slice"),
        ("a:b", "is no slice"),
        ("", "'' is no rank; write all"),
        ("0,,1", "'' is no rank"),
        ("two", "'two' is no rank"),
        ("1.5", "'1.5' is no rank"),
        ("8:", "names no rank; ranks are 0 to 7"),
        ("gpu=", "'' is no gpu"),
    ],
)
def test_what_is_no_rank_is_one_sentence_with_the_valid_range(text: str, sentence: str) -> None:
    with pytest.raises(UsageValueError, match=sentence) as raised:
        parse_ranks(text, MESH)
    assert "\n" not in str(raised.value)


def test_a_mesh_of_one_has_one_rank() -> None:
    assert parse_ranks("-1", {"host": 1, "gpu": 1}) == (0,)


@given(st.text(alphabet="0123456789-:,=[] algpuhost", max_size=12))
def test_any_text_gives_ranks_or_one_sentence(text: str) -> None:
    try:
        ranks = parse_ranks(text, MESH)
    except UsageValueError as error:
        assert "\n" not in str(error)
    else:
        assert ranks and list(ranks) == sorted(set(ranks)) and set(ranks) <= set(range(8))


@given(st.sets(st.integers(0, 3), min_size=1), st.sets(st.integers(0, 1), min_size=1))
def test_dims_choose_the_product(gpus: set[int], hosts: set[int]) -> None:
    text = f"gpu={','.join(map(str, gpus))},host={','.join(map(str, hosts))}"
    assert parse_ranks(text, MESH) == tuple(sorted(h * 4 + g for h, g in itertools.product(hosts, gpus)))
