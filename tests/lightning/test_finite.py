"""The fast look for what is not finite: never a false alarm, never a miss."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from roundpipe_lightning.strategy import optimizer_sync
from roundpipe_lightning.strategy.optimizer_sync import all_finite

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("place", [0, 1500, 2999])
def test_finds_one_anywhere(
    dtype: torch.dtype, value: float, place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(optimizer_sync, "_FINITE_PIECE", 1000)
    tensor = torch.ones(30, 100, dtype=dtype)
    assert all_finite(tensor)
    tensor.view(-1)[place] = value
    assert not all_finite(tensor)
    assert not all_finite(tensor.t())


def test_both_infinities_do_not_hide_each_other() -> None:
    assert not all_finite(torch.tensor([float("inf"), -float("inf")]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_sum_that_overflows_is_no_alarm(dtype: torch.dtype) -> None:
    assert all_finite(torch.full((1000,), torch.finfo(dtype).max, dtype=dtype))


@pytest.mark.parametrize(
    "tensor",
    [torch.empty(0), torch.tensor(1.0), torch.eye(3).to_sparse()],
    ids=["empty", "0d", "sparse"],
)
def test_all_kinds_of_tensors(tensor: Tensor) -> None:
    assert all_finite(tensor)


def test_a_sparse_one_is_found() -> None:
    assert not all_finite(torch.tensor([[0.0, float("nan")]]).to_sparse())
