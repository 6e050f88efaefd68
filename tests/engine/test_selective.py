"""A selective recompute gives the gradients of a full one, without running attention again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from roundpipe_lightning.emulation.server import EmulatedDevice
from roundpipe_lightning.engine.device.base import CpuDevice, Device
from roundpipe_lightning.planning.schedule.plan import Plan
from roundpipe_lightning.planning.schedule.stages import ATTENTION_OPERATIONS, RecomputePolicy
from tests.kit.architectures import decoder_stack, tiny_causal_lm, token_batches
from tests.kit.engine import (
    differences,
    engine_of,
    engine_step,
    plain_step,
    plan_of,
    training_step,
)

NUM_MICROBATCHES = 3


def selective(plan: Plan) -> Plan:
    return replace(plan, recompute=RecomputePolicy.SELECTIVE)


@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe"])
@pytest.mark.parametrize("emulated", [False, True])
def test_gradients_are_the_same_to_the_bit(name: str, emulated: bool) -> None:
    module = tiny_causal_lm(name, tied=True)
    stack, batches = decoder_stack(module), token_batches(NUM_MICROBATCHES)
    plan = selective(plan_of(stack, num_microbatches=NUM_MICROBATCHES))
    devices: list[Device] = [(EmulatedDevice if emulated else CpuDevice)(i) for i in range(2)]
    result = engine_step(module, stack, plan, batches, devices=devices)
    assert not differences(module, result, plain_step(module, batches))


class Counter(TorchDispatchMode):
    """Counts how often attention runs."""

    runs = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.runs += func._schema.name in ATTENTION_OPERATIONS
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("policy", "times"), [("full", 2), ("selective", 1)])
def test_attention_runs_once_per_block_and_microbatch(policy: str, times: int) -> None:
    module = tiny_causal_lm("qwen3", tied=False)
    stack, counter = decoder_stack(module), Counter()  # type: ignore[no-untyped-call]

    plan = replace(plan_of(stack, num_workers=1), recompute=RecomputePolicy(policy))
    with engine_of(module, stack, plan) as engine:
        result = engine.step(
            token_batches(plan.num_microbatches),
            training_step,
            loss_scales=[1.0] * plan.num_microbatches,
            thread_context=lambda: counter,
        )
    assert all(loss is not None for loss in result.losses)
    assert counter.runs == times * len(stack.blocks) * plan.num_microbatches
