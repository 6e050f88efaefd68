import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from roundpipe_lightning.engine.capture.compiled import BlockCompiler, kind_of, plain_copy
from roundpipe_lightning.engine.capture.randomness import RandomStream, StepDraws
from roundpipe_lightning.errors import ConfigurationError
from tests.kit.architectures import CausalLM, decoder_stack, tiny_causal_lm, token_batches
from tests.kit.engine import (
    differences,
    emulated_workers,
    engine_for,
    mean_step,
    plain_step,
)


class Backend:
    def __init__(self) -> None:
        self.count = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any) -> Any:
        self.count += 1
        return graph.forward


class Mode(TorchFunctionMode):
    """A function mode, as the engine has one around everything."""

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
    assert (backend.count, len(compiler._kinds)) == (2, 2)


def test_every_device_has_code_of_its_own() -> None:
    """Code for more devices than PyTorch compiles one function for would run as it is."""

    class There(Placed):
        def leaf_of(self, parameter: nn.Parameter) -> nn.Parameter:
            return self.leaves.setdefault(parameter, nn.Parameter(parameter.detach().to("meta")))

        def buffer_of(self, buffer: Tensor) -> Tensor:
            return buffer.to("meta")

    backend, x, block = Backend(), torch.randn(3, 4), Block(0)
    compiler = ready(backend)
    for _ in range(2):
        run(compiler, block, x)
        assert run(compiler, block, x.to("meta"), placed=There()).is_meta
    assert (backend.count, len(compiler._kinds)) == (2, 2)


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
        stream.begin_block(number)
        return run(compiler, block, x, stream=stream)

    before = generator.get_state()
    first = drawn(0)
    assert torch.equal(first, drawn(0))
    assert not torch.equal(first, drawn(1))
    assert torch.equal(generator.get_state(), before)


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


STEPS = 3


def compiled_steps(module: CausalLM, compiler: BlockCompiler, **options: Any) -> Any:
    """Return the last of some steps, which all see the same weights."""
    stack, batches = decoder_stack(module), token_batches(4)
    with engine_for(module, stack, num_microbatches=4, compiler=compiler, **options) as engine:
        results = [mean_step(engine, batches) for _ in range(STEPS)]
    return results[-1]


def test_all_blocks_and_workers_share_code_and_agree_with_plain_pytorch() -> None:
    module, backend = tiny_causal_lm("qwen3", tied=True), Backend()
    compiler = BlockCompiler(backend)
    result = compiled_steps(module, compiler)
    assert backend.count == 2  # with and without a graph
    assert len(compiler._kinds) == 1
    assert not differences(module, result, plain_step(module, token_batches(4)), tolerance=1e-5)


class Beside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.penalty: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = torch.tanh(self.inner(x))
        self.penalty = y.square().mean()
        return y


class Counted(nn.Linear):
    calls: Tensor

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls = self.calls + 1
        return super().forward(x)


class Penalised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([Beside(), nn.Linear(4, 4), Beside(), Counted()])

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        del batch_idx
        x, loss = batch, torch.zeros(())
        for layer in self.layers:
            x = layer(x)
            if isinstance(layer, Beside):
                assert layer.penalty is not None
                loss = loss + layer.penalty
        return x.square().mean() + loss


def test_blocks_that_the_loss_looks_into_or_that_assign_buffers_run_as_they_are() -> None:
    module, backend = Penalised(), Backend()
    compiler = BlockCompiler(backend)
    batches = [torch.randn(3, 4, generator=torch.Generator().manual_seed(0))]
    with engine_for(module, num_microbatches=1, num_workers=1, compiler=compiler) as engine:
        results = [mean_step(engine, batches)]
        assert backend.count == 0
        results.append(mean_step(engine, batches))
    assert backend.count > 0
    assert set(compiler.left_as_they_are) == {"layers.0", "layers.2", "layers.3"}
    assert module.layers[3].calls == 2
    assert not differences(module, results[-1], plain_step(module, batches), tolerance=1e-6)


@pytest.mark.parametrize("rate", [0.0, 0.3])
def test_gradients_with_dropout_are_those_of_the_forward_pass(rate: float) -> None:
    """The recompute draws the same numbers: its output has the loss's gradient."""
    torch.manual_seed(0)
    module, compiler = Dropping(rate), BlockCompiler(Backend())
    with engine_for(module, num_microbatches=1, num_workers=1, compiler=compiler) as engine:
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
    devices, compiler = emulated_workers(1), BlockCompiler()
    with pytest.raises(ConfigurationError, match=r"compile=True.*emulated:0.*Leave it out"):
        engine_for(Penalised(), devices=devices, compiler=compiler)


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
