import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from roundpipe_lightning.engine.capture.placeholder import LazyTensor
from roundpipe_lightning.planning.schedule.stages import Partition
from tests.kit.architectures import ARCHITECTURES, decoder_stack, tiny_causal_lm, token_batches
from tests.kit.engine import (
    WIDTH,
    Block,
    Regressor,
    auto_plan,
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
    stack_of,
)

WORKERS = (1, 2, 3, 4)
SIZES = ((2, 1), (1, 3), (3, 4), (4, 8))
"""Numbers of workers, and of microbatches."""


@pytest.mark.suite("qwen3-tied", "gpt_oss-untied", "qwen3_moe-untied", "gemma2-untied", "gpt2-tied")
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_causal_lm_equals_plain_loop(name: str, tied: bool) -> None:
    module = tiny_causal_lm(name, tied=tied)
    stack = decoder_stack(module)
    for num_workers, num_microbatches in SIZES:
        batches = token_batches(num_microbatches)
        plain = plain_step(module, batches)
        plan = auto_plan(stack, num_workers=num_workers, num_microbatches=num_microbatches)
        result = engine_step(module, stack, plan, batches)
        assert not differences(module, result, plain), plan
        assert all(parameter.grad is None for parameter in module.parameters())


class Chain(nn.Module):
    """An nn.Sequential of unlike blocks, one of them without parameters."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head = nn.Linear(WIDTH, 6)
        self.chain = nn.Sequential(
            nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 4), nn.LayerNorm(4), nn.Linear(4, 6)
        )
        self.tail = nn.Linear(6, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return functional.mse_loss(self.tail(self.chain(self.head(x))).squeeze(-1), y)


def test_sequential_equals_plain_loop() -> None:
    module = Chain()
    stack = stack_of(tuple(module.chain), name="chain")
    for num_microbatches in (1, 3, 4, 8):
        batches = regression_batches(num_microbatches)
        plain = plain_step(module, batches)
        for num_workers in WORKERS:
            plan = auto_plan(stack, num_workers=num_workers, num_microbatches=num_microbatches)
            assert not differences(module, engine_step(module, stack, plan, batches), plain)


def test_module_that_is_its_own_stack_and_nothing_else() -> None:
    class Bare(nn.Sequential):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            output: Tensor = self(batch[0])
            return output.pow(2).mean()

    module = Bare(*(Block() for _ in range(3)))
    check_parity(module, stack=stack_of(tuple(module)), num_microbatches=4)


def test_module_without_stack_equals_plain_loop() -> None:
    module = Regressor()
    batches = regression_batches(3)
    plain = plain_step(module, batches)
    for num_workers in (1, 3):
        plan = auto_plan(None, num_workers=num_workers, num_microbatches=3)
        assert not differences(module, engine_step(module, None, plan, batches), plain)


PARTITIONS = [
    Partition(forward=(), backward=(4,)),
    Partition(forward=(4,), backward=(0, 4)),
    Partition(forward=(3,), backward=(1, 2, 1)),
    Partition(forward=(1, 2), backward=(1, 1, 1, 1)),
    Partition(forward=(1, 1, 1, 1), backward=(0, 3, 1)),
]


@pytest.mark.parametrize("partition", PARTITIONS, ids=str)
@pytest.mark.parametrize(
    ("num_workers", "round_size", "team_size"),
    [(1, 2, 1), (2, 1, 1), (3, 2, 1), (4, 3, 1), (2, 5, 2), (4, 5, 2), (4, 2, 2), (4, 5, 4)],
)
def test_rounds_and_teams(
    partition: Partition, num_workers: int, round_size: int, team_size: int
) -> None:
    module = Regressor()
    check_parity(
        module,
        num_workers=num_workers,
        num_microbatches=5,
        round_size=round_size,
        team_size=team_size,
        partition=partition,
    )


@pytest.mark.suite("qwen3-True", "gemma2-False", "gpt2-True")
@pytest.mark.parametrize(
    ("name", "masked"),
    [*((name, True) for name in ARCHITECTURES), ("qwen3", False), ("gemma2", False)],
)
def test_a_cache_that_the_configuration_turns_on(name: str, masked: bool) -> None:
    """`use_cache` is on by default: the recompute must not add to what the forward has cached.

    What nobody reads of it is not kept.
    """
    kept: list[Any] = []
    caches: list[weakref.ref[Any]] = []

    def call(view: Any, batch: Any, index: int) -> Tensor:
        ids = batch["input_ids"]
        mask = batch["attention_mask"] if masked else None
        output = view.model(input_ids=ids, attention_mask=mask, labels=ids)
        kept.append({type(layer.keys) for layer in output.past_key_values.layers})
        caches.append(weakref.ref(output.past_key_values))
        return output.loss  # type: ignore[no-any-return]

    module = tiny_causal_lm(name, tied=True)
    assert module.model.config.use_cache
    stack, batches = decoder_stack(module), token_batches(2)
    for devices, tolerance in ((cpu_workers(2), 0.0), (emulated_workers(3), 1e-6)):
        check_parity(
            module,
            batches,
            stack=stack,
            call=call,
            devices=devices,
            tolerance=tolerance,
            num_workers=len(devices),
        )
        assert kept[-2:] == [{LazyTensor}] * 2, "names of tensors, not tensors"
        gc.collect()
        assert not any(cache() for cache in caches)


@pytest.mark.parametrize("num_workers", WORKERS)
def test_one_engine_serves_many_steps_and_sees_updated_parameters(num_workers: int) -> None:
    """Two copies, one trained by each: their parameters stay equal to the bit."""
    ours, theirs = Regressor(), Regressor()
    batches = regression_batches(4)
    with engine_for(ours, num_workers=num_workers, num_microbatches=4) as engine:
        for _ in range(5):
            plain = plain_step(theirs, batches)
            result = mean_step(engine, batches)
            with torch.no_grad():
                for name, parameter in theirs.named_parameters():
                    gradient = plain.gradients[name]
                    assert gradient is not None
                    parameter.sub_(gradient, alpha=0.1)
                for parameter in ours.parameters():
                    parameter.sub_(result.gradients[parameter], alpha=0.1)
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(mine, other)


class Around(Regressor):
    """Carries a tensor of the head around the stack."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        hidden = self.head(x)
        around = torch.tanh(hidden)
        output = self.tail(self.run_blocks(hidden) + around).squeeze(-1)
        loss: Tensor = functional.mse_loss(output, y) + hidden.pow(2).mean()
        return loss


@pytest.mark.parametrize("num_workers", WORKERS)
def test_residual_around_the_stack(num_workers: int) -> None:
    """The head runs backward twice, once from each side: equal but for the order of one sum."""
    module = Around()
    stack = layers_of(module)
    batches = regression_batches(3)
    plain = plain_step(module, batches)
    plan = plan_of(stack, num_workers=num_workers, num_microbatches=3)
    result = engine_step(module, stack, plan, batches)
    assert not differences(module, result, plain, tolerance=1e-6)
    assert not [text for text in differences(module, result, plain) if not text.startswith("head")]


class Conditioned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.gate = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, prompt: Tensor, *, bias: dict[str, Tensor]) -> Tensor:
        gated: Tensor = self.block(x) * torch.sigmoid(self.gate(prompt))
        return gated + bias["value"]


class Prompted(Regressor):
    """A module whose blocks take arguments that need a gradient: a leaf, and one made in the head.

    Args:
        frozen: Whether nothing below the last blocks but the arguments needs a gradient.
    """

    def __init__(self, *, frozen: bool = False) -> None:
        super().__init__(make_block=Conditioned)
        self.prompt = nn.Parameter(torch.randn(1, WIDTH))
        self.bias = nn.Linear(WIDTH, WIDTH)
        if frozen:
            for module in (self.head, *self.layers[:2]):
                module.requires_grad_(requires_grad=False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        hidden, bias = self.head(x), {"value": self.bias(x)}
        for layer in self.layers:
            hidden = layer(hidden, self.prompt, bias=bias)
        return functional.mse_loss(self.tail(hidden).squeeze(-1), y)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("num_workers", [1, 3])
def test_block_arguments_that_need_a_gradient(num_workers: int, frozen: bool) -> None:
    module = Prompted(frozen=frozen)
    stack = layers_of(module)
    batches = regression_batches(3)
    plain = plain_step(module, batches)
    for partition in PARTITIONS:
        plan = plan_of(stack, num_workers=num_workers, num_microbatches=3, partition=partition)
        result = engine_step(module, stack, plan, batches)
        assert not differences(module, result, plain, tolerance=1e-6)
        # What several stages use is summed over the stages in the order of their backward.
        exact = differences(module, result, plain)
        assert all(text.startswith(("prompt", "bias")) for text in exact), exact


FROZEN = {
    "head": ("head",),
    "head and first blocks": ("head", "layers.0", "layers.1"),
    "tail": ("tail",),
    "blocks in the middle": ("layers.1", "layers.2"),
    "all but the tail": ("head", "layers"),
    "all but one bias": ("head", "layers.0", "layers.1", "layers.2.inner", "layers.3", "tail"),
}


@pytest.mark.parametrize("frozen", FROZEN.values(), ids=FROZEN)
def test_frozen_parameters(frozen: tuple[str, ...]) -> None:
    module = Regressor()
    for name in frozen:
        module.get_submodule(name).requires_grad_(requires_grad=False)
    for partition in PARTITIONS:
        check_parity(module, partition=partition)


def test_weights_shared_between_blocks_and_with_the_tail() -> None:
    module = Regressor()
    module.layers[2].inner.weight = module.layers[0].inner.weight  # type: ignore[union-attr]
    module.layers[3].norm.weight = nn.Parameter(torch.ones(WIDTH))  # type: ignore[union-attr]
    module.shared = nn.LayerNorm(WIDTH)  # registered twice: in a block and beside the stack
    module.layers[1].norm = module.shared

    def call(view: Any, batch: Any, index: int) -> Tensor:
        x, y = batch
        output = view.tail(view.shared(view.run_blocks(view.head(x)))).squeeze(-1)
        loss: Tensor = functional.mse_loss(output, y)
        return loss

    stack = layers_of(module)
    batches = regression_batches(4)
    plain = plain_step(module, batches, call=call)
    results = []
    for num_workers in WORKERS:
        plan = plan_of(stack, num_workers=num_workers, num_microbatches=4)
        result = engine_step(module, stack, plan, batches, call=call)
        assert not differences(module, result, plain, tolerance=1e-6)
        results.append(result.gradients)
    assert all(_equal(gradients, results[0]) for gradients in results)


def _equal(one: dict[nn.Parameter, Tensor], other: dict[nn.Parameter, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[p], other[p]) for p in one)


def test_outputs_come_back_detached_and_whole() -> None:
    module = Regressor()
    stack = layers_of(module)
    batches = regression_batches(2)

    def call(view: Any, batch: Any, index: int) -> Any:
        prediction = view(batch[0])
        loss = functional.mse_loss(prediction, batch[1])
        return {"loss": loss, "prediction": prediction, "index": index, "parts": [prediction.sum()]}

    plain = plain_step(module, batches, call=lambda v, b, i: call(v, b, i)["loss"])
    plan = plan_of(stack, num_workers=2, num_microbatches=2)
    result = engine_step(module, stack, plan, batches, call=call)
    assert not differences(module, result, plain)
    for index, (output, batch) in enumerate(zip(result.outputs, batches, strict=True)):
        assert output["index"] == index
        assert not output["prediction"].requires_grad
        assert torch.equal(output["prediction"], module(batch[0]))
        assert torch.equal(output["parts"][0], module(batch[0]).sum())


def test_without_backward_no_gradients_and_the_same_losses() -> None:
    module = Regressor()
    batches = regression_batches(3)
    plain = plain_step(module, batches)
    with engine_for(module, num_workers=2, num_microbatches=3) as engine:
        result = engine.begin_step(
            batches, lambda v, b, i: v.training_step(b, 0), loss_scales=[1.0] * 3, backward=False
        ).result()
    assert not result.gradients
    pairs = zip(result.losses, plain.losses, strict=True)
    assert all(got is not None and torch.equal(got, want) for got, want in pairs)


def test_timeline_holds_every_action_in_order() -> None:
    module = Regressor()
    stack = layers_of(module)
    plan = plan_of(stack, num_workers=3, num_microbatches=4)
    timeline = engine_step(module, stack, plan, regression_batches(4)).timeline
    assert timeline.num_workers == 3
    assert {entry.action for entry in timeline.entries} == set(plan.schedule)
    for actions in plan.schedule.workers:
        spans = {e.action: (e.start_seconds, e.end_seconds) for e in timeline.entries}
        moments = [moment for action in actions for moment in spans[action]]
        assert moments == sorted(moments)
