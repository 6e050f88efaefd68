"""Compiled blocks: one piece of code per kind, the results of plain ones."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from roundpipe_lightning.engine.capture.compiled import BlockCompiler, kind_of, plain_copy
from roundpipe_lightning.engine.capture.randomness import RandomStream, StepDraws


class Backend:
    """Counts what it compiles, and runs it as it is."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any) -> Any:
        self.count += 1
        return graph.forward


class Mode(TorchFunctionMode):
    """What the engine has around everything."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Block(nn.Module):
    def __init__(self, number: int, *, drop: float = 0.0) -> None:
        super().__init__()
        self.number = number  # differs from block to block, and is not read
        self.inner = nn.Linear(4, 4)
        self.drop = nn.Dropout(drop)
        self.register_buffer("scale", torch.full((1,), 2.0))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.drop(torch.tanh(self.inner(x))) * self.scale
        return y


class Placed:
    """Parameters on a worker."""

    def __init__(self) -> None:
        self.leaves: dict[nn.Parameter, nn.Parameter] = {}

    def leaf_of(self, parameter: nn.Parameter) -> nn.Parameter:
        return self.leaves.setdefault(parameter, nn.Parameter(parameter.detach().clone()))

    def buffer_of(self, buffer: Tensor) -> Tensor:
        return buffer


def ready(backend: Any) -> BlockCompiler:
    compiler = BlockCompiler(backend)
    compiler.end_step()
    return compiler


def run(compiler: BlockCompiler, block: nn.Module, x: Tensor, **options: Any) -> Tensor:
    given: dict[str, Any] = {"name": "b", "placed": Placed(), "stream": None, **options}
    with Mode():
        result: Tensor = compiler.stand_in(block, block=block, **given)(x)
    return result


def test_blocks_of_a_kind_share_code_and_keep_their_own_parameters() -> None:
    backend, x = Backend(), torch.randn(3, 4)
    compiler = ready(backend)
    for number in range(4):
        block = Block(number)
        assert torch.equal(run(compiler, block, x), block(x))
    assert backend.count == 1
    wide = nn.Linear(4, 8)
    assert torch.equal(run(compiler, wide, x), wide(x))
    assert (backend.count, compiler.num_kinds) == (2, 2)


def test_gradients_go_to_the_workers_parameters() -> None:
    block, placed, x = Block(0), Placed(), torch.randn(3, 4)
    run(ready(Backend()), block, x, placed=placed).sum().backward()
    block(x).sum().backward()
    for parameter in block.parameters():
        assert torch.equal(placed.leaves[parameter].grad, parameter.grad)  # type: ignore[arg-type]


def test_graphs_of_pytorchs_own_compiler_agree() -> None:
    """As `inductor` makes them, without the code that needs a C++ compiler."""
    block, x = Block(0), torch.randn(3, 4)
    torch.testing.assert_close(run(ready("aot_eager"), block, x), block(x))


def test_nothing_is_compiled_in_the_first_step() -> None:
    compiler, block = BlockCompiler(Backend()), Block(0)
    assert compiler.stand_in(block, block=block, name="b", placed=Placed(), stream=None) is block
    compiler.end_step()
    compiler.exclude("b", "it writes")
    assert compiler.stand_in(block, block=block, name="b", placed=Placed(), stream=None) is block
    other = BlockCompiler(Backend())
    other.load_state_dict(compiler.state_dict())
    assert not other.compiles("b")
    assert other.compiles("c")


def test_a_block_that_draws_draws_the_same_again() -> None:
    compiler, block, x = ready(Backend()), Block(0, drop=0.5), torch.randn(64, 4)
    compiler.add_drawing("b")
    generator = torch.default_generator
    stream = RandomStream(
        StepDraws(threading.Lock()), step_seed=1, microbatch=0, generators=lambda: (generator,)
    )

    def drawn(number: int) -> Tensor:
        with stream.block(number):
            return run(compiler, block, x, stream=stream)

    before = generator.get_state()
    first = drawn(0)
    assert torch.equal(first, drawn(0))
    assert not torch.equal(first, drawn(1))
    assert torch.equal(generator.get_state(), before)


def test_a_copy_has_the_classes_and_attributes_of_the_original() -> None:
    block = Block(7)
    shared = nn.Sequential(block, block)
    leaves = Placed()
    copy = plain_copy(shared, parameter=leaves.leaf_of, buffer=leaves.buffer_of)
    assert copy[0] is copy[1]  # type: ignore[index]
    assert copy[0] is not block  # type: ignore[index]
    assert copy[0].number == 7  # type: ignore[index]
    assert kind_of(copy) == kind_of(shared)
    assert set(leaves.leaves) == set(block.parameters())


@pytest.mark.parametrize("change", ["frozen", "dtype", "training"])
def test_kinds_differ_by_what_code_depends_on(change: str) -> None:
    one, other = Block(0), Block(1)
    assert kind_of(one) == kind_of(other)
    if change == "frozen":
        other.requires_grad_(requires_grad=False)
    elif change == "dtype":
        other.to(torch.bfloat16)
    else:
        other.eval()
    assert kind_of(one) != kind_of(other)
