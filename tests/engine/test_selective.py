from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from roundpipe_lightning.emulation.server import EmulatedDevice
from roundpipe_lightning.engine.chain.saved_outputs import KeptOutputs
from roundpipe_lightning.engine.device.base import CpuDevice
from roundpipe_lightning.planning.schedule.stages import ATTENTION_OPERATIONS, RecomputePolicy
from tests.engine.test_boundaries import Place, places
from tests.kit.architectures import decoder_stack, tiny_causal_lm, token_batches
from tests.kit.engine import check_parity, engine_for, mean_step


@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe"])
@pytest.mark.parametrize("emulated", [False, True])
def test_gradients_are_the_same(name: str, emulated: bool) -> None:
    module = tiny_causal_lm(name, tied=True)
    check_parity(
        module,
        token_batches(3),
        stack=decoder_stack(module),
        devices=[(EmulatedDevice if emulated else CpuDevice)(i) for i in range(2)],
        tolerance=1e-6 if emulated else 0.0,  # of the embedding's two uses a device sums its round
        recompute=RecomputePolicy.SELECTIVE,
    )


class Counter(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.runs = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.runs += func._schema.name in ATTENTION_OPERATIONS
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("policy", "times"), [("full", 2), ("selective", 1)])
def test_attention_runs_once_per_block_and_microbatch(policy: str, times: int) -> None:
    module = tiny_causal_lm("qwen3", tied=False)
    stack, counter = decoder_stack(module), Counter()
    held: Any = {"recompute": RecomputePolicy(policy)}
    with engine_for(module, stack, num_workers=1, **held) as engine:
        mean_step(engine, token_batches(3), context=lambda: counter)
    assert counter.runs == times * len(stack.blocks) * 3


__all__ = ["places"]  # a fixture

PROCESSOR = Place(CpuDevice(), None)
ATTENTION = "aten::_scaled_dot_product_flash_attention_for_cpu"


class Attention(nn.Module):
    def __init__(self, *, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.project = nn.Linear(8, 24)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.dropout)
        return torch.tanh(y.transpose(1, 2).flatten(2))


def sample() -> Tensor:
    return torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(1))


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
