import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from roundpipe_lightning.emulation.tagged_tensor import tag_of
from roundpipe_lightning.engine.chain.chain import Chain
from roundpipe_lightning.engine.engine import Engine
from roundpipe_lightning.models.blocks import find_stacks
from tests.emulation.test_placement import NormBlock
from tests.engine.test_chain import one_block_each
from tests.kit.architectures import (
    CausalLM,
    build_model,
    decoder_stack,
    evaluating,
    tiny_causal_lm,
    token_batches,
)
from tests.kit.engine import (
    WIDTH,
    Regressor,
    Workers,
    cpu_workers,
    differences,
    emulated_workers,
    engine_for,
    engine_of,
    mean_step,
    on_any_workers,
    plain_step,
    plan_of,
    regression_batches,
)
from tests.kit.kinds import KINDS, batches_of

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


class _InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.activation = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.linear(self.activation(x))
        return out


@on_any_workers
@without_gradients
def test_blocks_that_write_into_their_arguments(workers: Workers, mode: Mode) -> None:
    module = Regressor()
    module.layers = nn.ModuleList(_InPlace() for _ in range(4))
    (batch,) = regression_batches(1)
    with mode():
        want = _validate(module.eval(), batch)["loss"]
    with engine_for(module, num_microbatches=1, devices=workers(2)) as engine, mode():
        assert torch.equal(engine.evaluate(_validate, batch)["loss"], want)


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


@pytest.mark.suite(
    "qwen3-emulated_workers-inference_mode",
    "gemma2-cpu_workers-no_grad",
    "gpt2-cpu_workers-no_grad",
)
@pytest.mark.parametrize(
    ("workers", "mode"), [(cpu_workers, torch.no_grad), (emulated_workers, torch.inference_mode)]
)
@pytest.mark.parametrize("name", ["qwen3", "gpt2", "gemma2"])
def test_generation_with_a_cache_gives_the_same_tokens(
    workers: Workers, mode: Mode, name: str
) -> None:
    module = tiny_causal_lm(name, tied=True)
    (batch,) = token_batches(1)
    ids = batch["input_ids"]

    def generate(view: Any, ids: Tensor) -> Tensor:
        tokens: Tensor = view.model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=4,
            do_sample=False,
            use_cache=True,
        )
        return tokens

    batches = token_batches(2)
    plain = plain_step(module, batches)
    with evaluating(module), mode():
        want = generate(module, ids)
    with engine_for(
        module, decoder_stack(module), num_microbatches=2, devices=workers(3)
    ) as engine:
        for _ in range(2):
            with evaluating(module), mode():
                assert torch.equal(engine.evaluate(generate, ids), want)
            # Of both uses a device sums its round.
            tolerance = 0.0 if workers is cpu_workers else 1e-6
            assert not differences(module, mean_step(engine, batches), plain, tolerance=tolerance)


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
    chain = Chain.from_stacks([stacks[i] for i in planned])
    plan = one_block_each(chain, num_workers=3, num_microbatches=1)
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
