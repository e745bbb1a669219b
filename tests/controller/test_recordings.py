"""ml.compile: a replay does what the function would do, or is refused with a sentence."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

import monarch_lab as ml
from monarch_lab.errors import RemoteException, UsageTypeError
from tests.controller.compare import assert_metadata_is_true, by_rank, own_number, rank_values


def values(t: Any) -> list[Any]:
    """Equal on both processes."""
    first, second = rank_values(t)
    assert first == second
    return first


class Runs:
    """How often Python ran a function."""

    def __init__(self) -> None:
        self.count = 0


def counted(fn: Callable[..., Any]) -> tuple[Any, Runs]:
    runs = Runs()

    def run(*args: Any) -> Any:
        runs.count += 1
        return fn(*args)

    return ml.compile(run), runs


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


# --- divergence


def test_a_function_that_does_something_else_diverges_at_a_line(cell: Any) -> None:
    turns: list[int] = []

    def other(x: Any) -> Any:
        turns.append(1)
        y = x + 1
        return y * 2 if len(turns) % 2 else y - 2

    hidden = ml.compile(_Hidden(other))
    hidden(torch.ones(2))
    with pytest.raises(RuntimeError, match=r"diverges at operation 1: .*return y \* 2 if len"):
        hidden(torch.ones(2))


def test_a_number_that_changes_diverges_and_is_named(cell: Any) -> None:
    state = iter((0.25, 0.5))
    hidden = ml.compile(_Hidden(lambda x: x * next(state)))
    hidden(torch.ones(2))
    with pytest.raises(RuntimeError, match=r"diverges at operation 0: .* with 0.25, .* with 0.5"):
        hidden(torch.ones(2))


def test_another_result_diverges(cell: Any) -> None:
    state = iter((1, 2))
    hidden = ml.compile(_Hidden(lambda x: [x + 1] * next(state)))
    hidden(torch.ones(2))
    with pytest.raises(RuntimeError, match="diverges in its result"):
        hidden(torch.ones(2))


class _Hidden:
    """A function whose outer variables are not looked at: its recording stands or falls by what it does."""

    __slots__ = ("fn",)

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.fn = fn

    def __call__(self, *args: Any) -> Any:
        return self.fn(*args)


# --- what a replay could not do


@pytest.mark.parametrize(
    ("fn", "told"),
    [
        (lambda x: x.item() if x.dim() == 0 else x.sum().item(), "fetching a value"),
        (lambda x: x.tolist(), "fetching a value"),
        (lambda x: bool(x.sum() > 0), "fetching a value"),
        (lambda x: ml.inspect(x), "fetching a value"),
        (lambda x: x.nonzero(), "nonzero, whose result hangs on the values"),
        (lambda x: x[x > 0], "whose result hangs on the values"),
        (lambda x: ml.get_active_mesh().replicate(torch.ones(2)), "a local value put on the mesh"),
        (lambda x: torch.manual_seed(3), "a seed"),
    ],
)
def test_what_a_replay_could_not_do_is_refused_at_its_line(cell: Any, fn: Any, told: str) -> None:
    def function(x: Any) -> Any:
        y = x + 1
        return fn(y)

    compiled = ml.compile(function)
    for _ in range(2):
        with pytest.raises(TypeError, match=rf"{told}.* cannot be part of the recording of .*function") as caught:
            compiled(torch.ones(2))
        assert any(entry.name == "function" for entry in caught.traceback)
    assert cell.client.recorder is None
    assert values(torch.ones(2) + 1) == [2.0] * 2


def test_after_an_exception_nothing_is_half_recorded(cell: Any) -> None:
    broken = True

    @ml.compile
    def step(x: Any) -> Any:
        y = x + 1
        if broken:
            raise KeyError("mine")
        return y * 2

    for _ in range(2):
        with pytest.raises(KeyError, match="mine"):
            step(torch.ones(2))
    broken = False
    for _ in range(4):
        assert values(step(torch.ones(2))) == [4.0] * 2
    assert cell.client.recorder is None


def test_only_plain_functions_are_compiled(cell: Any) -> None:
    async def later() -> None: ...

    with pytest.raises(UsageTypeError, match="plain function"):
        ml.compile(later)
    with pytest.raises(UsageTypeError, match="takes a function"):
        ml.compile(3)
    double = ml.compile(lambda x: x)
    assert ml.compile(double) is double and "compiled" in repr(double)


def test_another_mesh_cannot_be_part_of_a_recording(cell: Any) -> None:
    with ml.local_mesh(gpus_per_host=1, device="cpu", name="other") as other:
        with other.activate():
            far = torch.ones(2)

        @ml.compile
        def both(x: Any) -> Any:
            far.add_(1)
            return x + 1

        with pytest.raises(TypeError, match="an op on another mesh"):
            both(torch.ones(2))
        assert values(torch.ones(2) + 1) == [2.0] * 2


# --- failures inside


_OUT = "index out of range"


def look_up(index: Any, table: Any) -> Any:
    """Fails on a rank whose index is above 2, with IndexError."""
    return torch.nn.functional.embedding(index, table)


def test_a_failure_inside_names_its_own_line_and_spreads_as_without(cell: Any) -> None:
    counter, table = torch.zeros(2), torch.arange(3.0).reshape(3, 1)

    @ml.compile
    def step(x: Any) -> Any:
        counter.add_(1)
        fine = x * 2
        wrong = torch.nn.functional.embedding(x, table)  # this line
        counter.add_(1)
        return fine, wrong * 2

    good, bad = torch.tensor([1]), torch.tensor([7])
    for _ in range(3):
        step(good)
    fine, wrong = step(bad)
    with pytest.raises(IndexError, match=_OUT) as caught:
        cell.sync()
    assert isinstance(caught.value, RemoteException) and caught.value.ranks == (0, 1)
    assert "# this line" in caught.value.issued[0].source
    assert values(fine) == [14]
    with pytest.raises(RemoteException, match=_OUT):
        ml.inspect(wrong)
    assert values(counter) == [8.0] * 2
    assert values(step(good)[1]) == [[2.0]]


def test_one_rank_fails_and_the_others_do_not_wait_for_it(cell: Any) -> None:
    table = torch.arange(3.0).reshape(3, 1)

    @ml.compile
    def step(index: Any) -> Any:
        return (torch.nn.functional.embedding(index, table) + 0).reduce("gpu", "sum")

    good, bad = torch.tensor([1]) * cell.rank("gpu"), torch.tensor([7]) * cell.rank("gpu")
    for _ in range(3):
        assert values(step(good)) == [[1.0]]
    total = step(bad)
    with pytest.raises(RemoteException, match=_OUT) as caught:
        cell.sync()
    assert caught.value.ranks == (1,)
    with pytest.raises(RemoteException, match=_OUT):
        ml.inspect(total, host=0, gpu=0)
    assert values(step(good)) == [[1.0]]


def test_a_failed_input_fails_what_reads_it_alone(cell: Any) -> None:
    table = torch.arange(3.0).reshape(3, 1)

    @ml.compile
    def step(x: Any, y: Any) -> Any:
        return x + 1, y + 1

    for k in (0, 1, 2):
        step(look_up(torch.tensor([k]), table), torch.ones(2))
    a, b = step(look_up(torch.tensor([7]), table), torch.ones(2))
    with pytest.raises(RemoteException, match=_OUT):
        cell.sync()
    assert values(b) == [2.0] * 2
    with pytest.raises(RemoteException, match=_OUT):
        ml.inspect(a)


# --- what hangs on more than the arguments


def test_random_numbers_are_drawn_anew_as_without(mesh: Any) -> None:
    def draws(fn: Any) -> list[Any]:
        torch.manual_seed(3)
        return [by_rank(fn(torch.ones(3)))[0].tolist() for _ in range(5)]

    def noisy(x: Any) -> Any:
        return torch.nn.functional.dropout(x, 0.5) + torch.rand(3)

    with mesh.activate():
        plain, recorded = draws(noisy), draws(ml.compile(noisy))
    assert plain == recorded and len({str(d) for d in plain}) == 5


def test_numbers_that_vary_by_rank_are_another_recording(cell: Any) -> None:
    @ml.compile
    def draw(x: Any) -> Any:
        return torch.rand(3) + x

    zero = torch.zeros(3)
    for _ in range(3):
        assert draw(zero).equal_dims == ("host", "gpu")
    with ml.random.vary("gpu"):
        for _ in range(3):
            found = draw(zero)
            assert "gpu" not in found.equal_dims
            first, second = rank_values(found)
            assert first != second
    assert draw(zero).equal_dims == ("host", "gpu")


def test_what_is_known_equal_is_so_after_a_replay(cell: Any) -> None:
    @ml.compile
    def step(x: Any) -> Any:
        return x + 1, x.reduce("gpu", "sum")

    for _ in range(3):
        same, total = step(torch.ones(2))
        assert same.equal_dims == total.equal_dims == ("host", "gpu")
        differ, total = step(torch.ones(2) + own_number(cell))
        assert "gpu" not in differ.equal_dims and "gpu" in total.equal_dims
        assert total.tolist() == [3.0, 3.0]
        with pytest.raises(TypeError):
            differ.tolist()


def test_an_unequal_write_to_a_captured_tensor_ends_what_was_known(cell: Any) -> None:
    total = torch.zeros(2)

    @ml.compile
    def add(x: Any) -> None:
        total.add_(x)

    for _ in range(4):
        add(torch.ones(2))
        assert "gpu" in total.equal_dims
    for _ in range(4):
        add(torch.ones(2) * own_number(cell))
        assert "gpu" not in total.equal_dims
    assert rank_values(total) == [[4.0, 4.0], [8.0, 8.0]]


def test_ambient_state_is_part_of_the_kind_and_of_the_recording(cell: Any) -> None:
    w = torch.ones(2, requires_grad=True)

    @ml.compile
    def step(x: Any) -> Any:
        with torch.no_grad():
            y = w * x
        return y, (w * x).detach()

    for _ in range(3):
        y, _ = step(torch.ones(2))
        assert not y.requires_grad
    with torch.autocast("cpu", dtype=torch.bfloat16):
        m = ml.compile(lambda a: a @ a)
        for _ in range(3):
            assert m(torch.ones(2, 2)).dtype == torch.bfloat16
    for _ in range(3):
        assert m(torch.ones(2, 2)).dtype == torch.float32


def test_a_module_in_evaluation_is_another_recording(cell: Any) -> None:
    layer = torch.nn.Dropout(0.5)

    @ml.compile
    def run(x: Any) -> Any:
        return layer(x) + 0

    for _ in range(3):
        run(torch.ones(50))
    layer.eval()
    for _ in range(3):
        assert values(run(torch.ones(50))) == [1.0] * 50
    layer.train()
    layer.p = 0.25
    kept = [v for v in values(run(torch.ones(50))) if v]
    assert kept[0] == pytest.approx(1 / 0.75)


def test_a_remote_function_that_prints_and_one_defined_again(cell: Any, capfd: Any) -> None:
    @ml.remote
    def shift(x: Any) -> Any:
        return x + 1

    @ml.compile
    def run(x: Any) -> Any:
        return shift(x)

    for _ in range(3):
        assert values(run(torch.zeros(2))) == [1.0] * 2

    @ml.remote
    def again(x: Any) -> Any:
        return x + 100

    shift = again  # noqa: F811
    assert values(run(torch.zeros(2))) == [100.0] * 2


def test_a_recording_that_is_gone_is_gone_on_the_workers(cell: Any) -> None:
    client = cell.client
    gc.collect()
    before = set(client.recordings)

    @ml.compile
    def double(x: Any) -> Any:
        return x * 2

    for _ in range(3):
        double(torch.ones(2))
    made = set(client.recordings) - before
    assert len(made) == 1
    held = weakref.ref(double)
    del double
    gc.collect()
    assert held() is None
    assert set(client.recordings) == before


def count_tensors() -> int:
    import gc

    import torch

    return sum(isinstance(x, torch.Tensor) for x in gc.get_objects())


def test_a_loop_of_calls_keeps_no_values(cell: Any) -> None:
    x = torch.ones(4)
    left, right = cell.slice(gpu=0), cell.slice(gpu=1)

    @ml.compile
    def step(x: Any) -> Any:
        with left.activate():
            u = torch.rand(2) + 1
        with right.activate():
            torch.rand(2)
        with left.activate():
            u = u * 2
        y = x + 1
        return y * 2, y.sum(), u

    def held() -> int:
        step(x)
        cell.sync()
        torch.ones(1)
        return ml.call_on_shard_and_fetch(count_tensors, shard={"host": 0, "gpu": 0}).result()

    for _ in range(4):
        before = held()
    for _ in range(50):
        step(x)
    assert held() <= before + 3
