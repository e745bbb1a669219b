"""An interrupt at a debugger's prompt ends the prompt: the ranks stay where they stopped, and are found again."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import monarch_lab as ml
from monarch_lab.controller import spmd
from monarch_lab.controller.debugging import debug, post_mortem
from monarch_lab.controller.spmd import SpmdCell, run_spmd
from monarch_lab.controller.spmd_async import start_spmd
from monarch_lab.errors import DetachedError, UsageRuntimeError
from tests.fakes.typist import Typist, typing


@pytest.fixture
def typist(cell: Any) -> Iterator[Typist]:
    with typing(cell, interrupt(cell, 2)) as front:
        yield front


def interrupt(cell: Any, count: int) -> Any:
    """At the prompt, once so many ranks have stopped."""
    return lambda prompt: KeyboardInterrupt if len(cell.client.prompts) >= count else "!0"


@ml.remote
def stops(t: Any) -> Any:
    inside = t + 41
    breakpoint()
    return inside + 1


@ml.remote(propagate=lambda t: t.clone())
def stops_later(t: Any) -> Any:
    inside = t + 41
    breakpoint()
    return inside + 1


@ml.remote
def fails(t: Any) -> Any:
    raise ValueError("broken")


WAITS = r"ranks 0, 1 wait in the debugger at .*:\d+: %mesh debug goes on there, %mesh interrupt ends what has stopped"


def test_the_ranks_stay_and_their_values_come_when_they_go_on(cell: Any, typist: Typist) -> None:
    one = torch.ones(2)
    known = one + 1  # so that the one below waits for nothing
    y = stops_later(known - 1)
    with pytest.raises(KeyboardInterrupt, match=WAITS):
        cell.sync()
    cell.client.stop_cell()  # what the end of an interrupted cell does
    z = y + 1
    with pytest.raises(DetachedError, match="ranks 0, 1 wait in the debugger"):
        cell.sync()  # the next cell does not hang
    typist.line = "c all"
    debug(cell, None)
    assert ml.inspect(y).tolist() == [43, 43] and ml.inspect(z).tolist() == [44, 44]
    assert len(cell.client.prompts) == 0


def test_a_call_that_the_cell_itself_waits_for_is_left_too(cell: Any, typist: Typist) -> None:
    one = torch.ones(3)
    with pytest.raises(KeyboardInterrupt, match=WAITS):
        stops(one)
    cell.client.stop_cell()
    with pytest.raises(KeyboardInterrupt, match=WAITS):
        debug(cell, None)  # as often as one likes
    typist.line = lambda prompt: "c all" if "42" in prompt.text else "p inside"
    debug(cell, None)
    assert "tensor([42., 42., 42.])" in typist.text
    assert (one + 1).tolist() == [2, 2, 2]


def test_an_spmd_cell_is_left_and_the_next_one_does_not_hang(cell: Any, typist: Typist) -> None:
    typist.line = KeyboardInterrupt
    stopping = SpmdCell("kept = rank\nbreakpoint()\nkept += 1\n", "left.py", (1,))
    with pytest.raises(KeyboardInterrupt, match="rank 1 waits in the debugger at left.py:3"):
        run_spmd(cell, stopping)
    with pytest.raises(DetachedError, match="rank 1 waits in the debugger at left.py:3"):
        run_spmd(cell, SpmdCell("kept", "next.py", (0, 1)))
    typist.line = "c"
    debug(cell, "1")
    assert run_spmd(cell, SpmdCell("kept", "after.py", (1,))).shown == {1: "2"}


def test_other_ranks_run_cells_while_one_stands_in_the_debugger(
    cell: Any, typist: Typist, monkeypatch: pytest.MonkeyPatch
) -> None:
    reduced = "s = torch.ones(1)\ndist.all_reduce(s)\ns.item()\n"
    run_spmd(cell, SpmdCell(reduced, "before.py", (0, 1)))
    typist.line = KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt, match="rank 1 waits"):
        run_spmd(cell, SpmdCell(f"kept = 3\nif rank: breakpoint()\n{reduced}", "left.py", (0, 1)))
    typist.line = "c"
    debug(cell, None)
    # The group is the one it was: nothing of it has to be formed again.
    assert run_spmd(cell, SpmdCell(reduced, "again.py", (0, 1))).shown == {0: "2.0", 1: "2.0"}
    typist.line = KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt, match="rank 1 waits"):
        run_spmd(cell, SpmdCell("if rank: breakpoint()\nkept += 1\n", "left.py", (0, 1)))
    assert run_spmd(cell, SpmdCell("kept", "other.py", (0,))).shown == {0: "4"}
    monkeypatch.setattr(spmd, "_TELL_S", 0.1)
    run_spmd(cell, SpmdCell("import time\ntime.sleep(0.5)", "slow.py", (0,)))
    assert "who meets it in a collective waits until it goes on (%mesh debug)" in typist.told[-1]
    typist.line = "q"
    debug(cell, None)
    assert run_spmd(cell, SpmdCell(reduced + "kept", "after.py", (0, 1))).shown == {0: "4", 1: "3"}


def test_a_cell_that_is_not_waited_for_has_its_result_when_it_goes_on(cell: Any, typist: Typist) -> None:
    typist.line = KeyboardInterrupt
    stopping = SpmdCell("breakpoint()\nrank + 5\n", "async.py", (1,))
    handle = start_spmd(cell, stopping, lambda ended: None)
    with pytest.raises(KeyboardInterrupt, match="rank 1 waits in the debugger at async.py:"):
        handle.result()
    with pytest.raises(DetachedError, match="rank 1 waits in the debugger at async.py:"):
        handle.result()
    with pytest.raises(
        UsageRuntimeError, match=r"rank 1 waits in the debugger at async.py:[0-9]: .*; this one did not run"
    ):
        run_spmd(cell, SpmdCell("1", "next.py", (0,)))
    assert not handle.done()
    typist.line = "c"
    debug(cell, None)
    assert handle.result(30) == {1: "6"}


def test_a_future_that_was_left_has_its_value_when_the_rank_goes_on(cell: Any, typist: Typist) -> None:
    def number() -> int:
        breakpoint()
        return 7

    typist.line = KeyboardInterrupt
    future = ml.call_on_shard_and_fetch(number, shard={"gpu": 1})
    with pytest.raises(KeyboardInterrupt, match="rank 1 waits"):
        future.result()
    with pytest.raises(DetachedError, match="rank 1 waits"):
        future.result()
    typist.line = "c"
    debug(cell, None)
    assert future.result(30) == 7


@ml.remote_autograd_function
class Stops(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x * 3

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        breakpoint()
        return g * 3


def test_a_pass_that_was_left_before_a_hook_of_the_notebook_ends_without_it(cell: Any, typist: Typist) -> None:
    x = torch.ones(2, requires_grad=True)
    heard: list[Any] = []
    x.register_hook(heard.append)
    with pytest.raises(KeyboardInterrupt, match=WAITS):
        Stops.apply(x * 1).sum().backward()
    typist.line = "c all"
    debug(cell, None)
    assert (torch.ones(2) + 1).tolist() == [2, 2] and heard == []  # nobody hangs


def test_an_interrupt_that_nobody_is_asked_in_ends_those_who_were_left(cell: Any, typist: Typist) -> None:
    known = torch.ones(2) + 1
    y = stops_later(known)
    with pytest.raises(KeyboardInterrupt):
        cell.sync()
    later = y + 1
    cell.client.stop_cell()  # a cell of its own was interrupted
    assert len(cell.client.prompts) == 0
    with pytest.raises(ml.RemoteException, match="the debugger was interrupted, so this call has no result"):
        ml.inspect(later)


def test_what_the_user_takes_to_answer_counts_for_no_time_out(cell: Any, typist: Typist) -> None:
    def think(prompt: Any) -> str:
        time.sleep(1.2)
        return "c"

    def number() -> int:
        breakpoint()
        return 7

    typist.line = think
    assert ml.call_on_shard_and_fetch(number, shard={"gpu": 1}).result(1) == 7


def test_a_post_mortem_ends_with_its_prompt(cell: Any, typist: Typist) -> None:
    with pytest.raises(ml.RemoteException, match="broken"):
        fails(torch.ones(2))
    typist.line = KeyboardInterrupt
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt, match="the post-mortem has ended: %mesh pm begins it again"):
            post_mortem(cell, None)
        assert len(cell.client.prompts) == 0
