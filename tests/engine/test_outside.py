"""Whoever asks is asked before every function outside the blocks, and may answer in its place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from roundpipe_lightning.emulation.tagged_tensor import tag_of
from roundpipe_lightning.engine.device.base import Device
from tests.kit.engine import (
    Regressor,
    cpu_workers,
    emulated_workers,
    engine_for,
    engine_of,
    layers_of,
    plan_of,
    regression_batches,
    training_step,
)

SERVERS: dict[str, Callable[[int], list[Device]]] = {
    "processor": cpu_workers,
    "emulated": emulated_workers,
}


class Linears:
    """Notes the linear layers outside the blocks; gives zeros for those of one output."""

    def __init__(self) -> None:
        self.shapes: list[tuple[int, ...]] = []
        self.places: list[set[str | None]] = []

    def __call__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func is not functional.linear:
            return NotImplemented
        self.shapes.append(tuple(args[1].shape))
        self.places.append({tag_of(x) for x in args[:2] if isinstance(x, nn.Parameter | Tensor)})
        if args[1].shape[0] > 1:
            return NotImplemented
        return functional.linear(args[0] * 0, args[1] * 0)


@pytest.mark.parametrize("server", SERVERS)
def test_asked_in_training_outside_the_blocks_only(server: str) -> None:
    module = Regressor(num_blocks=3)
    stack, outside = layers_of(module), Linears()
    plan, devices = plan_of(stack, num_microbatches=2), SERVERS[server](2)
    with engine_of(module, stack, plan, devices=devices) as engine:
        result = engine.step(
            regression_batches(2), training_step, loss_scales=[0.5, 0.5], outside=outside
        )
    assert sorted(outside.shapes) == [(1, 8), (1, 8), (8, 8), (8, 8)]
    assert all(len(places) == 1 for places in outside.places)
    batches = regression_batches(2)
    for loss, (_, target) in zip(result.losses, batches, strict=True):
        assert loss is not None
        torch.testing.assert_close(loss, target.square().mean())


def test_asked_in_evaluation() -> None:
    module = Regressor(num_blocks=3)
    outside = Linears()
    with torch.no_grad(), engine_for(module, num_microbatches=1) as engine:
        prediction = engine.evaluate(
            lambda view, batch: view(batch[0]), regression_batches(1)[0], outside=outside
        )
    assert outside.shapes == [(8, 8), (1, 8)]
    assert not prediction.any()
