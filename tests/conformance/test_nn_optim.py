"""torch's own samples of modules and optimizers on a mesh against eager: some here, all in ``make bench`` (c4)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.conformance.nn_optim import judged, module_cases, optimizer_cases


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """As a worker has: sums in another order differ in the last digits."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def assert_as_eager(mesh: Any, cases: Iterator[tuple[str, Callable[[Any], Any]]]) -> int:
    passed, faults = 0, []
    for name, run in cases:
        verdict, why = judged(mesh, run)
        passed += verdict == "pass"
        if verdict in ("differ", "error"):
            faults.append(f"{name} {verdict}: {why}")
    assert not faults, "\n".join(faults)
    return passed


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_modules_give_what_eager_gives(mesh: Any) -> None:
    assert assert_as_eager(mesh, module_cases(1)) > 200


@pytest.mark.timeout(300)
def test_optimizers_give_what_eager_gives(mesh: Any) -> None:
    # LBFGS asks for values at every turn, which takes minutes; tests/controller/test_optimizers.py has it.
    cases = [case for case in optimizer_cases() if not case[0].startswith("LBFGS")]
    assert assert_as_eager(mesh, iter(cases[::3])) > 40
