"""Ranks of a ``%%spmd`` cell that wait for one another in vain are told of and freed; who may go on is left alone."""

from __future__ import annotations

import itertools
import time
from typing import Any

import pytest

from monarch_lab.controller.spmd import SpmdCell, run_spmd
from monarch_lab.controller.stall_watch import StallWatch
from monarch_lab.controller.stalls import Rank, stalled
from monarch_lab.controller.waiting import Pending
from monarch_lab.errors import RemoteException
from monarch_lab.wire.looking import Collective, Looked, ThreadStack
from tests.fakes.typist import typing

_numbers = itertools.count()
REDUCED = "t = torch.ones(1)\ndist.all_reduce(t)\nt.item()"


def run(mesh: Any, source: str, ranks: tuple[int, ...] | None = None) -> list[str]:
    cell = SpmdCell(source, f"<stalled cell {next(_numbers)}>", ranks or mesh.ranks_key)
    return list(run_spmd(mesh, cell).shown.values())


@pytest.mark.parametrize(
    ("body", "told", "ranks"),
    [
        (
            "if rank == 0:\n    dist.all_reduce(torch.ones(2))",
            r"rank 0 in all_reduce \(2 × float\) waited for rank 1, which had ended the cell or does not run it: "
            r"rank 0 waited in line 2 \(dist.all_reduce\(torch.ones\(2\)\)\)",
            (0,),
        ),
        (
            "if rank == 0:\n    dist.all_reduce(torch.ones(2))\nelse:\n    dist.broadcast(torch.ones(2), 1)\n"
            "    dist.barrier()",
            r"wait for one another: rank 0 in all_reduce; rank 1 in b",
            (0, 1),
        ),
        (
            "group = dist.new_group([0, 1])\nif rank:\n    dist.barrier(group)",
            r"rank 1 in barrier waited for rank 0",
            (1,),
        ),
        (
            "if rank:\n    dist.destroy_process_group()\n    dist.init_process_group('gloo')",
            r"rank 1 in init_process_group waited for rank 0.*line 3 \(dist.init_process_group\('gloo'\)\)",
            (1,),
        ),
        ("if rank:\n    dist.new_group([0, 1])", r"rank 1 in new_group waited for rank 0", (1,)),
        (  # torch counts those as well in a group's number, and not in that of a collective
            "t = torch.ones(2)\nfor _ in range(3):\n    (dist.recv if rank else dist.send)(t, 1 - rank)\n"
            "if rank == 0:\n    dist.all_reduce(t)",
            r"rank 0 in all_reduce \(2 × float\) waited for rank 1",
            (0,),
        ),
    ],
)
def test_a_wait_for_ranks_that_will_not_come_is_ended_and_told(
    mesh: Any, body: str, told: str, ranks: tuple[int, ...]
) -> None:
    run(mesh, "kept = rank")
    with pytest.raises(RuntimeError, match=told) as e:  # half an hour before the group's own time-out
        run(mesh, body)
    assert (
        isinstance(e.value, RemoteException) and e.value.ranks == ranks and "new default process group" in str(e.value)
    )
    assert run(mesh, f"assert kept == rank\n{REDUCED}") == ["2.0", "2.0"]


def test_a_cell_on_some_ranks_cannot_wait_for_the_others(mesh: Any) -> None:
    run(mesh, "pass")
    with pytest.raises(RuntimeError, match=r"rank 1 in barrier waited for rank 0, which .* does not run it"):
        run(mesh, "dist.barrier()", (1,))
    assert run(mesh, REDUCED) == ["2.0", "2.0"]


def test_a_slow_rank_is_waited_for_and_what_was_begun_before_the_end_counts(mesh: Any) -> None:
    slow = "import time\nif rank:\n    time.sleep(3)\n"
    assert run(mesh, slow + REDUCED) == ["2.0", "2.0"]
    # Rank 1 has ended the cell, and its part of the collective goes on without it.
    body = (
        "s = torch.ones(1)\nwork = dist.all_reduce(s, async_op=True)\nif rank == 0:\n    work.wait()\n    time.sleep(2)"
    )
    run(mesh, "import time\n" + body)
    assert run(mesh, "work.wait()\ns.item()") == ["2.0", "2.0"]


# the rules


def rank(*waits: Collective, begun: int = 0, same_for_s: float = 5.0, file: str = "cell") -> Rank:
    return Rank(Looked(0, [ThreadStack("main", [(file, 1, "f", "")], True)], list(waits), {"0": begun}), same_for_s)


def at(number: int, name: str = "all_reduce", elements: int = 2, dtype: str = "Float", members: Any = (0, 1, 2)) -> Any:
    return Collective(name, "0", list(members), number, [elements], [dtype])


def test_who_waits_for_a_rank_that_computes_is_not_stuck_nor_who_waits_for_that_one() -> None:
    a, b = rank(at(3), begun=3), rank(at(3), begun=3)
    assert stalled({0: a, 1: b, 2: rank(begun=2)}, {}, 1.0) == ("", set())
    assert stalled({0: a, 1: b}, {2: {"0": 3}}, 1.0) == ("", set())  # begun there, and on its way
    wrong, stuck = stalled({0: a, 1: b}, {2: {"0": 2}}, 1.0)
    assert stuck == {0, 1} and wrong.startswith("ranks 0, 1 in all_reduce (2 × float) waited for rank 2")
    assert stalled({0: a, 1: b}, {2: {}}, 1.0)[1] == {0, 1}  # its group is gone
    assert stalled({0: rank(at(3), begun=3, same_for_s=0.1), 1: b}, {2: {"0": 2}}, 1.0)[1] == {1}
    assert stalled({0: a, 1: b, 2: rank(at(3), begun=3)}, {}, 1.0) == ("", set())  # it takes its time
    chained = {0: rank(at(1, members=(0, 1)), begun=1), 1: rank(at(1, members=(1, 2)), begun=0), 2: rank(begun=0)}
    assert stalled(chained, {}, 1.0) == ("", set())
    assert stalled({0: chained[0], 1: chained[1]}, {2: {"0": 0}}, 1.0)[1] == {0, 1}


@pytest.mark.parametrize(
    "other", [at(3, "broadcast"), at(3, elements=5), at(3, dtype="Int")], ids=["name", "elements", "dtype"]
)
def test_different_collectives_in_one_place_are_told(other: Collective) -> None:
    wrong, stuck = stalled({0: rank(at(3), begun=3), 1: rank(other, begun=3), 2: rank(at(3), begun=3)}, {}, 1.0)
    assert stuck == {0, 1, 2} and wrong.startswith("the ranks are in different calls")


def test_a_wait_that_torch_does_not_record_is_ended_later_and_only_where_ranks_have_ended() -> None:
    recv = rank(file="/x/torch/distributed/distributed_c10d.py", same_for_s=20.0)
    assert stalled({0: recv}, {1: {"0": 0}}, 1.0) == ("nobody is left whom rank 0 could wait for", {0})
    assert stalled({0: recv, 1: recv}, {}, 1.0) == ("", set())
    assert stalled({0: recv, 1: rank()}, {2: {"0": 0}}, 1.0) == ("", set())
    assert stalled({0: rank(file="/x/torch/distributed/a.py")}, {1: {"0": 0}}, 1.0) == ("", set())


IN_A_GROUP = "import datetime, os, time\nmine = dist.new_group([0, 1], timeout=datetime.timedelta(seconds=1))\n"


def test_a_time_out_of_the_users_group_ends_a_wait_that_the_cell_may_catch(mesh: Any, tmp_path: Any) -> None:
    there = str(tmp_path / "given_up")
    body = f"""
if rank == 0:
    try:
        dist.all_reduce(torch.ones(1), group=mine)
    finally:
        open({there!r}, "w").close()
while not os.path.exists({there!r}): time.sleep(0.02)
"""
    told = r"rank 0 waited for more than the 1 s of the group in all_reduce: rank 0 waited in line 6"
    with pytest.raises(RuntimeError, match=told):
        run(mesh, IN_A_GROUP + body)
    assert run(mesh, REDUCED) == ["2.0", "2.0"]


def test_a_stop_in_the_debugger_longer_than_the_time_out_of_a_group_ends_no_wait(mesh: Any) -> None:
    def think(prompt: Any) -> str:
        time.sleep(2.5)
        return "c"

    body = "if rank: breakpoint()\nt = torch.ones(1)\ndist.all_reduce(t, group=mine)\nt.item()"
    with typing(mesh, think) as front:
        assert run(mesh, IN_A_GROUP + body) == ["2.0", "2.0"]
    assert len(front.asked) == 1


def test_who_has_ended_the_cell_and_does_not_answer_is_not_waited_for() -> None:
    """Its process may be stopped; what it said as it ended serves then."""
    asked: list[Pending] = []

    class Client:
        alive = (0, 1)

        def ask_aside(self, make: Any, ranks: Any) -> Pending:
            asked.append(Pending(ranks))
            return asked[-1]

    watch = StallWatch(Client(), 0.0)
    found: tuple[str, set[int]] = ("", set())
    for quarter in range(60):
        found = watch.look({0}, {1: {"0": 5}}, quarter / 4)
        if found[1]:
            break
        if asked:
            asked[-1].fill(0, rank(at(6, members=(0, 1)), begun=6).told, [])
    assert found[1] == {0} and "waited for rank 1" in found[0]
    assert len(asked) == 2 and not any(one.done for one in asked)
