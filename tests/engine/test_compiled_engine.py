"""Steps of the engine with compiled blocks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from roundpipe_lightning.engine.capture.compiled import BlockCompiler
from roundpipe_lightning.errors import ConfigurationError
from tests.engine.test_compiled import Backend
from tests.kit.architectures import CausalLM, decoder_stack, tiny_causal_lm, token_batches
from tests.kit.engine import (
    differences,
    emulated_workers,
    engine_of,
    layers_of,
    mean_step,
    plain_step,
    plan_of,
)

STEPS = 3


def compiled_steps(module: CausalLM, compiler: BlockCompiler, **options: Any) -> Any:
    """Return the last of some steps, which all see the same weights."""
    stack, batches = decoder_stack(module), token_batches(4)
    plan = plan_of(stack, num_microbatches=4, num_workers=2)
    with engine_of(module, stack, plan, compiler=compiler, **options) as engine:
        results = [mean_step(engine, batches) for _ in range(STEPS)]
    return results[-1]


def test_all_blocks_and_workers_share_code_and_agree_with_plain_pytorch() -> None:
    module, backend = tiny_causal_lm("qwen3", tied=True), Backend()
    compiler = BlockCompiler(backend)
    result = compiled_steps(module, compiler)
    assert backend.count == 2  # with and without a graph
    assert compiler.num_kinds == 1
    assert not differences(module, result, plain_step(module, token_batches(4)), tolerance=1e-5)


def test_the_first_step_compiles_nothing() -> None:
    module, backend = tiny_causal_lm("qwen3", tied=False), Backend()
    stack, batches = decoder_stack(module), token_batches(2)
    plan = plan_of(stack, num_microbatches=2, num_workers=1)
    with engine_of(module, stack, plan, compiler=BlockCompiler(backend)) as engine:
        first = mean_step(engine, batches)
        assert backend.count == 0
    assert not differences(module, first, plain_step(module, batches))


class Beside(nn.Module):
    """A block that leaves a penalty beside its output."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.penalty: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = torch.tanh(self.inner(x))
        self.penalty = y.square().mean()
        return y


class Penalised(nn.Module):
    """A model whose loss has what its blocks leave."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([Beside(), nn.Linear(4, 4), Beside()])

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        del batch_idx
        x, loss = batch, torch.zeros(())
        for layer in self.layers:
            x = layer(x)
            if isinstance(layer, Beside):
                assert layer.penalty is not None
                loss = loss + layer.penalty
        return x.square().mean() + loss


def test_blocks_that_the_loss_looks_into_run_as_they_are() -> None:
    module, compiler = Penalised(), BlockCompiler(Backend())
    stack = layers_of(module)
    batches = [torch.randn(3, 4, generator=torch.Generator().manual_seed(i)) for i in range(2)]
    plan = plan_of(stack, num_microbatches=2, num_workers=1)
    with engine_of(module, stack, plan, compiler=compiler) as engine:
        results = [mean_step(engine, batches) for _ in range(2)]
    assert set(compiler.left_as_they_are) == {"layers.0", "layers.2"}
    assert not differences(module, results[-1], plain_step(module, batches), tolerance=1e-6)


@pytest.mark.parametrize("rate", [0.0, 0.3])
def test_gradients_with_dropout_are_those_of_the_forward_pass(rate: float) -> None:
    """The recompute draws the same numbers: its output has the loss's gradient."""
    torch.manual_seed(0)
    module = Dropping(rate)
    stack = layers_of(module)
    plan = plan_of(stack, num_microbatches=1, num_workers=1)
    with engine_of(module, stack, plan, compiler=BlockCompiler(Backend())) as engine:
        results = [mean_step(engine, [torch.ones(64, 1)]) for _ in range(2)]
    (scaled, *_), gradients = module.layers, results[-1].gradients
    assert isinstance(scaled, Scaled)
    # The loss is the mean of w times what dropout left: its gradient is the loss over w.
    loss = results[-1].losses[0]
    assert loss is not None
    torch.testing.assert_close(gradients[scaled.weight], loss / scaled.weight)


class Scaled(nn.Module):
    def __init__(self, rate: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(1.5))
        self.drop = nn.Dropout(rate)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.drop(x * self.weight)
        return y


class Dropping(nn.Module):
    def __init__(self, rate: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Scaled(rate), Scaled(0.0)])

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        del batch_idx
        for layer in self.layers:
            batch = layer(batch)
        return batch.mean()


def test_compiling_for_emulated_devices_is_refused() -> None:
    module = Penalised()
    stack = layers_of(module)
    with pytest.raises(ConfigurationError, match=r"compile=True.*emulated:0.*Leave it out"):
        engine_of(
            module,
            stack,
            plan_of(stack, num_workers=1),
            devices=emulated_workers(1),
            compiler=BlockCompiler(),
        )
