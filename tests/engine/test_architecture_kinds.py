import copy
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from roundpipe_lightning.engine.chain.chain import Chain
from roundpipe_lightning.engine.device.base import Device
from roundpipe_lightning.errors import CaptureError
from roundpipe_lightning.models.blocks import find_stacks
from roundpipe_lightning.planning.schedule.stages import Partition
from tests.kit.engine import (
    WIDTH,
    Regressor,
    Workers,
    cpu_workers,
    differences,
    emulated_workers,
    engine_for,
    engine_of,
    layers_of,
    mean_step,
    on_any_workers,
    plain_step,
    plan_of,
    regression_batches,
)
from tests.kit.kinds import KINDS, batches_of
from tests.kit.moments import with_gradient

PARTITIONS = [
    Partition(forward=(2, 2), backward=(0, 1, 2, 1)),
    Partition(forward=(1, 1, 1), backward=(1, 1, 1, 1)),
    Partition(forward=(3,), backward=(1, 3)),
    Partition(forward=(), backward=(4,)),
]
NUM_MICROBATCHES = 3


class Linear(nn.Module):
    """The arithmetic that the blocks here have in common."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.side = nn.Linear(WIDTH, WIDTH)

    def mix(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


def check(
    make_block: Callable[[], nn.Module],
    run: Callable[[Any, Tensor], Any],
    *,
    freeze: Callable[[Any], None] = lambda module: None,
) -> None:
    module = Regressor(4, make_block=make_block)
    freeze(module)
    stack = layers_of(module)
    batches = regression_batches(NUM_MICROBATCHES)

    def call(view: Any, batch: Any, index: int) -> Any:
        hidden = run(view.layers, view.head(batch[0]))
        return functional.mse_loss(view.tail(hidden).squeeze(-1), batch[1])

    plain = plain_step(module, batches, call=call)
    for number, partition in enumerate(PARTITIONS):
        plan = plan_of(stack, num_workers=2, num_microbatches=NUM_MICROBATCHES, partition=partition)
        for devices in (cpu_workers(2), emulated_workers(2))[: 1 + (number in (0, 2))]:
            with engine_of(module, stack, plan, devices=devices) as engine:
                result = mean_step(engine, batches, call=call)
                assert not differences(module, result, plain), (partition, devices)
                with torch.no_grad():
                    want = run(module.layers, module.head(batches[0][0]))
                    got = engine.evaluate(
                        lambda view, b: run(view.layers, view.head(b[0])), batches[0]
                    )
                    assert torch.equal(want, got)


class Wrapping(Linear):
    """Returns its output in a container, with constants around it."""

    def __init__(self, wrap: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.wrap = wrap

    def forward(self, x: Tensor) -> Any:
        return self.wrap(self.mix(x))


@dataclass(frozen=True, slots=True)
class Output:
    kind: str
    hidden: Tensor


CONTAINERS: dict[str, tuple[Callable[[Tensor], Any], Any]] = {
    "tuple of one": (lambda x: (x,), 0),
    "tuple with None": (lambda x: (x, None), 0),
    "second place": (lambda x: (None, x), 1),
    "list": (lambda x: [x, 3], 0),
    "deque": (lambda x: deque([None, x]), 1),
    "object": (lambda x: Output("a", x), "hidden"),
    "dict": (lambda x: {"hidden": x, "kind": "a"}, "hidden"),
}


@pytest.mark.suite("dict", "object", "deque", "second place")
@pytest.mark.parametrize("kind", CONTAINERS)
def test_outputs_in_containers(kind: str) -> None:
    wrap, key = CONTAINERS[kind]

    def run(layers: Any, hidden: Tensor) -> Any:
        for layer in layers:
            output = layer(hidden)
            assert type(output) is type(wrap(torch.zeros(()))), "the container that the user made"
            hidden = getattr(output, key) if isinstance(output, Output) else output[key]
        return hidden

    check(lambda: Wrapping(wrap), run)


class Pair(Linear):
    """Takes and returns two tensors that flow side by side, the second by keyword."""

    def forward(self, x: Tensor, *, other: Tensor | None = None) -> tuple[Tensor, Tensor]:
        other = x if other is None else other
        return self.mix(x) + other, torch.sin(self.side(other))


def _two_flow(layers: Any, hidden: Tensor) -> Any:
    other = hidden
    for layer in layers:
        hidden, other = layer(hidden, other=other)
    return hidden * other


def _one_is_used(layers: Any, hidden: Tensor) -> Any:
    for layer in layers:
        _, hidden = layer(hidden)
    return hidden


def _residual_skips_blocks(layers: Any, hidden: Tensor) -> Any:
    first, _ = layers[0](hidden, other=hidden)
    second, _ = layers[1](first)
    third, _ = layers[2](second, other=first)
    fourth, _ = layers[3](third, other=hidden)
    return fourth


def _sides_reach_the_loss(layers: Any, hidden: Tensor) -> Any:
    sides, states = [], [hidden]
    for layer in layers:
        hidden, side = layer(hidden)
        sides.append(side)
        states.append(hidden)
    return hidden + torch.stack(sides).mean(0) + states[2] * states[1] + sides[0].abs()


def _trained_argument_by_keyword(layers: Any, hidden: Tensor) -> Any:
    bias = torch.sigmoid(hidden)
    for layer in layers:
        hidden, _ = layer(x=hidden, other=bias)
    return hidden + bias


def _detached_between_blocks(layers: Any, hidden: Tensor) -> Any:
    norms = []
    for layer in layers:
        hidden, _ = layer(hidden)
        norms.append(hidden.detach().norm().item())
        with torch.no_grad():
            norms.append(hidden.mean().item())
    assert len(norms) == 8
    hidden.mul_(2)
    return hidden


def _under_autocast(layers: Any, hidden: Tensor) -> Any:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for layer in layers:
            hidden, _ = layer(hidden)
    return hidden.float()


def _through_a_custom_function(layers: Any, hidden: Tensor) -> Any:
    states = []
    for layer in layers:
        hidden, _ = layer(hidden)
        states.append(hidden)
    hidden = hidden + with_gradient(states[0], lambda gradient: 2 * gradient)
    return hidden + with_gradient(states[1], lambda gradient: 3 * gradient, by_name=True)


@pytest.mark.long("_one_is_used", "_residual_skips_blocks", "_detached_between_blocks")
@pytest.mark.parametrize(
    "run",
    [
        _two_flow,
        _one_is_used,
        _residual_skips_blocks,
        _sides_reach_the_loss,
        _trained_argument_by_keyword,
        _detached_between_blocks,
        _under_autocast,
        _through_a_custom_function,
    ],
)
def test_what_user_code_does_with_two_outputs(run: Callable[[Any, Tensor], Any]) -> None:
    check(Pair, run)


def test_side_outputs_of_a_frozen_stack_with_one_trained_block() -> None:
    def freeze(module: Any) -> None:
        for index in (0, 1, 3):
            module.layers[index].requires_grad_(False)
        module.head.requires_grad_(False)

    def run(layers: Any, hidden: Tensor) -> Any:
        sides = []
        for layer in layers:
            hidden, side = layer(hidden)
            sides.append(side)
        return hidden + sides[1] * sides[2]

    check(Pair, run, freeze=freeze)


class Sharing(Linear):
    """Writes into a dict that it was given, and reads what others have written."""

    def forward(self, x: Tensor, shared: dict[str, Any]) -> Tensor:
        if "state" not in shared:
            shared["state"] = [self.side(x)]
        else:
            x = x * shared["state"][0]
        shared["count"] = shared.get("count", 0) + 1
        return self.mix(x)


def test_a_dict_that_blocks_write_into() -> None:
    def run(layers: Any, hidden: Tensor) -> Any:
        shared: dict[str, Any] = {}
        for layer in layers:
            hidden = layer(hidden, shared)
        assert shared["count"] == 4
        return hidden + shared["state"][0]

    check(Sharing, run)


class Passing(Linear):
    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        return self.mix(x) * mask, mask


def test_a_block_that_hands_an_argument_back() -> None:
    def run(layers: Any, hidden: Tensor) -> Any:
        mask = given = torch.sigmoid(hidden)
        for layer in layers[:-1]:
            hidden, mask = layer(hidden, mask)
            assert mask is given
        output, _ = layers[-1](hidden, mask)
        return output

    check(Passing, run)


class Rectifying(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.relu(x))  # type: ignore[no-any-return]


def test_modules_that_say_they_work_in_place() -> None:
    check(Rectifying, _each)


class Cache:
    """A key-value cache as a block sees it: an object that keeps tensors."""

    def __init__(self) -> None:
        self.states: list[Tensor] = []


class Caching(Linear):
    def forward(self, x: Tensor, cache: Cache, *, read: bool = False) -> Tensor:
        cache.states.append(self.side(x))
        return self.mix(x) + cache.states[-1] + (cache.states[0] if read else 0)


def _with_cache(layers: Any, hidden: Tensor, *, read: bool = False) -> tuple[Tensor, Cache]:
    cache = Cache()
    for layer in layers:
        hidden = layer(hidden, cache, read=read)
    return hidden, cache


def test_a_cache_that_every_block_adds_to() -> None:
    def run(layers: Any, hidden: Tensor) -> Any:
        hidden, cache = _with_cache(layers, hidden)
        assert len(cache.states) == 4
        return hidden

    check(Caching, run)


# --------------------------------------------------------------------------------- what is refused


class Writing(Linear):
    def forward(self, x: Tensor) -> Tensor:
        x += 1
        return self.mix(x)


class Forgetful(Linear):
    def forward(self, x: Tensor, calls: list[int]) -> Any:
        calls.pop()
        return self.mix(x)


def _cached_states_in_the_loss(layers: Any, hidden: Tensor) -> Any:
    hidden, cache = _with_cache(layers, hidden)
    return hidden + cache.states[0]


def _each(layers: Any, hidden: Tensor, *args: Any) -> Tensor:
    for layer in layers:
        hidden = layer(hidden, *args)
    return hidden


REFUSED: dict[str, tuple[type[nn.Module], Callable[[Any, Tensor], Any], str]] = {
    "a cache that carries gradients between blocks": (
        Caching,
        lambda layers, hidden: _with_cache(layers, hidden, read=True)[0],
        r"'layers\.0' has put into an object",
    ),
    "a cache whose tensors reach the loss": (
        Caching,
        _cached_states_in_the_loss,
        r"'layers\.0' has put into an object",
    ),
    "a block that writes into its input": (
        Writing,
        lambda layers, hidden: _each(layers, hidden.clone()),
        r"'layers\.0' writes into a tensor that it was given",
    ),
    "a block that takes something out of a container": (
        Forgetful,
        lambda layers, hidden: _each(layers, hidden, [1, 2, 3, 4]),
        r"'layers\.0' took .* out of a container",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_refused(kind: str) -> None:
    make_block, run, match = REFUSED[kind]
    module = Regressor(4, make_block=make_block)
    for partition in PARTITIONS[:3]:
        with (
            engine_for(module, num_microbatches=2, partition=partition) as engine,
            pytest.raises(CaptureError, match=match),
        ):
            mean_step(
                engine,
                regression_batches(2),
                call=lambda view, batch, index: run(view.layers, view.head(batch[0])).mean(),
            )


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
    check_kind(name, cpu_workers(2), tolerance=0.0)


@pytest.mark.suite(
    "diffusion transformer", "residual network with running statistics", "encoder-decoder"
)
@pytest.mark.parametrize("name", ON_DEVICES)
def test_kinds_on_devices(name: str) -> None:
    check_kind(name, emulated_workers(2), tolerance=1e-6)  # sums of a round are made on the device


def check_kind(name: str, devices: Sequence[Device], *, tolerance: float) -> None:
    kind = KINDS[name]
    num_microbatches = 1 if "statistics" in name else NUM_MICROBATCHES
    module, batches = kind.build(), batches_of(kind, num_microbatches)
    stacks = find_stacks(module, kind.blocks)
    assert tuple(stack.name for stack in stacks) == kind.stacks
    original = copy.deepcopy(module.state_dict())
    plain = plain_step(module, batches)
    buffers = {n: b.clone() for n, b in module.named_buffers()}
    chain = Chain.from_stacks(stacks[-1:])
    counts: Any = {"num_workers": 2, "num_microbatches": num_microbatches}
    plan = plan_of(chain, **counts)
    with engine_of(module, stacks, plan, devices=devices, chain=chain) as engine:
        for _ in range(2):
            module.load_state_dict(original)
            result = mean_step(engine, batches)
            assert not differences(module, result, plain, tolerance=tolerance)
            for buffer_name, buffer in module.named_buffers():
                assert torch.equal(buffer, buffers[buffer_name]), buffer_name
            engine.plan_for(result.chain, plan_of(result.chain, **counts))
        assert not result.num_streamed
    assert sum(len(stack.blocks) for stack in stacks) <= len(result.chain)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@on_any_workers
def test_compiled_modules_run_as_they_are(workers: Workers) -> None:
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
    plan = plan_of(Chain.from_stacks([stack]), num_workers=2, num_microbatches=4)
    with engine_of(module, stack, plan, devices=workers(2)) as engine:
        assert not differences(module, mean_step(engine, batches), plain, tolerance=1e-6)
        with torch.inference_mode():
            engine.evaluate(lambda view, batch: view(batch[0]), batches[0])
    assert not compiled
