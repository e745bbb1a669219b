"""What is kept of a failure on a worker, for %mesh pm."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from monarch_lab.worker import post_mortem
from monarch_lab.worker.post_mortem import LastFailure


def failing(error: BaseException) -> BaseException:
    rows = torch.ones(1000)
    views = [rows[1:], rows.view(10, 100)]  # of one memory: counted once
    try:
        raise error
    except type(error) as caught:
        del views
        return caught


def test_the_last_failure_is_kept_with_its_frames_until_the_next_or_until_it_is_forgotten() -> None:
    last = LastFailure()
    assert (last.cell, last.trace) == (0, None)
    last.note(failing(ValueError("first\nsecond line")), 3)
    assert (last.cell, last.text) == (3, "ValueError: first")
    assert last.trace is not None and "rows" in last.trace.tb_frame.f_locals
    held = weakref.ref(last.trace.tb_frame.f_locals["rows"])
    last.note(RuntimeError("no Python frames"), 4)
    assert last.trace is None and last.text.endswith(
        "raised by an op of torch, which has no Python frames on the worker"
    )
    gc.collect()
    assert held() is None
    last.note(failing(ValueError("third")), 0)
    assert (last.cell, last.trace is None) == (1, False)  # outside of cells counts as a failure too
    last.forget()
    assert (last.cell, last.text, last.trace) == (0, "", None)


def test_of_frames_that_hold_too_much_only_the_text_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    last = LastFailure()
    monkeypatch.setattr(post_mortem, "MAX_KEPT_BYTES", 4 * 1000)
    last.note(failing(ValueError("fits")), 1)
    assert last.trace is not None
    monkeypatch.setattr(post_mortem, "MAX_KEPT_BYTES", 4 * 1000 - 1)
    last.note(failing(ValueError("large")), 2)
    assert last.trace is None and last.text.startswith("ValueError: large: its frames held 0 MiB of tensors")


def test_of_an_interrupt_nothing_is_kept() -> None:
    last = LastFailure()
    last.note(failing(KeyboardInterrupt()), 2)
    assert (last.trace, last.text) == (None, "KeyboardInterrupt: nothing is kept of its frames")
