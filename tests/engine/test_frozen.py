from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from roundpipe_lightning.emulation.server import EmulatedDevice
from roundpipe_lightning.engine.device.base import CopyQueue
from roundpipe_lightning.engine.device.events import Event
from roundpipe_lightning.planning.schedule.stages import Partition
from tests.kit.engine import (
    Block,
    Regressor,
    differences,
    engine_of,
    layers_of,
    mean_step,
    plain_step,
    plan_of,
    regression_batches,
)


class Counting(EmulatedDevice):
    """Counts the bytes that are uploaded and downloaded."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.uploaded_bytes = 0
        self.gradient_bytes = 0

    def copy(
        self, dst: Tensor, src: Tensor, *, queue: CopyQueue, after: Sequence[Event] = ()
    ) -> Event:
        if queue is CopyQueue.UPLOAD:
            self.uploaded_bytes += src.nbytes
        elif src.dtype is torch.uint8:  # not a boundary
            self.gradient_bytes += src.nbytes
        return super().copy(dst, src, queue=queue, after=after)


class Noting(Block):
    """Notes every run of it.

    Args:
        runs: Where: by number of the block.
    """

    def __init__(self, runs: Counter[int], index: int) -> None:
        super().__init__()
        self.runs = runs
        self.index = index
        self.adapter = nn.Linear(8, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        self.runs[self.index] += 1
        adapted: Tensor = self.adapter(x)
        return super().forward(x) + adapted


def model(*, trained: Sequence[str]) -> tuple[Regressor, Counter[int]]:
    """Four blocks; trained is what has one of the given parts in its name."""
    runs: Counter[int] = Counter()
    numbers = iter(range(4))
    module = Regressor(4, make_block=lambda: Noting(runs, next(numbers)))
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(any(part in name for part in trained))
    return module, runs


def step(module: Regressor, **changes: Any) -> tuple[Any, list[Counting]]:
    stack, devices = layers_of(module), [Counting(0), Counting(1)]
    plan = plan_of(stack, num_workers=2, num_microbatches=3, **changes)
    with engine_of(module, stack, plan, devices=devices) as engine:
        result = mean_step(engine, regression_batches(3))
    return result, devices


def test_gradients_of_trained_parameters_alone_are_downloaded_once() -> None:
    module, _ = model(trained=["adapter"])
    result, devices = step(module)
    trained = [p for p in module.parameters() if p.requires_grad]
    assert set(result.gradients) == set(trained)
    assert sum(device.gradient_bytes for device in devices) == sum(p.nbytes for p in trained)


@pytest.mark.parametrize(
    ("trained", "runs"),
    [
        (["layers.2.adapter", "layers.3.adapter"], [1, 1, 2, 2]),
        (["layers.3.adapter"], [1, 1, 1, 2]),
        (["layers.1.adapter"], [1, 2, 2, 2]),
        (["tail"], [1, 1, 1, 1]),
        (["head"], [2, 2, 2, 2]),
        (["adapter"], [2, 2, 2, 2]),
    ],
)
def test_blocks_below_what_is_trained_run_forward_only(trained: list[str], runs: list[int]) -> None:
    module, seen = model(trained=trained)
    plain = plain_step(module, regression_batches(3))
    seen.clear()
    result, _ = step(module)
    assert [seen[index] for index in range(4)] == [3 * count for count in runs]
    assert not differences(module, result, plain)


def _uploaded_bytes_once_known(module: Regressor) -> int:
    stack, devices = layers_of(module), [Counting(0), Counting(1)]
    plan = plan_of(stack, num_workers=2, num_microbatches=3)
    with engine_of(module, stack, plan, devices=devices) as engine:
        engine.plan_for(mean_step(engine, regression_batches(3)).chain, plan)
        before = sum(device.uploaded_bytes for device in devices)
        mean_step(engine, regression_batches(3))
    return sum(device.uploaded_bytes for device in devices) - before


def test_blocks_that_run_forward_only_are_uploaded_once() -> None:
    module, _ = model(trained=["layers.2.adapter", "layers.3.adapter"])
    both, _ = model(trained=["adapter"])
    fewer, more = (_uploaded_bytes_once_known(m) for m in (module, both))
    block = sum(p.nbytes for p in module.layers[0].parameters())
    assert more - fewer >= 2 * block


def test_a_stage_of_frozen_and_trained_blocks() -> None:
    """A stage is the unit that is run again."""
    module, seen = model(trained=["layers.1.adapter"])
    plain = plain_step(module, regression_batches(3))
    seen.clear()
    result, _ = step(module, partition=Partition(forward=(2, 2), backward=(0, 2, 2)))
    assert not differences(module, result, plain)
    assert seen[1] == seen[2] == seen[3] == 6
