import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from roundpipe_lightning.engine.chain.chain import Chain
from roundpipe_lightning.engine.device.base import Device
from roundpipe_lightning.engine.engine import Engine
from roundpipe_lightning.models.blocks import find_stacks
from tests.engine.test_chain import one_block_each
from tests.kit.engine import (
    TIMEOUT_SECONDS,
    Regressor,
    cpu_workers,
    differences,
    emulated_workers,
    engine_of,
    layers_of,
    mean_step,
    plain_step,
    regression_batches,
)
from tests.kit.kinds import KINDS, batches_of

NUM_MICROBATCHES = 3


ON_DEVICES = (
    "encoder-decoder",
    "residual network with running statistics",
    "vision and language",
    "vision and language, the tower's features in several layers",
    "state spaces, attention and experts",
    "diffusion transformer",
)


@pytest.mark.parametrize("name", KINDS)
def test_every_kind(name: str) -> None:
    check(name, cpu_workers(2), tolerance=0.0)


@pytest.mark.parametrize("name", ON_DEVICES)
def test_kinds_on_devices(name: str) -> None:
    check(name, emulated_workers(2), tolerance=1e-6)  # sums of a round are made on the device


def check(name: str, devices: Sequence[Device], *, tolerance: float) -> None:
    kind = KINDS[name]
    num_microbatches = 1 if "statistics" in name else NUM_MICROBATCHES
    module, batches = kind.build(), batches_of(kind, num_microbatches)
    stacks = find_stacks(module, kind.blocks)
    assert tuple(stack.name for stack in stacks) == kind.stacks
    original = copy.deepcopy(module.state_dict())
    plain = plain_step(module, batches)
    buffers = {n: b.clone() for n, b in module.named_buffers()}
    chain = Chain.from_stacks(stacks[-1:])
    counts = {"num_workers": 2, "num_microbatches": num_microbatches}
    with Engine(
        module,
        stack=stacks,
        devices=devices,
        plan=one_block_each(chain, **counts),
        chain=chain,
        timeout_seconds=TIMEOUT_SECONDS,
    ) as engine:
        for _ in range(2):
            module.load_state_dict(original)
            result = mean_step(engine, batches)
            assert not differences(module, result, plain, tolerance=tolerance)
            for buffer_name, buffer in module.named_buffers():
                assert torch.equal(buffer, buffers[buffer_name]), buffer_name
            engine.plan_for(result.chain, one_block_each(result.chain, **counts))
        assert not result.num_streamed
    assert sum(len(stack.blocks) for stack in stacks) <= len(result.chain)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("kind", ["cpu", "emulated"])
def test_compiled_modules_run_as_they_are(kind: str) -> None:
    """Compiled code would run the user's module, whose parameters are not on the worker."""
    compiled: list[Any] = []

    def compile_graph(graph: Any, inputs: Any) -> Any:
        compiled.append(graph)
        return graph.forward

    module: Any = Regressor(3)
    for index, layer in enumerate(module.layers):
        module.layers[index] = torch.compile(layer, backend=compile_graph)
    module.head = torch.compile(module.head, backend=compile_graph)
    module.tail.compile(backend=compile_graph)
    batches = regression_batches(4)
    plain = plain_step(module, batches)
    assert compiled
    compiled.clear()
    torch._dynamo.reset()
    stack = layers_of(module)
    plan = one_block_each(Chain.from_stacks([stack]), num_workers=2, num_microbatches=4)
    devices = cpu_workers(2) if kind == "cpu" else emulated_workers(2)
    with engine_of(module, stack, plan, devices=devices) as engine:
        assert not differences(module, mean_step(engine, batches), plain, tolerance=1e-6)
        with torch.inference_mode():
            engine.evaluate(lambda view, batch: view(batch[0]), batches[0])
    assert not compiled
