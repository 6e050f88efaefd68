import inspect
import random
import threading
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import get_testing_overrides
from torch.utils.checkpoint import checkpoint

from roundpipe_lightning.emulation.server import EmulatedDevice
from roundpipe_lightning.engine.capture.randomness import (
    RANDOM_FUNCTIONS,
    RandomStream,
    StepDraws,
    UnrepeatableDrawWarning,
    mix,
)
from roundpipe_lightning.engine.chain.saved_outputs import ChangedRecomputeWarning
from roundpipe_lightning.engine.steps import StepResult
from roundpipe_lightning.errors import CaptureError, RandomnessError
from roundpipe_lightning.planning.schedule.stages import Partition
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
    engine_of,
    engine_step,
    layers_of,
    mean_step,
    plain_step,
    plan_of,
    regression_batches,
)
from tests.kit.moments import call_in_backward


def test_gradients_are_those_of_a_plain_loop_with_the_same_masks() -> None:
    """A plain loop that enters the same streams by hand gives the same bits."""
    module = Regressor(make_block=lambda: Block(0.3))
    stack = layers_of(module)
    batches = regression_batches(3)

    torch.manual_seed(5)
    step_seed = int(torch.randint(0, 2**62, (), device="cpu"))

    def call(model: Any, batch: Any, index: int) -> Tensor:
        stream = RandomStream(
            StepDraws(threading.Lock()),
            step_seed=step_seed,
            microbatch=index,
            generators=lambda: (torch.default_generator,),
        )

        class Mode(torch.overrides.TorchFunctionMode):
            def __torch_function__(
                self, func: Any, types: Any, args: Any = (), kwargs: Any = None
            ) -> Any:
                return stream.call(func, args, kwargs or {})

        with Mode():
            hidden = model.head(batch[0])
            for block, layer in enumerate(model.layers):
                stream.begin_block(block)
                hidden = layer(hidden)
                stream.end_block()
            loss: Tensor = functional.mse_loss(model.tail(hidden).squeeze(-1), batch[1])
        return loss

    plain = plain_step(module, batches, call=call)
    for num_workers in (1, 2):
        torch.manual_seed(5)
        plan = plan_of(stack, num_workers=num_workers, num_microbatches=3)
        assert not differences(module, engine_step(module, stack, plan, batches), plain)


class Noisy(Regressor):
    """Draws in the head, in blocks and in the tail, in all the ways that users do."""

    def __init__(self) -> None:
        super().__init__(make_block=lambda: Block(0.4))
        self.attention = nn.MultiheadAttention(WIDTH, 2, dropout=0.2, batch_first=True)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        hidden = functional.dropout(self.head(x), 0.1) + 0.1 * torch.randn_like(x)
        keep = torch.rand(x.shape[0], 1, device=x.device)
        hidden = self.run_blocks(hidden)[None]
        hidden = self.attention(hidden, hidden, hidden)[0][0]
        hidden = hidden.index_fill(0, torch.randperm(3, device=x.device)[:1], 0.0)
        loss: Tensor = functional.mse_loss(self.tail(hidden).squeeze(-1) * keep[:, 0], y)
        return loss * torch.empty_like(loss).uniform_(0.5, 1.5)


def _steps(module: Any, stack: Any, *, num_workers: int, seed: int = 3) -> list[StepResult]:
    torch.manual_seed(seed)
    plan = auto_plan(stack, num_workers=num_workers, num_microbatches=4)
    with engine_of(module, stack, plan) as engine:
        return [mean_step(engine, regression_batches(4)) for _ in range(2)]


def _same(one: StepResult, other: StepResult) -> bool:
    losses = zip(one.losses, other.losses, strict=True)
    return (
        all(a is not None and b is not None and torch.equal(a, b) for a, b in losses)
        and one.gradients.keys() == other.gradients.keys()
        and all(torch.equal(one.gradients[p], other.gradients[p]) for p in one.gradients)
    )


def test_the_number_of_workers_changes_nothing() -> None:
    module = Noisy()
    stack = layers_of(module)
    want = _steps(module, stack, num_workers=1)
    for num_workers in (2, 3, 4):
        got = _steps(module, stack, num_workers=num_workers)
        assert all(_same(a, b) for a, b in zip(got, want, strict=True))
    assert not _same(*want), "two steps"
    assert not _same(want[0], _steps(module, stack, num_workers=2, seed=4)[0])


def test_emulated_devices_draw_the_same_numbers() -> None:
    module = Noisy()
    stack = layers_of(module)
    plan = plan_of(stack, num_workers=3, num_microbatches=4)
    results = []
    for devices in (None, [EmulatedDevice(i) for i in range(3)]):
        torch.manual_seed(3)
        results.append(engine_step(module, stack, plan, regression_batches(4), devices=devices))
    assert _same(*results)


def test_evaluation_draws_as_plain_pytorch_does() -> None:
    module = Noisy()
    (batch,) = regression_batches(1)
    torch.manual_seed(2)
    with torch.no_grad():
        want, state = module.training_step(batch, 0), torch.get_rng_state()
    with engine_for(module, num_workers=3, num_microbatches=1) as engine, torch.no_grad():
        torch.manual_seed(2)
        got = engine.evaluate(lambda view, b: view.training_step(b, 0), batch)
    assert torch.equal(got, want)
    assert torch.equal(torch.get_rng_state(), state)


# ------------------------------------------------------------------- generators of the engine's own


class _Unused(StepDraws):
    def draw(self, seed: int, generators: Any, call: Any) -> Any:
        raise AssertionError("the process-wide generators are seeded")


OWN_DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda x: functional.dropout(x, 0.3),
    "dropout in place": lambda x: functional.dropout(x * 1.0, 0.3, inplace=True),
    "torch.dropout": lambda x: torch.dropout(x, 0.3, train=True),
    "nothing dropped": lambda x: functional.dropout(x, 0.3, training=False),
    "all dropped": lambda x: functional.dropout(x, 1.0),
    "a module": nn.Dropout(0.7),
    "bernoulli": lambda x: x * torch.empty_like(x).bernoulli_(0.4),
    "uniform": lambda x: x + torch.empty_like(x).uniform_(-1, 1),
    "normal": lambda x: x + torch.zeros_like(x).normal_(0.0, 2.0),
    "random": lambda x: x + torch.zeros_like(x).random_(0, 5),
}


def _called(draws: StepDraws, function: Callable[[Tensor], Tensor], x: Tensor) -> list[Tensor]:
    stream = RandomStream(
        draws, step_seed=3, microbatch=1, generators=lambda: (torch.default_generator,)
    )

    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            return stream.call(func, args, kwargs or {})

    x = x.clone().requires_grad_()
    stream.begin_block(0)
    with Mode():
        out = function(x)
    out.sum().backward()
    assert x.grad is not None
    return [out.detach(), x.grad]


@pytest.mark.parametrize("name", OWN_DRAWS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_own_generators_give_the_bits_of_the_process_wide_one(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.randn(7, 33).to(dtype).t()
    state = torch.get_rng_state()
    found = _called(_Unused(threading.Lock()), OWN_DRAWS[name], x)
    assert torch.equal(torch.get_rng_state(), state)
    monkeypatch.setattr(RandomStream, "_call_seeded", lambda *_, **__: NotImplemented)
    wanted = _called(StepDraws(threading.Lock()), OWN_DRAWS[name], x)
    assert all(map(torch.equal, found, wanted))


# --------------------------------------------------------------------------- the list of functions


def _operations_tagged_random() -> set[str]:
    names = set()
    for full_name in torch._C._dispatch_get_all_op_names():
        namespace, _, name = full_name.partition("::")
        name, _, overload = name.partition(".")
        if namespace != "aten" or name.startswith("_"):
            continue
        operation = getattr(getattr(torch.ops.aten, name), overload or "default")
        if torch.Tag.nondeterministic_seeded in operation.tags:
            names.add(name)
    return names


def test_every_public_operation_that_draws_is_known() -> None:
    assert _operations_tagged_random() - RANDOM_FUNCTIONS == set()


def test_every_python_function_around_them_is_known() -> None:
    """A mode sees these as one call and not what they call inside."""
    unknown = set()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        functions = list(get_testing_overrides())
    for function in functions:
        code = getattr(inspect.unwrap(function), "__code__", None)
        if code is not None and RANDOM_FUNCTIONS & set(code.co_names):
            unknown.add(function.__name__)
    assert unknown - RANDOM_FUNCTIONS == set()


def test_mix_spreads_small_integers() -> None:
    seeds = {mix(a, b, c) for a in range(8) for b in range(8) for c in range(8)}
    assert len(seeds) == 8**3
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert mix(1, 2) != mix(2, 1)


# --------------------------------------------------------------------- what a recompute cannot see


class Calling(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.linear(x)
        return self.function(hidden)


def _step_with(function: Callable[[Tensor], Tensor], partition: Partition | None = None) -> None:
    module = Regressor(2, make_block=lambda: Calling(function))
    stack = layers_of(module)
    plan = plan_of(stack, num_workers=2, num_microbatches=2, partition=partition)
    engine_step(module, stack, plan, regression_batches(2))


def _dropout_without_torch_function(x: Tensor) -> Tensor:
    with torch._C.DisableTorchFunction():
        return functional.dropout(x, 0.5)


_GENERATOR = torch.Generator()


def test_a_generator_that_the_forward_pass_moves_on_is_refused() -> None:
    with pytest.raises(RandomnessError, match=r"a torch\.Generator"):
        _step_with(lambda x: x * torch.rand(x.shape, generator=_GENERATOR))


# Another microbatch's backward pass may run beside them.
@pytest.mark.filterwarnings(
    "ignore::roundpipe_lightning.engine.capture.randomness.UnrepeatableDrawWarning"
)
@pytest.mark.parametrize(
    "function",
    [
        _dropout_without_torch_function,
        lambda x: torch.ops.aten.native_dropout.default(x, 0.5, True)[0],
    ],
)
def test_draws_that_are_not_seen_show_in_the_recompute(
    function: Callable[[Tensor], Tensor],
) -> None:
    with pytest.warns(ChangedRecomputeWarning, match="Draw random numbers with torch"):
        _step_with(function)


def _draw() -> None:
    torch.rand(())


class Drawing(Block):
    def forward(self, x: Tensor) -> Tensor:
        return call_in_backward(super().forward(x), _draw)


@pytest.mark.parametrize("workers", [cpu_workers, emulated_workers])
def test_draws_in_a_backward_pass_are_warned_of_once(workers: Any) -> None:
    module, batches = Regressor(2), regression_batches(2)
    module.layers[1] = Drawing()
    with engine_for(module, devices=workers(2), num_microbatches=2) as engine:
        with pytest.warns(UnrepeatableDrawWarning, match="Draw them in the forward pass") as seen:
            mean_step(engine, batches)
        assert len(seen) == 1
        mean_step(engine, batches)


def _seed_for_a_draw(x: Tensor) -> Tensor:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return x + torch.rand_like(x)


def _seed_python(x: Tensor) -> Tensor:
    random.seed(3)
    return x + random.random()


def _draw_twice(x: Tensor) -> Tensor:
    before = torch.get_rng_state()
    noise = torch.rand_like(x)
    torch.set_rng_state(before)
    torch.manual_seed(torch.initial_seed())
    return x + noise


@pytest.mark.filterwarnings("ignore:Block .* gave other values in its recompute")
@pytest.mark.parametrize("num_microbatches", [1, 3])
@pytest.mark.parametrize(
    "function",
    [
        _seed_for_a_draw,
        _draw_twice,
        lambda x: x + torch.manual_seed(3).initial_seed(),
        _seed_python,
        lambda x: x * float(np.random.rand()),  # noqa: NPY002
        _dropout_without_torch_function,
    ],
)
def test_a_block_that_seeds_or_draws_past_the_engine_is_warned_of_once(
    function: Callable[[Tensor], Tensor], num_microbatches: int
) -> None:
    module, batches = Regressor(2, make_block=lambda: Calling(function)), regression_batches(3)
    torch.rand(())
    with engine_for(module, num_microbatches=num_microbatches) as engine:
        with pytest.warns(UnrepeatableDrawWarning, match=r"A block.*torch\.Generator") as seen:
            mean_step(engine, batches[:num_microbatches])
        mean_step(engine, batches[:num_microbatches])
    assert [w.category for w in seen].count(UnrepeatableDrawWarning) == 1


def test_a_generator_that_a_block_seeds_is_allowed() -> None:
    _step_with(lambda x: x * torch.rand(x.shape, generator=torch.Generator().manual_seed(1)))


PARTITIONS = {
    0: Partition(forward=(2,), backward=(0, 2)),
    2: Partition(forward=(), backward=(2,)),
}


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("fused", [0, 2])
def test_dropout_under_activation_checkpointing_is_refused(reentrant: bool, fused: int) -> None:
    def function(x: Tensor) -> Tensor:
        dropped: Tensor = checkpoint(functional.dropout, x, 0.5, use_reentrant=reentrant)
        return dropped

    with pytest.raises(RandomnessError, match="gradient_checkpointing_disable"):
        _step_with(function, PARTITIONS[fused])


class Checkpointed(Regressor):
    """Checkpoints its blocks."""

    reentrant = with_code = False

    def run_blocks(self, hidden: Tensor) -> Tensor:
        for layer in self.layers:
            run = (lambda x, layer=layer: layer(x).tanh()) if self.with_code else layer
            hidden = checkpoint(run, hidden, use_reentrant=self.reentrant)
        return hidden


@pytest.mark.parametrize("partition", PARTITIONS.values())
def test_activation_checkpointing_of_and_in_blocks(partition: Partition) -> None:
    run = partial(checkpoint, torch.tanh, use_reentrant=False)
    module = Checkpointed(2, make_block=lambda: Calling(run))
    check_parity(module, num_microbatches=2, partition=partition)
    for name in ("with_code", "reentrant"):
        setattr(module, name, True)
        with pytest.raises(CaptureError, match="checkpoint single blocks with use_reentrant=False"):
            check_parity(module, num_microbatches=2, partition=partition)
