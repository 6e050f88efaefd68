from dataclasses import replace

import pytest
import torch

from tests.kit.accelerators import NUM, device, needs_cuda, needs_one, workers
from tests.kit.architectures import decoder_stack, tiny_causal_lm, token_batches
from tests.kit.engine import (
    Regressor,
    cpu_workers,
    differences,
    engine_of,
    engine_step,
    layers_of,
    mean_step,
    plain_step,
    plan_of,
    regression_batches,
)

pytestmark = needs_one

TOLERANCE = 1e-4
"""Between a GPU's float32 sums and the processor's."""


@pytest.mark.parametrize("num_devices", range(1, min(NUM, 2) + 1))
@pytest.mark.parametrize("num_workers", [1, 2, 4])
@pytest.mark.parametrize("name", ["qwen3", "gpt_oss"])
def test_gradients_are_those_of_the_processor(
    name: str, num_workers: int, num_devices: int
) -> None:
    module = tiny_causal_lm(name, tied=True)
    stack, batches = decoder_stack(module), token_batches(4)
    plain = plain_step(module, batches)
    plan = plan_of(stack, num_workers=num_workers, num_microbatches=4)
    devices = workers(num_workers, num_devices=num_devices)
    result = engine_step(module, stack, plan, batches, devices=devices)
    assert not differences(module, result, plain, tolerance=TOLERANCE)
    assert all(gradient.device.type == "cpu" for gradient in result.gradients.values())
    assert all(parameter.device.type == "cpu" for parameter in module.parameters())


@pytest.mark.parametrize("resident", [(), ((0, 2), (1,))])
def test_slots_and_blocks_that_stay_change_no_bit(resident: tuple[tuple[int, ...], ...]) -> None:
    module = Regressor(4)
    stack, batches = layers_of(module), regression_batches(4)
    plan = plan_of(stack, num_workers=2, num_microbatches=4)
    other = replace(plan, weight_slots=3 - plan.weight_slots, resident=resident)
    results = []
    for each in (plan, other):
        with engine_of(module, stack, each, devices=workers(2)) as engine:
            results += [mean_step(engine, batches) for _ in range(3)]
    for result in results[1:]:
        assert all(torch.equal(result.gradients[p], g) for p, g in results[0].gradients.items())


@needs_cuda
def test_host_memory_is_page_locked_and_given_back() -> None:
    module = Regressor(4)
    stack, batches = layers_of(module), regression_batches(4)
    plan, devices = plan_of(stack, num_workers=2, num_microbatches=4), workers(2)
    size = sum(parameter.nbytes for parameter in module.parameters())
    with engine_of(module, stack, plan, devices=devices) as engine:
        for _ in range(3):
            mean_step(engine, batches)
        locked = sum(device.page_locked_bytes for device in devices)
        assert locked - engine.staging_bytes == pytest.approx(size, rel=0.03, abs=5 * 64 * 4)
    assert sum(device.page_locked_bytes for device in devices) == 0


def test_device_memory_is_given_back_after_a_step() -> None:
    module = Regressor()
    stack, batches = layers_of(module), regression_batches(3)
    with engine_of(module, stack, plan_of(stack), devices=workers(2)) as engine:
        mean_step(engine, batches)
        torch.accelerator.synchronize()
        in_use = torch.accelerator.memory_allocated(device())
        for _ in range(20):
            mean_step(engine, batches)
        torch.accelerator.synchronize()
        assert torch.accelerator.memory_allocated(device()) == in_use
        assert all(worker.peak_bytes() > 0 for worker in engine.workers)


def test_the_timeline_is_the_devices_own() -> None:
    module = Regressor()
    stack, batches = layers_of(module), regression_batches(3)
    plan = plan_of(stack)
    measured = engine_step(module, stack, plan, batches, devices=workers(2)).timeline
    processor = engine_step(module, stack, plan, batches, devices=cpu_workers(2)).timeline
    assert {e.action for e in measured.entries} == {e.action for e in processor.entries}
    assert measured.makespan_seconds > 0
