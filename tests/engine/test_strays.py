"""What user code does past the views: parameters from elsewhere, buffers, stacks not run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from roundpipe_lightning.engine.device.base import Device
from roundpipe_lightning.engine.engine import UnusedStackWarning
from roundpipe_lightning.errors import CaptureError, ConfigurationError
from tests.kit.engine import (
    WIDTH,
    Regressor,
    check_parity,
    cpu_workers,
    differences,
    emulated_workers,
    engine_for,
    engine_step,
    layers_of,
    mean_step,
    plain_step,
    plan_of,
    regression_batches,
)


class ListedBlock(nn.Module):
    """A block that keeps its own parameter in a plain list, too, and uses it from there."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH)
        self.listed = [self.weight]

    def forward(self, x: Tensor) -> Tensor:
        return x + functional.linear(x, self.listed[0])


class SlyBlock(nn.Module):
    """A block that hands its own parameters to functions by keyword, and in lists."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.scales = nn.ParameterList(torch.randn(WIDTH) for _ in range(2))
        self.listed = [self.norm.weight, self.norm.bias, *self.scales]

    def forward(self, x: Tensor) -> Tensor:
        weight, bias, *scales = self.listed
        x = x + functional.layer_norm(x, (WIDTH,), weight=weight, bias=bias)
        return x * torch.stack(scales).mean(0)


class BorrowingBlock(nn.Module):
    """A block that uses a parameter of somebody else."""

    def __init__(self, lender: list[nn.Parameter]) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.lender = lender

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x) * self.lender[0]  # type: ignore[no-any-return]


class NormedBlock(nn.Module):
    """A block with running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(x)  # type: ignore[no-any-return]


class Skipping(Regressor):
    """A step that uses the blocks' parameters, but never the stack."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        loss = functional.mse_loss(self.tail(self.head(x)).squeeze(-1), y)
        first: Any = self.layers[0]
        return loss + first.inner.weight.square().mean()


def devices_of(kind: str, num: int) -> list[Device]:
    return cpu_workers(num) if kind == "cpu" else emulated_workers(num)


@pytest.mark.parametrize("kind", ["cpu", "emulated"])
@pytest.mark.parametrize("make_block", [ListedBlock, SlyBlock])
def test_a_block_may_reach_its_parameters_past_the_view(
    kind: str, make_block: Callable[[], nn.Module]
) -> None:
    module = Regressor(make_block=make_block)
    check_parity(module, devices=devices_of(kind, 2))
    assert all(p.grad is None for p in module.parameters())


@pytest.mark.parametrize("kind", ["cpu", "emulated"])
def test_a_parameter_of_somebody_else_is_refused_by_name(kind: str) -> None:
    lender: list[nn.Parameter] = []
    module = Regressor(make_block=lambda: BorrowingBlock(lender))
    lender.append(module.tail.bias)
    stack = layers_of(module)
    with pytest.raises(CaptureError, match=r"'tail\.bias'.*not registered in it"):
        engine_step(
            module, stack, plan_of(stack), regression_batches(3), devices=devices_of(kind, 2)
        )


@pytest.mark.parametrize("kind", ["cpu", "emulated"])
@pytest.mark.parametrize(("round_size", "team_size"), [(2, 1), (4, 2)])
def test_statistics_need_one_round_without_teams(
    kind: str, round_size: int, team_size: int
) -> None:
    module = Regressor(make_block=NormedBlock)
    stack = layers_of(module)
    plan = plan_of(stack, num_microbatches=4, round_size=round_size, team_size=team_size)
    with pytest.raises(
        ConfigurationError,
        match=r"would write in no order.*hints=PartitionHints\(team_size=1, round_size=\d",
    ):
        engine_step(module, stack, plan, regression_batches(4), devices=devices_of(kind, 2))


def test_a_stack_that_is_not_run_is_mentioned_once() -> None:
    module = Skipping()
    batches = regression_batches(3)
    plain = plain_step(module, batches)
    with engine_for(module) as engine:
        with pytest.warns(UnusedStackWarning, match=r"'layers' as one chain.*blocks="):
            result = mean_step(engine, batches)
        mean_step(engine, batches)  # a second warning would be an error
    assert not differences(module, result, plain)
