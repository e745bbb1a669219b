"""Streams beside the default one, and loans of tensors between them."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import monarch_lab as ml
from tests.conftest import SharedMesh
from tests.controller.compare import own_number, rank_values


@pytest.fixture(scope="module")
def shared_mesh() -> Iterator[SharedMesh]:
    """Of these tests alone: a mesh with streams takes no process-wide switches any more, which other tests set."""
    shared = SharedMesh()
    yield shared
    shared.stop()


@pytest.fixture
def side(cell: Any) -> ml.Stream:
    return ml.Stream("side")


def test_what_is_made_on_a_stream_is_computed_there(cell: Any, side: ml.Stream) -> None:
    def thread(x: Any) -> str:
        return threading.current_thread().name

    assert ml.remote(thread)(torch.ones(1)) == "MainThread"
    with side.activate():
        x = torch.ones(3)
        assert ml.get_active_stream() is side and x.stream is side and x.mesh is cell
        for _ in range(3):
            y = (x + 1).sum() * own_number(cell.on(side))
        assert ml.remote(thread)(x) == f"monarch-stream-{side.number}"
    assert y.stream is side and rank_values(y) == [0, 6]
    z = torch.ones(3)
    assert z.stream is ml.get_active_stream() and z.stream is not side
    assert rank_values(z + 1) == [[2, 2, 2]] * 2


def _gate() -> threading.Event:
    return torch.__dict__.setdefault("_gate_of_streams", threading.Event())


def _wait_at_gate() -> None:
    if not _gate().wait(60):
        raise TimeoutError("the default stream did not open the gate")


def _open_gate() -> None:
    _gate().set()


def test_streams_run_beside_one_another(cell: Any, side: ml.Stream) -> None:
    wait = ml.remote("tests.controller.test_streams._wait_at_gate", propagate="inspect")
    opened = ml.remote("tests.controller.test_streams._open_gate", propagate="inspect")
    with side.activate():
        torch.ones(1)
        cell.sync()
        wait()
    assert rank_values(torch.ones(2) + 3) == [[4, 4]] * 2, "the default stream waits for no other"
    opened()
    cell.sync()  # every stream's; a failure of the one that waited would be raised here


def test_an_op_that_mixes_streams_is_refused(cell: Any, side: ml.Stream) -> None:
    x = torch.ones(2)
    with side.activate():
        y = torch.ones(2)
        for mixed in (lambda: x + y, lambda: torch.cat([y, x])):
            with pytest.raises(TypeError, match=r'WRONG_STREAM.*stream "side".*stream\.borrow'):
                mixed()
        with pytest.raises(TypeError, match="WRONG_STREAM.*reduce"):
            x.reduce("gpu")
        with pytest.raises(TypeError, match="WRONG_STREAM"):
            ml.remote(lambda x: x)(x)
        assert rank_values(y.reduce("gpu")) == [[2, 2]] * 2
    with pytest.raises(TypeError, match="WRONG_STREAM"):
        y.reduce_("gpu")


def test_an_op_is_on_the_active_stream_or_refused(cell: Any, side: ml.Stream) -> None:
    with ml.no_mesh.activate():
        local = torch.ones(1)
    x = torch.ones(2)
    uses = [lambda t: t + 1, lambda t: t + t, torch.exp, lambda t: t.add_(1), lambda t: t.clamp(max=0.25), torch.sinc]
    with side.activate():
        y = torch.ones(2)
        found = [use(y.clone()) for use in uses[:-1]]  # known kinds, and one seen for the first time
        for use in uses:
            with pytest.raises(TypeError, match="WRONG_STREAM.*of the default stream.*activate the stream"):
                use(x)
        assert rank_values(y + cell.rank("gpu") + cell.replicate(local)) == [[2, 2], [3, 3]]
    for use in uses:
        with pytest.raises(TypeError, match='WRONG_STREAM.*on the default stream was given.*stream "side"'):
            use(y)
    assert rank_values(x) == rank_values(y) == [[1, 1]] * 2
    for t in found:
        assert t.stream is side and rank_values(t)
    with side.activate(), ml.no_mesh.activate():
        assert rank_values(y + 1) == [[2, 2]] * 2, "no mesh need be active"


def test_gradients_are_those_of_the_stream_of_the_forward_pass(cell: Any, side: ml.Stream) -> None:
    with side.activate():
        w = torch.full((2,), 3.0).requires_grad_()
        loss, again = (w * w).sum(), (w * 2).sum()
    loss.backward()
    (given,) = ml.grad_generator(again, [w])
    assert w.grad.stream is side and rank_values(w.grad) == [[6, 6]] * 2 and given.tolist() == [2, 2]
    v = torch.ones(2).requires_grad_()
    v.register_hook(lambda g: g * 2)
    kept = (v * 3).sum()
    with side.activate():
        kept.backward()
    assert v.grad.tolist() == [6, 6]


def test_a_stream_is_of_the_context_and_nests(mesh: Any, side: ml.Stream) -> None:
    main = ml.get_active_stream()
    activation = side.activate()
    assert ml.get_active_stream() is side
    with mesh.activate():
        assert torch.ones(1).stream is side
        with main.activate():
            assert ml.get_active_stream() is main and torch.ones(1).stream is main
        assert torch.ones(1).stream is side
    seen: list[Any] = []
    thread = threading.Thread(target=lambda: seen.append(ml.get_active_stream()))
    thread.start()
    thread.join()
    activation.deactivate()
    assert seen == [main] and ml.get_active_stream() is main


def test_a_loan_to_be_read_can_be_read_on_both_and_written_on_none(cell: Any, side: ml.Stream) -> None:
    def on_side(t: Any) -> None:
        with side.activate():
            t.add_(1.0)

    x = torch.zeros(2) + own_number(cell)
    x.add_(0.0)
    row = x[:1]
    view, loan = side.borrow(x)
    other, second = ml.Stream("other").borrow(x)
    with side.activate():
        assert view.stream is side and rank_values(view + 1) == [[1, 1], [2, 2]]
    assert rank_values(other) == rank_values(x + 0) == [[0, 0], [1, 1]]
    writes = [
        lambda: x.add_(1.0),
        lambda: row.mul_(2.0),
        lambda: torch.add(row, 1.0, out=x),
        lambda: x.__setitem__(0, 5.0),
        lambda: on_side(view),
        lambda: ml.remote(lambda t: t.add_(0.0))(x),
    ]
    for write in writes:
        with pytest.raises(TypeError, match=r"MUTATING_BORROW.*test_streams\.py"):
            write()
    with pytest.raises(RuntimeError, match="Cannot borrow .* mutably"):
        side.borrow(x, mutable=True)
    loan.drop()
    with pytest.raises(TypeError, match="MUTATING_BORROW"):
        x.add_(1.0)
    second.drop()
    second.drop()
    assert rank_values(x.add_(1.0)) == [[1, 1], [2, 2]]
    with pytest.raises(TypeError, match=r"DROPPED.*borrowed at .*test_streams\.py"):
        view + 1
    assert view.dropped and not x.dropped


def test_a_loan_to_be_written_is_used_by_the_borrower_alone(cell: Any, side: ml.Stream) -> None:
    x = torch.zeros(2)
    row = x[1:]
    view, loan = side.borrow(x, mutable=True)
    with loan:
        for use in (lambda: x + 1, lambda: row.sum(), lambda: ml.inspect(x), lambda: x.add_(1), lambda: side.borrow(x)):
            with pytest.raises(TypeError, match=r"BORROWED.*stream \"side\".*test_streams\.py"):
                use()
        with side.activate():
            view.add_(own_number(cell.on(side)))
    assert rank_values(x) == [[0, 0], [1, 1]] and rank_values(row) == [[0], [1]]
    assert x.equal_dims == ("host",), "what the borrower wrote is known here"


def test_the_borrower_waits_for_the_owner_and_the_owner_for_the_borrower(cell: Any, side: ml.Stream) -> None:
    slow = ml.remote(lambda x, k: (time.sleep(0.3), x.add_(k), None)[2], propagate=lambda x, k: (x.add_(k), None)[1])
    x = torch.zeros(1)
    slow(x, 1)
    view, loan = side.borrow(x, mutable=True)
    with side.activate():
        slow(view, 10)
        seen = view + 0
    loan.drop()
    slow(x, 100)
    assert rank_values(seen) == [[11]] * 2 and rank_values(x) == [[111]] * 2


def test_a_loan_is_lent_on_and_comes_back(cell: Any, side: ml.Stream) -> None:
    x = torch.zeros(1)
    view, loan = side.borrow(x, mutable=True)
    again, inner = ml.get_active_stream().borrow(view)
    assert rank_values(again + 1) == [[1]] * 2
    with pytest.raises(RuntimeError, match="end that loan first"):
        loan.drop()
    with side.activate():
        with pytest.raises(TypeError, match="MUTATING_BORROW"):
            view.add_(1)
        inner.drop()
        view.add_(1)
    loan.drop()
    assert rank_values(x) == [[1]] * 2


def test_a_failure_of_the_borrower_reaches_the_owner(cell: Any, side: ml.Stream) -> None:
    def fail_on_one(x: Any, r: Any) -> None:
        if r.item() == 1:
            raise ValueError("spoiled")
        x.add_(1)

    def told(x: Any, r: Any) -> None:
        x.add_(1)

    x = torch.zeros(2)
    view, loan = side.borrow(x, mutable=True)
    with side.activate():
        ml.remote(fail_on_one, propagate=told)(view, cell.on(side).rank("gpu"))
    loan.drop()
    with pytest.raises(ml.RemoteException, match="spoiled"):
        cell.sync()
    with pytest.raises(ml.RemoteException, match="spoiled"):
        ml.inspect(x)


def test_a_loan_let_go_is_ended_with_a_warning(cell: Any, side: ml.Stream) -> None:
    x = torch.zeros(2)
    view, loan = side.borrow(x, mutable=True)
    del view, loan
    gc.collect()
    with pytest.warns(UserWarning, match=r"test_streams\.py.*without drop"):
        side.activate().deactivate()
    assert rank_values(x + 1) == [[1, 1]] * 2


def test_what_cannot_be_borrowed_is_refused(cell: Any, side: ml.Stream) -> None:
    with pytest.raises(TypeError, match="LOCAL_TENSOR"):
        side.borrow([1.0])
    with pytest.raises(TypeError, match="REQUIRES_GRAD"):
        side.borrow(torch.ones(2).requires_grad_())
    with pytest.raises(TypeError, match="dense"):
        side.borrow(torch.eye(2).to_sparse())
    with pytest.raises(ValueError, match="already"):
        ml.get_active_stream().borrow(torch.ones(2))
    step = torch.tensor(3.0)
    with side.borrow(step)[1]:
        pass


def test_a_dropped_tensor_says_where(cell: Any) -> None:
    x = torch.ones(4)
    row = x[:2]
    assert not x.dropped
    x.drop()
    x.drop()
    assert x.dropped and row.dropped
    for use in (lambda: x + 1, lambda: row.sum(), lambda: torch.ones(4) * x, lambda: ml.inspect(row)):
        with pytest.raises(TypeError, match=r"DROPPED.*test_streams\.py.*x\.drop\(\)"):
            use()


def test_printing_what_cannot_be_used_says_why(cell: Any, side: ml.Stream) -> None:
    with cell.slice(gpu=0).activate():
        x, y = torch.ones(2) + 1, torch.ones(2) + 2
        x.drop()
        view, loan = side.borrow(y, mutable=True)
        assert "no value: DROPPED" in repr(x) and "no value: BORROWED" in y._repr_mimebundle_()["text/html"]
        assert "tensor([3., 3.])" in repr(view)
        loan.drop()
    assert "tensor([3., 3.])" in repr(y)


def test_random_numbers_are_not_drawn_on_another_stream(cell: Any, side: ml.Stream) -> None:
    with side.activate():
        for draw in (
            lambda: torch.rand(2),
            lambda: torch.nn.functional.dropout(torch.ones(2)),
            ml.remote(lambda: torch.randn(2)),
            ml.remote(lambda: torch.manual_seed(3) and None),
        ):
            with pytest.raises(RuntimeError, match="default stream alone"):
                draw()
        assert rank_values(torch.nn.functional.dropout(torch.ones(2), 0.0)) == [[1, 1]] * 2
    first, second = rank_values(torch.rand(2))
    assert first == second


def test_gradients_are_computed_on_a_stream(cell: Any, side: ml.Stream) -> None:
    with side.activate():
        w = torch.full((2,), 3.0).requires_grad_()
        for _ in range(3):
            w.grad = None
            (w * w).sum().backward()
            assert rank_values(w.grad) == [[6, 6]] * 2


def test_collectives_of_two_streams_do_not_mix(cell: Any, side: ml.Stream) -> None:
    x = own_number(cell).expand(2).clone()
    with side.activate():
        y = own_number(cell.on(side)).expand(2).clone() + 10
    for _ in range(3):
        x.reduce_("gpu")
        with side.activate():
            y.reduce_("gpu")
    assert rank_values(x) == [[4, 4]] * 2 and rank_values(y) == [[84, 84]] * 2


def test_a_failure_on_a_stream_is_raised_at_its_line(cell: Any, side: ml.Stream) -> None:
    def fail(x: Any) -> Any:
        raise ValueError("on the side")

    with side.activate():
        y = ml.remote(fail, propagate=torch.empty_like)(torch.ones(2))
        z = y + 1
    with pytest.raises(ml.RemoteException, match="on the side") as caught:
        cell.sync()
    assert caught.value.cell.endswith("test_streams.py")
    with pytest.raises(ml.RemoteException, match="on the side"):
        ml.inspect(z)


def test_what_torch_keeps_for_a_process_is_for_one_stream_at_a_time(cell: Any, side: ml.Stream) -> None:
    for _ in range(3):  # learned, then issued without a wait
        with side.activate():
            torch.ones(1) + 1
        torch.ones(1) + 1
    torch.set_default_dtype(torch.float64)
    try:
        with pytest.raises(ml.UsageError, match=r"wait for the streams first, with mesh\.sync"):
            torch.arange(5) / 2
        cell.sync()
        assert (torch.arange(5) / 2).dtype is torch.float64
        with side.activate(), pytest.raises(ml.UsageError, match="on the default stream"):
            torch.arange(6) / 2
        torch.set_default_dtype(torch.float32)
        with side.activate(), pytest.raises(ml.UsageError, match="may still run"):
            torch.ones(1) + 2
        cell.sync()
        with side.activate():
            assert (torch.arange(7) / 2).dtype is torch.float32
        cell.sync()
        torch.set_default_dtype(torch.float64)
        assert (torch.arange(5) / 2).dtype is torch.float64 and rank_values(torch.arange(2) / 2) == [[0, 0.5]] * 2
    finally:
        torch.set_default_dtype(torch.float32)


def test_an_interrupt_ends_a_function_on_a_stream(cell: Any, side: ml.Stream) -> None:
    def spin(x: Any) -> Any:
        while True:
            time.sleep(0.01)

    with side.activate():
        x = torch.ones(2)
        bad = ml.remote(spin, propagate=torch.empty_like)(x)
        cell.client.flush()
    time.sleep(0.5)
    cell.interrupt()
    with side.activate():
        assert rank_values(x + 1) == [[2, 2]] * 2
    del bad


def test_values_move_between_meshes_on_their_stream(cell: Any, side: ml.Stream) -> None:
    first, second = cell.slice(gpu=0), cell.slice(gpu=1)
    with side.activate():
        x = torch.ones(2) + own_number(cell.on(side))
        moved = x.slice_mesh(gpu=1).to_mesh(first)
        assert moved.stream is side and ml.inspect(moved).tolist() == [2, 2]
        assert ml.inspect((moved + 1).to_mesh(second)).tolist() == [3, 3]
