"""ml.compile: a replay does what the function would do, or is refused with a sentence."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

import monarch_lab as ml
from monarch_lab.controller.recorder import handles_of
from tests.controller.compare import assert_metadata_is_true, rank_values
from tests.controller.recorded import Runs, counted, values


def test_a_handle_whose_making_was_cut_short_is_no_hindrance(cell: Any) -> None:
    x = torch.ones(3)
    half = torch.Tensor._make_wrapper_subclass(type(x), *x._meta.wrapper)  # as an interrupt leaves it in a traceback
    found = handles_of(cell.client)
    assert any(h is x for h in found) and not any(h is half for h in found)


# --- Monarch's own cases


@pytest.mark.parametrize("verify", [True, False])
def test_a_captured_tensor_is_written_at_each_call(cell: Any, verify: bool) -> None:
    a = torch.zeros(3, 4)

    @ml.compile(verify=verify)
    def step() -> Any:
        nonlocal a
        a += torch.ones(3, 4)
        return torch.ones(3, 4)

    for k in range(1, 6):
        z = step()
        assert values(a) == [[k] * 4] * 3
        assert values(z) == [[1.0] * 4] * 3


def test_arguments_are_inputs_whether_given_or_captured(cell: Any) -> None:
    a = torch.rand(3, 4)

    @ml.compile
    def given(a: Any, b: Any) -> Any:
        return 2 * a + b

    @ml.compile
    def captured(b: Any) -> Any:
        return 2 * a + b

    for _ in range(4):
        b = torch.rand(3, 4)
        want = values(2 * a + b)
        assert values(given(a, b)) == want
        assert values(captured(b)) == want


def test_a_large_literal_is_in_the_recording(cell: Any) -> None:
    numbers = list(range(300_000))
    add = ml.compile(lambda x: x + torch.tensor(numbers))
    for k in range(3):
        assert ml.inspect(add(torch.full((300_000,), k))).tolist()[-2:] == [299_998 + k, 299_999 + k]


def test_what_leaks_out_of_the_function_is_dropped(cell: Any) -> None:
    b = None

    @ml.compile(verify=False)
    def leak(c: Any) -> Any:
        nonlocal b
        b = c + 4
        return c + 1

    leak(torch.zeros(3))
    with pytest.raises(TypeError, match=r"DROPPED: this tensor was made inside .*leak"):
        b.add(4)
    with pytest.raises(TypeError, match="DROPPED"):
        torch.zeros(3) + b
    with pytest.raises(TypeError, match="DROPPED"):
        ml.inspect(b, host=0, gpu=0)


def test_one_recording_has_ops_on_two_parts_of_the_mesh(mesh: Any) -> None:
    left, right = mesh.slice(gpu=0), mesh.slice(gpu=1)
    with left.activate():
        x = torch.ones(2)
    with right.activate():
        y = torch.ones(2)

    @ml.compile
    def both(k: Any) -> Any:
        with left.activate():
            u = x + 1
            x.add_(1)
        with right.activate():
            v = y + 10
            y.add_(10)
        with left.activate():
            u = u * 2
        return u, v

    with mesh.activate():
        for turn in range(5):
            u, v = both(0)
            assert ml.inspect(u).tolist() == [2.0 * (2 + turn)] * 2
            assert ml.inspect(v).tolist() == [11.0 + 10 * turn] * 2
    assert ml.inspect(x).tolist() == [6.0] * 2 and ml.inspect(y).tolist() == [51.0] * 2


def test_what_requires_grad_is_neither_given_nor_returned(cell: Any) -> None:
    w = torch.ones(3, requires_grad=True)

    @ml.compile
    def double(x: Any) -> Any:
        return x * 2

    @ml.compile
    def give() -> Any:
        return w * 2

    with pytest.raises(TypeError, match="REQUIRES_GRAD: .*double"):
        double(w)
    with pytest.raises(TypeError, match="REQUIRES_GRAD: .*give"):
        give()
    with torch.no_grad():
        assert values(double(w)) == [2.0] * 3
        assert values(give()) == [2.0] * 3


def test_what_is_lent_or_dropped_is_so_for_a_replay_too(cell: Any) -> None:
    total, read = torch.zeros(2), torch.ones(2)

    @ml.compile
    def add() -> Any:
        total.add_(read)
        return total * 1

    for k in range(1, 4):
        assert values(add()) == [k] * 2
    side = ml.Stream("side")
    _, loan = side.borrow(total)
    with pytest.raises(TypeError, match="MUTATING_BORROW"):
        add()
    loan.drop()
    assert values(add()) == [4.0] * 2
    _, loan = side.borrow(total, mutable=True)
    with pytest.raises(TypeError, match="BORROWED"):
        add()
    loan.drop()
    assert values(add()) == [5.0] * 2
    read.drop()
    with pytest.raises(TypeError, match="DROPPED"):
        add()


# --- when it is recorded, verified, replayed


def test_python_runs_twice_and_then_no_more(cell: Any) -> None:
    double, runs = counted(lambda x: x * 2)
    for k in range(6):
        assert values(double(torch.full((2,), float(k)))) == [2.0 * k] * 2
    assert runs.count == 2


def test_without_verification_python_runs_once(cell: Any) -> None:
    count = 0

    @ml.compile(verify=False)
    def double(x: Any) -> Any:
        nonlocal count
        count += 1
        return x * 2

    for _ in range(4):
        double(torch.ones(2))
    assert count == 1


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(lambda: torch.ones(3), id="shape"),
        pytest.param(lambda: torch.ones(2, dtype=torch.float64), id="dtype"),
        pytest.param(lambda: torch.ones(2, 2)[:, 0], id="stride"),
    ],
)
def test_another_kind_of_argument_is_another_recording(cell: Any, other: Callable[[], Any]) -> None:
    double, runs = counted(lambda x: x * 2)
    for _ in range(3):
        double(torch.ones(2))
    for _ in range(3):
        found = double(other())
        assert values(found) == values(other() * 2)
        assert_metadata_is_true(found)
    assert runs.count == 4


def test_another_value_of_an_argument_or_a_global_is_another_recording(cell: Any) -> None:
    factor, flags = 2, {"negate": False}

    @ml.compile
    def scaled(x: Any, power: int) -> Any:
        y = x * factor
        return -(y**power) if flags["negate"] else y**power

    x = torch.full((2,), 3.0)
    for power in (1, 2, 1, 2, 1, 2):
        assert values(scaled(x, power)) == [6.0**power] * 2
    factor = 3
    assert values(scaled(x, 2)) == [81.0] * 2
    flags["negate"] = True
    for _ in range(3):
        assert values(scaled(x, 2)) == [-81.0] * 2


def test_a_captured_name_that_means_another_tensor_is_that_tensor(cell: Any) -> None:
    w = torch.ones(2)

    @ml.compile
    def times(x: Any) -> Any:
        return w * x

    x = torch.full((2,), 5.0)
    for k in range(5):
        w = torch.full((2,), float(k))
        assert values(times(x)) == [5.0 * k] * 2


def test_arguments_that_share_memory_are_another_recording(cell: Any) -> None:
    def add(a: Any, b: Any) -> Any:
        a += 1
        return a + b

    joined, runs = counted(add)
    for _ in range(3):
        assert values(joined(torch.zeros(2), torch.zeros(2))) == [1.0] * 2
    for _ in range(3):
        x = torch.zeros(2)
        assert values(joined(x, x)) == [2.0] * 2
    for _ in range(3):
        x = torch.zeros(2)
        assert values(joined(x, x.view(2))) == [2.0] * 2
    assert runs.count == 6


def test_results_alias_what_they_aliased(cell: Any) -> None:
    c = torch.zeros(4)

    @ml.compile
    def views(x: Any) -> Any:
        o = x * 2
        return x, {"o": o, "part": o[0], "of c": c[1:], "same": o}

    for _ in range(4):
        x = torch.ones(2, 2)
        same, more = views(x)
        assert same is x and more["o"] is more["same"]
        more["part"].add_(5)
        assert values(more["o"])[0] == [7.0, 7.0]
        c.add_(1)
        assert values(more["of c"]) == values(c)[1:]


def test_what_is_written_is_so_through_every_alias(cell: Any) -> None:
    base = torch.zeros(2, 3)
    row = base[1]

    @ml.compile
    def fill(k: Any) -> None:
        row.add_(k)

    for _ in range(4):
        fill(torch.ones(3))
    assert values(base) == [[0.0] * 3, [4.0] * 3]


def test_a_method_and_keywords_and_constants_in_the_result(cell: Any) -> None:
    class Model:
        def __init__(self) -> None:
            self.w, self.scale = torch.ones(2), 3

        @ml.compile
        def run(self, *, x: Any) -> Any:
            return self.w * x * self.scale, "done", None, 7

    one, two = Model(), Model()
    two.scale = 5
    for _ in range(3):
        for model in (one, two):
            y, *rest = model.run(x=torch.ones(2))
            assert values(y) == [float(model.scale)] * 2 and rest == ["done", None, 7]
    one.scale = 4
    assert values(one.run(x=torch.ones(2))[0]) == [4.0] * 2


def test_a_function_without_ops_gives_its_result(cell: Any) -> None:
    double, runs = counted(lambda x: (x, 5))
    x = torch.ones(2)
    for _ in range(4):
        same, five = double(x)
        assert same is x and five == 5
    assert runs.count == 2
    assert ml.compile(lambda: 3)() == 3


def test_one_recording_within_another_is_part_of_it(cell: Any) -> None:
    inner, inner_runs = counted(lambda x: x + 1)
    outer, outer_runs = counted(lambda x: inner(x) * 2)
    for k in range(5):
        assert values(outer(torch.full((2,), float(k)))) == [2.0 * (k + 1)] * 2
    assert (inner_runs.count, outer_runs.count) == (2, 2)
    assert values(inner(torch.ones(2))) == [2.0] * 2


def test_literals_are_new_at_each_call(cell: Any) -> None:
    @ml.compile
    def total(x: Any) -> Any:
        sums = torch.tensor([0.0, 10.0])
        sums += x
        return sums * 1

    for k in range(5):
        assert values(total(torch.full((2,), float(k)))) == [k, 10.0 + k]


def test_a_large_literal_is_there_at_each_call(cell: Any) -> None:
    @ml.compile
    def add(x: Any) -> Any:
        return (x + torch.tensor(list(range(1 << 17))))[-2:]

    for k in range(4):
        assert add(torch.full((1,), k)).tolist() == [(1 << 17) - 2 + k, (1 << 17) - 1 + k]


def test_coordinates_differ_by_rank_in_a_replay_too(cell: Any) -> None:
    @ml.compile
    def own(x: Any) -> Any:
        return x + cell.rank("gpu")

    for _ in range(4):
        assert rank_values(own(torch.zeros(2))) == [[0.0, 0.0], [1.0, 1.0]]


def test_constants_are_read_computed_and_written_at_each_call(cell: Any) -> None:
    count, rate = torch.tensor(0.0), torch.tensor(2.0)

    @ml.compile(verify=False)
    def step(x: Any, scale: Any) -> Any:
        nonlocal count
        count += 1
        twice = count * rate
        root = math.sqrt(count.item() * 4)
        made = torch.tensor(1.0)
        made += count
        return x * twice, x * root, x + made, x * scale, twice

    for k in range(1, 8):
        rate.fill_(float(k))
        by_product, by_root, by_made, by_scale, twice = step(torch.ones(1), torch.tensor(k + 0.5))
        assert values(by_product) == [float(k * k)] and twice.item() == k * k
        assert values(by_root)[0] == pytest.approx((4 * k) ** 0.5)
        assert values(by_made) == [k + 2.0] and values(by_scale) == [k + 0.5]
        assert count.item() == k


def test_a_number_turned_plain_or_compared_is_another_recording(cell: Any) -> None:
    count, runs = torch.tensor(0.0), Runs()

    @ml.compile
    def step(x: Any) -> Any:
        nonlocal count
        runs.count += 1
        count += 1
        return x * 2 if count.item() > 5 else x * 3

    assert [values(step(torch.ones(1)))[0] for _ in range(9)] == [3.0] * 5 + [2.0] * 4
    assert runs.count == 4

    @ml.compile
    def shown(x: Any) -> Any:
        return x * int(count.item())

    for k in range(6):
        count.fill_(float(k // 3))
        assert values(shown(torch.ones(1))) == [float(k // 3)]
