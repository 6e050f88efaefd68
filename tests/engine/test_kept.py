"""What a selective recompute keeps of a block's forward pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from roundpipe_lightning.engine.chain.saved_outputs import KeptOutputs
from roundpipe_lightning.engine.device.base import CpuDevice
from roundpipe_lightning.planning.schedule.stages import ATTENTION_OPERATIONS
from tests.engine.test_boundary_tensors import Place, places, pool

__all__ = ["places"]  # a fixture

PROCESSOR = Place(CpuDevice(), None)
ATTENTION = "aten::_scaled_dot_product_flash_attention_for_cpu"


class Attention(nn.Module):
    """Projects, attends, and does something to the result."""

    def __init__(self, *, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.project = nn.Linear(8, 24)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.dropout)
        return torch.tanh(y.transpose(1, 2).flatten(2))


class Counter(TorchDispatchMode):
    """Counts an operation's runs."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.runs = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.runs += func._schema.name == ATTENTION
        return func(*args, **(kwargs or {}))


def sample() -> Tensor:
    return torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(1))


def gradients(block: nn.Module, y: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(y.square().sum(), list(block.parameters())))


def again(
    block: nn.Module, *, names: tuple[str, ...] = ATTENTION_OPERATIONS
) -> tuple[Tensor, Tensor, int, KeptOutputs]:
    """Run a block without a graph, then with one: both results, and how often it attended."""
    kept = KeptOutputs(names)
    with torch.no_grad(), kept.recorded(PROCESSOR):
        first = block(sample())
    with Counter() as counter, kept.replayed(PROCESSOR):
        second = block(sample())
    return first, second, counter.runs, kept


def test_attention_is_not_run_again_and_gradients_are_the_same() -> None:
    block = Attention()
    first, second, runs, _ = again(block)
    assert runs == 0
    assert torch.equal(first, second)
    wanted = gradients(block, block(sample()))
    assert all(map(torch.equal, gradients(block, second), wanted))


def test_what_is_not_named_is_run_again() -> None:
    _, _, runs, kept = again(Attention(), names=("aten::mm",))
    assert runs == 1
    assert kept.num_bytes == 0


def test_the_bytes_of_what_is_kept_are_counted_and_given_back() -> None:
    kept = KeptOutputs(ATTENTION_OPERATIONS)
    with torch.no_grad(), kept.recorded(PROCESSOR):
        block = Attention()
        block(sample())
    assert kept.num_bytes == 4 * (2 * 2 * 5 * 4 + 2 * 2 * 5)  # outputs, log-sum-exps
    with kept.replayed(PROCESSOR):
        block(sample())
    assert kept.num_bytes == 0


@pytest.mark.parametrize("in_place", [False, True])
def test_an_output_that_the_block_writes_into_is_computed_again(in_place: bool) -> None:
    def block(x: Tensor) -> Tensor:
        y = torch.tanh(x)
        return y.mul_(2) if in_place else y * 2

    kept = KeptOutputs(("aten::tanh",))
    with torch.no_grad(), kept.recorded(PROCESSOR):
        first = block(sample())
    assert (kept.num_bytes == 0) == in_place
    with kept.replayed(PROCESSOR):
        assert torch.equal(block(sample()), first)


def test_attention_that_drops_out_is_run_again_with_the_same_numbers() -> None:
    block = Attention(dropout=0.5)
    kept = KeptOutputs(ATTENTION_OPERATIONS)
    torch.manual_seed(3)
    with torch.no_grad(), kept.recorded(PROCESSOR):
        first = block(sample())
    assert kept.num_bytes == 0
    torch.manual_seed(3)
    with kept.replayed(PROCESSOR):
        assert torch.equal(block(sample()), first)


def test_another_way_through_the_block_is_run() -> None:
    block, kept = Attention(), KeptOutputs(("aten::relu", ATTENTION))
    with torch.no_grad(), kept.recorded(PROCESSOR):
        torch.relu(sample())
        wanted = block(sample())
    with Counter() as counter, kept.replayed(PROCESSOR):
        assert torch.equal(block(sample()), wanted)
    assert counter.runs == 1


@pytest.mark.parametrize(("first", "stays"), [(0, False), (1, False), (0, True)])
def test_what_is_kept_goes_from_device_to_device(
    places: list[Place], first: int, stays: bool
) -> None:
    kept, block = KeptOutputs(("aten::tanh",), pool=pool()), nn.Tanh()
    one, other = places[first], places[1 - first]
    with torch.no_grad(), kept.recorded(one, stays=stays):
        wanted = one.device.download(block(one.device.upload(sample())))
    assert kept.num_bytes == wanted.nbytes
    with kept.replayed(other):
        replayed = block(other.device.upload(sample()))
    assert other.device.holds(replayed)
    assert torch.equal(other.device.download(replayed), wanted)


def test_what_stays_is_not_moved(places: list[Place]) -> None:
    kept, place = KeptOutputs(("aten::tanh",)), places[0]
    with torch.no_grad(), kept.recorded(place, stays=True):
        first = torch.tanh(place.device.upload(sample()))
    with kept.replayed(place):
        again = torch.tanh(place.device.upload(sample()))
    assert torch.equal(place.device.download(again), place.device.download(first))
    assert place.transfers is not None
    assert place.transfers.downloads.num_bytes == place.transfers.uploads.num_bytes == 0


def test_what_an_operation_leaves_on_the_host_stays_there(places: list[Place]) -> None:
    kept = KeptOutputs(("aten::tanh",))
    with torch.no_grad(), kept.recorded(places[0]):
        first = torch.tanh(torch.tensor(0.5))
    with kept.replayed(places[1]):
        assert torch.tanh(torch.tensor(0.5)) is first
