"""out= forms: written the first time too, when the call is only being learned."""

from __future__ import annotations

from typing import Any

import pytest
import torch


@pytest.mark.parametrize("inference", [False, True])
def test_a_result_is_written_to_out_each_time(cell: Any, inference: bool) -> None:
    with torch.inference_mode(inference):
        for k in range(3):
            # torch 2.13 leaves out alone here while a dispatch mode is on.
            rank = torch.full((1,), 99).view(())
            torch.linalg.matrix_rank(torch.eye(3) * (k + 1), out=rank)
            assert rank.tolist() == 3
            total = torch.empty(2)
            assert torch.add(torch.full((2,), 1.0), float(k), out=total) is total
            assert total.tolist() == [1 + k, 1 + k]


def test_what_was_written_to_out_is_not_believed_equal(cell: Any) -> None:
    for _ in range(2):
        out = torch.zeros(1)
        torch.add(out, cell.rank("gpu").float(), out=out)
        assert not out.equal_dims or "gpu" not in out.equal_dims
        with pytest.raises(TypeError, match="gpu"):
            out.tolist()
