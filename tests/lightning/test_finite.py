import pytest
import torch
from torch import Tensor

from roundpipe_lightning.strategy.updates.optimizer_sync import all_finite

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16, torch.complex64])
@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_finds_one_anywhere(dtype: torch.dtype, value: float) -> None:
    tensor = torch.ones(30, 100, dtype=dtype)
    assert all_finite(tensor)
    tensor[-1, -1] = value
    assert not all_finite(tensor)
    assert not all_finite(tensor.t())


def test_takes_no_memory() -> None:
    tensor = torch.ones(10_000, dtype=torch.bfloat16)
    with torch.profiler.profile(profile_memory=True) as profiled:
        assert all_finite(tensor)
    assert max(event.cpu_memory_usage for event in profiled.events()) < 1000


@pytest.mark.parametrize(
    ("tensor", "expected"),
    [
        (torch.tensor([INF, -INF]), False),
        (torch.full((1000,), torch.finfo(torch.float32).max), True),  # the sum overflows
        (torch.empty(0), True),
        (torch.tensor(1.0), True),
        (torch.eye(3).to_sparse(), True),
        (torch.tensor([[0.0, NAN]]).to_sparse(), False),
    ],
)
def test_all_kinds_of_tensors(tensor: Tensor, expected: bool) -> None:
    assert all_finite(tensor) is expected
