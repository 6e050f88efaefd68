import gc
import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from roundpipe_lightning.emulation.tagged_tensor import tag_of
from roundpipe_lightning.engine.capture.placeholder import LazyTensor
from roundpipe_lightning.engine.chain.chain import Chain as EngineChain
from roundpipe_lightning.engine.device.base import CpuDevice
from roundpipe_lightning.engine.engine import Engine
from roundpipe_lightning.errors import CaptureError
from roundpipe_lightning.models.blocks import find_stacks
from roundpipe_lightning.planning.schedule.stages import Partition
from tests.emulation.test_placement import NormBlock
from tests.kit.architectures import (
    ARCHITECTURES,
    CausalLM,
    build_model,
    decoder_stack,
    tiny_causal_lm,
    token_batches,
)
from tests.kit.engine import (
    WIDTH,
    Block,
    Regressor,
    Workers,
    auto_plan,
    check_parity,
    cpu_workers,
    differences,
    emulated_workers,
    engine_for,
    engine_of,
    engine_step,
    layers_of,
    mean_step,
    on_any_workers,
    plain_step,
    plan_of,
    regression_batches,
    stack_of,
)
from tests.kit.kinds import KINDS, batches_of
from tests.kit.moments import with_gradient

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


# Evaluations --------------------------------------------------------------------------------------


without_gradients = pytest.mark.parametrize(
    "mode", [torch.no_grad, torch.inference_mode], ids=["no_grad", "inference_mode"]
)
Mode = Callable[[], AbstractContextManager[Any]]


def _validate(view: Any, batch: Any) -> Any:
    x, y = batch
    prediction = view(x)
    return {"loss": torch.nn.functional.mse_loss(prediction, y), "rows": [prediction, (y, "text")]}


@on_any_workers
@without_gradients
@pytest.mark.parametrize("num_workers", [1, 3])
def test_values_are_those_of_one_device(workers: Workers, mode: Mode, num_workers: int) -> None:
    module = Regressor().eval()
    (batch,) = regression_batches(1, samples_each=5)
    with mode():
        want = _validate(module, batch)
    with engine_for(module, num_microbatches=2, devices=workers(num_workers)) as engine, mode():
        for _ in range(2):
            got = engine.evaluate(_validate, batch)
            assert torch.equal(got["loss"], want["loss"])
            assert torch.equal(got["rows"][0], want["rows"][0])
            assert torch.equal(got["rows"][1][0], batch[1])
            assert got["rows"][1][1] == "text"
            assert tag_of(got["loss"]) is None


def test_it_runs_in_the_callers_thread_and_blocks_may_be_called_again() -> None:
    module = Regressor().eval()
    (batch,) = regression_batches(1)
    threads = set()

    def call(view: Any, batch: Any) -> Tensor:
        threads.add(threading.current_thread())
        first: Tensor = view(batch[0])
        first += view(batch[0] + 1)
        first += view.layers[1](view.layers[3](view.head(batch[0]) * 2)).sum()
        return first

    with torch.no_grad():
        want = call(module, batch)
        for devices in (cpu_workers(3), emulated_workers(3)):
            with engine_for(module, num_microbatches=1, devices=devices) as engine:
                assert torch.equal(engine.evaluate(call, batch), want)
    assert threads == {threading.current_thread()}


@on_any_workers
def test_gradients_in_an_evaluation(workers: Workers) -> None:
    """Lightning's validation_step may enable them, for gradient penalties and the like."""
    module = Regressor().eval()
    (batch,) = regression_batches(1)

    def call(view: Any, batch: Any) -> Tensor:
        with torch.enable_grad():
            x = batch[0].clone().requires_grad_()
            view(x).sum().backward()
            assert x.grad is not None
            gradient: Tensor = x.grad
            return gradient

    want = call(module, batch)
    module.zero_grad()
    with engine_for(module, num_microbatches=1, devices=workers(2)) as engine, torch.no_grad():
        assert torch.equal(engine.evaluate(call, batch), want)
    assert all(parameter.grad is None for parameter in module.parameters())


@on_any_workers
@without_gradients
def test_buffers_that_an_evaluation_writes(workers: Workers, mode: Mode) -> None:
    """Batch normalisation in training mode updates its statistics without gradients, too."""

    def make() -> Regressor:
        module = Regressor(make_block=NormBlock)
        module.register_buffer("num_calls", torch.zeros(()))
        return module

    def call(view: Any, batch: Any) -> Tensor:
        view.num_calls += 1
        output: Tensor = view(batch[0])
        return output

    ours, theirs = make(), make()
    (batch,) = regression_batches(1)
    with engine_for(ours, num_microbatches=1, devices=workers(2)) as engine, mode():
        for _ in range(2):
            assert torch.equal(engine.evaluate(call, batch), call(theirs, batch))
    for (name, mine), other in zip(ours.named_buffers(), theirs.buffers(), strict=True):
        assert torch.equal(mine, other), name
        assert not mine.is_inference()


@on_any_workers
@pytest.mark.parametrize("planned", [[0, 1], [0]], ids=["both", "encoder"])
def test_generation_with_an_encoder_and_two_caches(workers: Workers, planned: list[int]) -> None:
    """Unplanned blocks are streamed; their cache stays where they ran, and comes from there."""
    module = KINDS["encoder-decoder"].build().eval()
    ids = batches_of(KINDS["encoder-decoder"], 1)[0]["input_ids"]

    def generate(view: Any, ids: Tensor) -> Tensor:
        tokens: Tensor = view.model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=5,
            do_sample=False,
            num_beams=2,
        )
        return tokens

    stacks = find_stacks(module, None)
    chain = EngineChain.from_stacks([stacks[i] for i in planned])
    plan = plan_of(chain, num_workers=3, num_microbatches=1)
    devices = workers(3)
    with torch.no_grad():
        want = generate(module, ids)
        with Engine(module, stack=stacks, devices=devices, plan=plan, chain=chain) as engine:
            assert torch.equal(engine.evaluate(generate, ids), want)
            assert all(worker.peak_bytes() for worker in engine.workers[: len(planned) + 1])


@on_any_workers
def test_hidden_states_of_single_blocks(workers: Workers) -> None:
    module = CausalLM(build_model("qwen3"))
    (batch,) = token_batches(1)

    def call(view: Any, batch: Any) -> Any:
        return view.model(**batch, output_hidden_states=True).hidden_states[1].sum()

    stack, devices = decoder_stack(module), workers(2)
    with engine_for(module, stack, num_microbatches=1, devices=devices) as engine, torch.no_grad():
        assert torch.equal(engine.evaluate(call, batch), call(module, batch))


def test_without_a_stack() -> None:
    module = nn.Sequential(nn.Linear(8, 1))
    plan = plan_of(None, num_workers=2, num_microbatches=1)
    x = torch.ones(2, 8)
    with engine_of(module, None, plan, devices=emulated_workers(2)) as engine, torch.no_grad():
        assert torch.equal(engine.evaluate(lambda view, b: view(b), x), module(x))


@on_any_workers
def test_gradients_come_with_their_strides(workers: Workers) -> None:
    seen: list[tuple[int, ...]] = []

    def note(gradient: Tensor) -> Tensor:
        seen.append(gradient.stride())
        return gradient

    class Noting(Block):
        def forward(self, x: Tensor) -> Tensor:
            return with_gradient(super().forward(x), note)

    class Twice(Regressor):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            first, second = (self.run_blocks(self.head(x)) for x in batch)
            return (first.T.contiguous() * second.T.contiguous()).square().mean()

    check_parity(Twice(2, make_block=Noting), [(torch.ones(4, WIDTH),) * 2], devices=workers(2))
    assert seen == [(1, 4)] * 8  # of the plain loop, and ours


class Freezing(Block):
    """Its inner layer is trained in every second step only."""

    def forward(self, x: Tensor, step: int = 0) -> Tensor:
        self.inner.requires_grad_(step % 2 == 1)
        return super().forward(x)


class Steps(Regressor):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        hidden, step = batch
        for layer in self.layers:
            hidden = layer(hidden, step)
        return hidden.square().mean()


@on_any_workers
def test_a_block_freezes_its_own_parameters(workers: Workers) -> None:
    module, twin = Steps(2, make_block=Freezing), Steps(2, make_block=Freezing)
    devices = workers(2)
    with engine_for(module, devices=devices, num_microbatches=1) as engine:
        for step in range(4):
            batches = [(torch.randn(4, WIDTH), step)]
            plain = plain_step(twin, batches)
            assert not differences(module, mean_step(engine, batches), plain), step
            if isinstance(devices[0], CpuDevice):
                assert [p.requires_grad for p in module.parameters()] == [
                    p.requires_grad for p in twin.parameters()
                ], step


def test_a_device_cannot_train_what_was_frozen_before_the_step() -> None:
    module = Steps(2, make_block=Freezing)
    module.get_submodule("layers.1.inner").requires_grad_(requires_grad=False)
    with (
        engine_for(module, devices=emulated_workers(2), num_microbatches=1) as engine,
        pytest.raises(CaptureError, match=r"frozen parameter of shape \(16, 8\) trainable"),
    ):
        mean_step(engine, [(torch.randn(4, WIDTH), 1)])
