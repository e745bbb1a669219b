"""Logging on the workers, and values shown."""

from __future__ import annotations

import base64
import logging
import re
import zlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

import monarch_lab as ml
from monarch_lab.controller.showing import as_pixels, png


@pytest.fixture
def logged(cell: Any, capsys: pytest.CaptureFixture[str]) -> Callable[[], list[str]]:
    """The lines that came since, without the ranks, in order of their text."""

    def lines() -> list[str]:
        cell.sync()
        found: list[str] = []
        for _ in range(50):
            out = capsys.readouterr()
            found += re.findall(r"(?:WARNING|INFO|ERROR|DEBUG|Level \d+): .*", out.out + out.err)
            if found and not len(found) % 2:
                break
            ml.inspect(torch.ones(1))
        return sorted(found)

    ml.builtins.set_logging_level_remote("WARNING")
    return lines


def test_a_message_is_a_warning_by_default_and_comes_from_each_process(logged: Any) -> None:
    ml.builtins.log_remote("hello")
    assert logged() == ["WARNING: hello"] * 2


def test_arguments_are_put_in_there(logged: Any, cell: Any) -> None:
    ml.builtins.log_remote("rank %d of %s", cell.rank("gpu"), "two")
    assert logged() == ["WARNING: rank 0 of two", "WARNING: rank 1 of two"]


def test_the_level_says_what_is_let_through(logged: Any) -> None:
    ml.builtins.set_logging_level_remote(logging.ERROR)
    ml.builtins.log_remote("not this")
    ml.builtins.log_remote("this", level=logging.ERROR)
    assert logged() == ["ERROR: this"] * 2
    ml.builtins.set_logging_level_remote("INFO")
    ml.builtins.log_remote("now this", level=logging.INFO)
    assert logged() == ["INFO: now this"] * 2


def test_a_level_of_ones_own(logged: Any) -> None:
    ml.builtins.log_remote("odd", level=35)
    assert logged() == ["Level 35: odd"] * 2


def test_a_message_again_is_logged_again_and_nothing_waits(logged: Any, cell: Any) -> None:
    ml.builtins.log_remote("same")
    before = cell.client.cache.misses
    ml.builtins.log_remote("same")
    assert cell.client.cache.misses == before
    assert logged() == ["WARNING: same"] * 4


def test_an_image_is_drawn(cell: Any) -> None:
    image = torch.linspace(0, 1, 64).reshape(8, 8) + cell.rank("gpu") * 0
    shown = ml.show({"a": image}, gpu=1)
    data = base64.b64decode(re.search(r"base64,([^\"]+)", shown._repr_html_()).group(1))  # type: ignore[union-attr]
    assert data.startswith(b"\x89PNG") and torch.equal(shown.values[0], ml.inspect(image))
    size = int.from_bytes(data[33:37], "big")
    rows = zlib.decompress(data[41 : 41 + size])
    assert rows[0] == 0 and rows[1] == 0 and rows[8] > 0 and rows[-1] == 255 and len(rows) == 8 * 9


@pytest.mark.parametrize(
    ("shape", "found"), [((9, 8), (9, 8, 1)), ((3, 9, 8), (9, 8, 3)), ((9, 8, 4), (9, 8, 4)), ((1, 9, 8), (9, 8, 1))]
)
def test_shapes_of_images(shape: Any, found: Any) -> None:
    pixels = as_pixels(torch.rand(shape))
    assert pixels is not None and pixels.shape == found and png(pixels)[:4] == b"\x89PNG"


def test_what_is_no_image_is_no_picture() -> None:
    for value in (torch.rand(3), torch.rand(2, 2), torch.rand(5, 9, 9), torch.ones(9, 9, dtype=torch.int64)):
        assert as_pixels(value) is None
    scaled = as_pixels(torch.full((8, 8), 4.0))
    assert scaled is not None and int(scaled.max()) == 255
    assert as_pixels(torch.full((8, 8), 7, dtype=torch.uint8)).max() == 7  # type: ignore[union-attr]


def test_other_values_are_tables_and_text(cell: Any) -> None:
    shown = ml.show([torch.arange(40).reshape(2, 20), torch.ones(2, 2, 2), torch.rand(30, 2)])
    text = shown._repr_html_()
    assert "<td>39</td>" in text and "(2, 20) int64" in text and "(2, 2, 2)" in text and "…" in text
    assert "tensor(" in repr(shown)
    with pytest.raises(KeyError, match="no_such"):
        ml.show(torch.ones(1), no_such=1)
