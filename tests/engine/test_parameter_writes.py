"""Writes into parameters while a step runs: on devices they would be lost, so they are refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from roundpipe_lightning.errors import ConfigurationError
from tests.kit.engine import (
    WIDTH,
    Block,
    Regressor,
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


def _in_place(parameter: Tensor) -> None:
    with torch.no_grad():
        parameter.mul_(0.5)


def _through_data(parameter: Tensor) -> None:
    parameter.data.mul_(0.5)


def _by_other_data(parameter: Tensor) -> None:
    parameter.data = parameter.data * 0.5


@torch.no_grad()
def _several(parameter: Tensor) -> None:
    torch._foreach_mul_([parameter], 0.5)


WRITES: list[Callable[[Any], None]] = [_in_place, _through_data, _by_other_data, _several]
REFUSED = "A step writes into the parameter {!r}: into the copy"


class _Writing(Block):
    """A block that may write into a parameter before it uses it."""

    def __init__(self) -> None:
        super().__init__()
        self.write: Callable[[Any], None] = lambda parameter: None

    def forward(self, x: Tensor) -> Tensor:
        self.write(self.outer.weight)
        return super().forward(x)


class _Averaging(Regressor):
    """Has a slow copy of its head, of parameters that are not trained."""

    def __init__(self) -> None:
        super().__init__(3, make_block=_Writing)
        self.teacher = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.write: Callable[[Any], None] = lambda parameter: None

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.write(self.teacher.weight)
        return super().training_step(batch, batch_idx) + self.teacher(batch[0]).mean()


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("plans_blocks", [True, False])
def test_a_write_into_a_block_is_refused(write: Callable[[Any], None], plans_blocks: bool) -> None:
    module, batches = _Averaging(), regression_batches(3)
    wanted = plain_step(module, batches)
    written: Any = module.layers[1]
    written.write = write

    def call(view: Any, batch: Any, index: int) -> Any:
        if not plans_blocks:  # a call that the plan does not have
            view.layers[1](view.head(batch[0]))
        return view.training_step(batch, 0)

    with engine_for(module, devices=emulated_workers(2)) as engine:
        name = re.escape(REFUSED.format("layers.1.outer.weight"))
        with pytest.raises(ConfigurationError, match=name):
            mean_step(engine, batches, call=call)
        written.write = lambda parameter: None
        assert not differences(module, mean_step(engine, batches), wanted)


@pytest.mark.parametrize("write", WRITES)
def test_a_write_into_a_parameter_outside_the_blocks_is_refused(
    write: Callable[[Any], None],
) -> None:
    module, batches = _Averaging(), regression_batches(3)
    wanted = plain_step(module, batches)
    with engine_for(module, devices=emulated_workers(2)) as engine:
        module.write = write
        with pytest.raises(ConfigurationError, match=re.escape(REFUSED.format("teacher.weight"))):
            mean_step(engine, batches)
        module.write = lambda parameter: None
        assert not differences(module, mean_step(engine, batches), wanted)


@pytest.mark.parametrize("devices", [emulated_workers, cpu_workers])
def test_what_is_put_back_is_no_write(devices: Any) -> None:
    def swapped_for_a_moment(parameter: Tensor) -> None:
        before = parameter.data
        parameter.data = torch.zeros_like(before)
        parameter.data = before

    module, batches = _Averaging(), regression_batches(3)
    wanted = plain_step(module, batches)
    module.write = swapped_for_a_moment
    stack = layers_of(module)
    result = engine_step(module, stack, plan_of(stack), batches, devices=devices(2))
    assert not differences(module, result, wanted)


@pytest.mark.parametrize("place", ["block", "outside"])
def test_a_parameter_with_other_memory_is_refused_on_the_host_too(place: str) -> None:
    module: Any = _Averaging()
    (module.layers[1] if place == "block" else module).write = _by_other_data
    stack = layers_of(module)
    with pytest.raises(ConfigurationError, match="writes into the parameter"):
        engine_step(module, stack, plan_of(stack), regression_batches(3), devices=cpu_workers(2))


def test_on_the_host_every_microbatch_writes_into_the_parameter() -> None:
    module = _Averaging()
    before = module.teacher.weight.detach().clone()
    module.write = _in_place
    stack = layers_of(module)
    engine_step(module, stack, plan_of(stack), regression_batches(3), devices=cpu_workers(2))
    assert torch.equal(module.teacher.weight, before * 0.5**3)
