"""Blocks that take and return more than one tensor, and what user code does with it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from roundpipe_lightning.errors import CaptureError
from roundpipe_lightning.planning.schedule.stages import Partition
from tests.kit.engine import (
    WIDTH,
    Regressor,
    cpu_workers,
    differences,
    emulated_workers,
    engine_of,
    layers_of,
    mean_step,
    plain_step,
    plan_of,
    regression_batches,
)

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
    emulated: bool = True,
) -> None:
    """Compare with plain PyTorch in several partitions and on both kinds of workers."""
    module = Regressor(4, make_block=make_block)
    freeze(module)
    stack = layers_of(module)
    batches = regression_batches(NUM_MICROBATCHES)

    def call(view: Any, batch: Any, index: int) -> Any:
        hidden = run(view.layers, view.head(batch[0]))
        return functional.mse_loss(view.tail(hidden).squeeze(-1), batch[1])

    plain = plain_step(module, batches, call=call)
    for partition in PARTITIONS:
        plan = plan_of(stack, num_workers=2, num_microbatches=NUM_MICROBATCHES, partition=partition)
        for devices in (cpu_workers(2), emulated_workers(2))[: 2 if emulated else 1]:
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
    """An output of its own kind."""

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


def test_two_tensors_flow() -> None:
    def run(layers: Any, hidden: Tensor) -> Any:
        other = None
        for layer in layers:
            hidden, other = layer(hidden, other=other)
        assert other is not None
        return hidden * other

    check(Pair, run)


def test_only_one_of_two_outputs_is_used() -> None:
    def run(layers: Any, hidden: Tensor) -> Any:
        for layer in layers:
            _, hidden = layer(hidden)
        return hidden

    check(Pair, run)


def test_a_residual_skips_blocks() -> None:
    def run(layers: Any, hidden: Tensor) -> Any:
        first, _ = layers[0](hidden, other=hidden)
        second, _ = layers[1](first)
        third, _ = layers[2](second, other=first)
        fourth, _ = layers[3](third, other=hidden)
        return fourth

    check(Pair, run)


def test_side_outputs_reach_the_loss() -> None:
    def run(layers: Any, hidden: Tensor) -> Any:
        sides, states = [], [hidden]
        for layer in layers:
            hidden, side = layer(hidden)
            sides.append(side)
            states.append(hidden)
        return hidden + torch.stack(sides).mean(0) + states[2] * states[1] + sides[0].abs()

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


def test_a_trained_tensor_given_to_all_blocks_by_keyword() -> None:
    def run(layers: Any, hidden: Tensor) -> Any:
        bias = torch.sigmoid(hidden)
        for layer in layers:
            hidden, _ = layer(x=hidden, other=bias)
        return hidden + bias

    check(Pair, run)


class Passing(Linear):
    """Returns something it was given."""

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


class Cache:
    """What a key-value cache is to a block: an object that keeps tensors."""

    def __init__(self) -> None:
        self.states: list[Tensor] = []


class Caching(Linear):
    def forward(self, x: Tensor, cache: Cache, *, read: bool = False) -> Tensor:
        cache.states.append(self.side(x))
        return self.mix(x) + cache.states[-1] + (cache.states[0] if read else 0)


def test_a_cache_that_every_block_adds_to() -> None:
    def run(layers: Any, hidden: Tensor) -> Any:
        cache = Cache()
        for layer in layers:
            hidden = layer(hidden, cache)
        assert len(cache.states) == 4
        return hidden

    check(Caching, run)


def _refused(
    make_block: Callable[[], nn.Module], call: Callable[[Any, Any, int], Any], *, match: str
) -> None:
    module = Regressor(4, make_block=make_block)
    stack = layers_of(module)
    for partition in PARTITIONS[:3]:
        plan = plan_of(stack, num_workers=2, num_microbatches=2, partition=partition)
        with (
            engine_of(module, stack, plan) as engine,
            pytest.raises(CaptureError, match=match),
        ):
            mean_step(engine, regression_batches(2), call=call)


def test_a_cache_that_carries_gradients_between_blocks() -> None:
    def call(view: Any, batch: Any, index: int) -> Any:
        cache, hidden = Cache(), view.head(batch[0])
        for layer in view.layers:
            hidden = layer(hidden, cache, read=True)
        return hidden.mean()

    _refused(Caching, call, match=r"'layers\.0' has put into an object")


def test_a_cache_whose_tensors_reach_the_loss() -> None:
    def call(view: Any, batch: Any, index: int) -> Any:
        cache, hidden = Cache(), view.head(batch[0])
        for layer in view.layers:
            hidden = layer(hidden, cache)
        return (hidden + cache.states[0]).mean()

    _refused(Caching, call, match=r"'layers\.0' has put into an object")


class Writing(Linear):
    def forward(self, x: Tensor) -> Tensor:
        x += 1
        return self.mix(x)


def test_a_block_that_writes_into_its_input() -> None:
    def call(view: Any, batch: Any, index: int) -> Any:
        hidden = view.head(batch[0]).clone()
        for layer in view.layers:
            hidden = layer(hidden)
        return hidden.mean()

    _refused(Writing, call, match=r"'layers\.0' writes into a tensor that it was given")


class Rectifying(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.relu(x))  # type: ignore[no-any-return]


def test_modules_that_say_they_work_in_place() -> None:
    def run(layers: Any, hidden: Tensor) -> Any:
        for layer in layers:
            hidden = layer(hidden)
        return hidden

    check(Rectifying, run)


class Forgetful(Linear):
    def forward(self, x: Tensor, calls: list[int]) -> Any:
        calls.pop()
        return self.mix(x)


def test_a_block_that_takes_something_out_of_a_container() -> None:
    def call(view: Any, batch: Any, index: int) -> Any:
        calls, hidden = [1, 2, 3, 4], view.head(batch[0])
        for layer in view.layers:
            hidden = layer(hidden, calls)
        return hidden.mean()

    _refused(Forgetful, call, match=r"'layers\.0' took .* out of a container")


def test_an_output_used_between_blocks() -> None:
    def run(layers: Any, hidden: Tensor) -> Any:
        total: Any = 0
        for layer in layers:
            hidden, side = layer(hidden)
            total = total + side.mean()
        return hidden + total

    check(Pair, run)


def test_an_output_given_to_a_custom_function() -> None:
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient * 2

    def call(view: Any, batch: Any, index: int) -> Any:
        hidden, states = view.head(batch[0]), []
        for layer in view.layers:
            hidden, _ = layer(hidden)
            states.append(hidden)
        return (hidden + Double.apply(states[0])).mean()  # type: ignore[no-untyped-call]

    _refused(Pair, call, match="past PyTorch's functions")


def test_detached_between_blocks() -> None:
    norms: list[float] = []

    def run(layers: Any, hidden: Tensor) -> Any:
        norms.clear()
        for layer in layers:
            hidden, _ = layer(hidden)
            norms.append(hidden.detach().norm().item())
            with torch.no_grad():
                norms.append(hidden.mean().item())
        hidden.mul_(2)
        return hidden

    check(Pair, run)
    assert len(norms) == 8


def test_a_block_under_autocast_is_recomputed_under_it() -> None:
    def run(layers: Any, hidden: Tensor) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            for layer in layers:
                hidden, _ = layer(hidden)
        return hidden.float()

    check(Pair, run)


def test_a_stack_that_is_called_twice() -> None:
    def run(layers: Any, hidden: Tensor) -> Any:
        for _ in range(2):
            for layer in layers:
                hidden, _ = layer(hidden)
        return hidden

    check(Pair, run, emulated=False)  # there a round's gradients are summed before they go home
