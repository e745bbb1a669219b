"""Objects to bytes and back."""

from __future__ import annotations

import linecache
from typing import Any

import numpy as np
import pytest
import torch

from monarch_lab.errors import UsageTypeError
from monarch_lab.tensors import payload

_TENSORS: list[Any] = [
    lambda: torch.arange(6.0).view(2, 3).t(),
    lambda: torch.arange(10)[3:],
    lambda: torch.ones(3).expand(4, 3),
    lambda: torch.zeros(0, 3),
    lambda: torch.tensor(3),
    lambda: torch.tensor([True, False]),
    lambda: torch.ones(2, dtype=torch.bfloat16),
    lambda: torch.ones(2, dtype=torch.float8_e4m3fn),
    lambda: (torch.ones(2, dtype=torch.complex64) * 1j).conj(),
    lambda: torch._neg_view(torch.ones(2)),
    lambda: torch.ones(2).requires_grad_(),
    lambda: torch.eye(3).to_sparse(),
    lambda: torch.rand(2, 3, 4, 4).to(memory_format=torch.channels_last),
    lambda: torch.nn.Parameter(torch.ones(2)),
]


def test_what_is_written_after_it_was_packed_does_not_travel() -> None:
    tensor, array = torch.ones(100_000), np.ones(100_000)
    frames, _ = payload.dumps((tensor, array, lambda: tensor))
    lent, _ = payload.dumps(tensor, copy=False)
    tensor.zero_()
    array.fill(0)
    kept, other, function = payload.loads(frames)
    assert kept.min() == 1 and other.min() == 1 and function().min() == 1
    assert payload.loads(lent).max() == 0


@pytest.mark.parametrize("make", _TENSORS)
def test_a_tensor_comes_back_as_it_was_in_memory_of_its_own(make: Any) -> None:
    tensor = make()
    frames, _ = payload.dumps({"t": tensor})
    back = payload.loads([bytes(f) for f in frames])["t"]
    assert back.dtype == tensor.dtype and back.shape == tensor.shape and back.requires_grad == tensor.requires_grad
    assert type(back) is type(tensor) and back.is_conj() == tensor.is_conj() and back.is_neg() == tensor.is_neg()
    if tensor.layout is torch.strided:
        assert back.stride() == tensor.stride()
        assert torch.equal(back.detach().resolve_conj().float(), tensor.detach().resolve_conj().float())
        if tensor.numel():
            assert back.data_ptr() % 16 == 0
            back.untyped_storage().resize_(back.untyped_storage().nbytes() + 64)
    else:
        assert torch.equal(back.to_dense(), tensor.to_dense())


def test_a_small_part_of_a_big_tensor_sends_the_part_alone() -> None:
    frames, _ = payload.dumps(torch.zeros(1_000_000)[10:20])
    assert sum(len(f) for f in frames) < 2_000


def test_a_function_comes_back_with_its_file_name_and_its_lines(tmp_path: Any) -> None:
    name = "<cell 5>"
    source = "def f(x):\n    return x + 1\n"
    linecache.cache[name] = (len(source), None, source.splitlines(True), name)
    space: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(source, name, "exec"), space)
    frame, sources = payload.pack(space["f"])
    assert sources == {name: source}
    linecache.cache.pop(name)
    payload.remember_sources(sources)
    back = payload.unpack(frame)
    assert back(1) == 2 and back.__code__.co_filename == name
    assert linecache.getline(name, 2) == "    return x + 1\n"


def test_sources_are_remembered_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(payload, "_MOST_SOURCES", len(payload._remembered) + 3)
    for k in range(6):
        payload.remember_sources({f"<bounded {k}>": f"x = {k}\n", "<bounded 0>": "again\n"})
    assert "<bounded 1>" not in linecache.cache
    assert linecache.getline("<bounded 5>", 1) == "x = 5\n" and linecache.getline("<bounded 0>", 1) == "again\n"


def test_a_value_in_one_frame_comes_back() -> None:
    value = {"a": torch.arange(3), "b": [1, "x", None]}
    back = payload.unpack(payload.pack(value)[0])
    assert torch.equal(back["a"], value["a"]) and back["b"] == value["b"]


def test_a_tuple_that_looks_like_an_envelope_is_a_value_all_the_same() -> None:
    value = ("in band", b"x", [b"y"])
    assert payload.unpack(payload.pack(value)[0]) == value


def test_what_does_not_pickle_says_so() -> None:
    with pytest.raises(UsageTypeError, match="cannot be sent"):
        payload.dumps(i for i in range(3))


def test_no_mesh_tensor_is_sent_by_value(mesh: Any) -> None:
    x = mesh.replicate(torch.ones(1))
    for value in (x, [x], {"a": (x,)}, lambda: x):
        with pytest.raises(UsageTypeError, match="pass it as an argument"):
            payload.dumps(value)


def test_packing_with_a_mesh_active_makes_local_tensors(cell: Any) -> None:
    import monarch_lab as ml

    with ml.no_mesh.activate():
        local = torch.ones(2)
    frames, _ = payload.dumps(local)
    assert type(payload.loads([bytes(f) for f in frames])) is torch.Tensor
