import itertools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeAlias

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from roundpipe_lightning.emulation.race_checker import ProtocolChecker
from roundpipe_lightning.emulation.server import EmulatedDevice, EmulatedServer
from roundpipe_lightning.engine.capture.compiled import BlockCompiler
from roundpipe_lightning.engine.chain.chain import BlockStack, Chain
from roundpipe_lightning.engine.device.base import CpuDevice, Device
from roundpipe_lightning.engine.engine import Engine
from roundpipe_lightning.engine.steps import StepResult
from roundpipe_lightning.engine.update.updater import UpdateUnit, update_units
from roundpipe_lightning.planning.model.profile import BlockProfile, ModelProfile
from roundpipe_lightning.planning.schedule.plan import Plan
from roundpipe_lightning.planning.schedule.stages import Partition
from tests.kit.plans import default_plan

WIDTH = 8
VOCABULARY = 64
TIMEOUT_SECONDS = 120.0
"""For steps that must not hang: a test then fails with the schedule on the screen."""

Step = Callable[[Any, Any, int], Any]
Context = Callable[[], AbstractContextManager[Any]]


class Block(nn.Module):
    """A residual block.

    Args:
        dropout: Its probability.
    """

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.inner = nn.Linear(WIDTH, 2 * WIDTH)
        self.outer = nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.outer(functional.gelu(self.inner(self.norm(x))))
        return x + self.dropout(hidden)  # type: ignore[no-any-return]


class Regressor(nn.Module):
    """Head, blocks, tail; the loss is a mean over samples.

    Args:
        num_blocks: How many blocks.
        make_block: Makes one of them.
    """

    def __init__(self, num_blocks: int = 4, *, make_block: Callable[[], nn.Module] = Block) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(make_block() for _ in range(num_blocks))
        self.tail = nn.Linear(WIDTH, 1)

    def run_blocks(self, hidden: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden

    def forward(self, x: Tensor) -> Tensor:
        return self.tail(self.run_blocks(self.head(x))).squeeze(-1)  # type: ignore[no-any-return]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        return functional.mse_loss(self(x), y)


def regression_batches(
    num_microbatches: int, *, samples_each: int = 3
) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(samples_each, WIDTH, generator=generator),
            torch.randn(samples_each, generator=generator),
        )
        for _ in range(num_microbatches)
    ]


def stack_of(blocks: Sequence[nn.Module], *, name: str = "layers") -> BlockStack:
    return BlockStack(
        name=name, blocks=tuple(blocks), names=tuple(f"{name}.{i}" for i in range(len(blocks)))
    )


def layers_of(module: Any) -> BlockStack:
    return stack_of(tuple(module.layers))


def auto_plan(stack: BlockStack | None, *, num_workers: int, num_microbatches: int) -> Plan:
    names = () if stack is None else stack.names
    blocks = tuple(BlockProfile(name=n, forward_seconds=1, backward_seconds=2) for n in names)
    profile = ModelProfile(blocks=blocks, fingerprint="tiny")
    return default_plan(profile, num_workers=num_workers, num_microbatches=num_microbatches)


def plan_of(
    stack: BlockStack | Chain | None,
    *,
    num_workers: int = 2,
    num_microbatches: int = 3,
    round_size: int | None = None,
    team_size: int = 1,
    partition: Partition | None = None,
    **held: Any,
) -> Plan:
    names = () if stack is None else stack.names
    if partition is None:
        partition = Partition(forward=(1,) * len(names), backward=(0,) + (1,) * len(names))
    size = num_microbatches if round_size is None else round_size
    return Plan(
        model="tiny",
        partition=partition,
        num_workers=num_workers,
        num_microbatches=num_microbatches,
        round_size=size,
        team_size=team_size,
        block_names=names,
        **held,
    )


ALL_ARE_EMULATED = False
"""Whether CPU workers are emulated devices: `pytest tests/engine --emulated`."""


def cpu_workers(num: int) -> list[Device]:
    return emulated_workers(num) if ALL_ARE_EMULATED else [CpuDevice(i) for i in range(num)]


def emulated_workers(num: int) -> list[Device]:
    """Return the devices of a server: all accesses to memory are checked."""
    return list(EmulatedServer(num, checker=ProtocolChecker(), poison=True).devices)


class MemoryDevice(CpuDevice):
    """Host memory that is treated as a device's: what is counted is the engine's own work."""

    shares_host_memory = False

    def upload(self, tensor: Tensor, wait: Any = None) -> Tensor:
        return tensor.detach().clone()


Workers: TypeAlias = Callable[[int], list[Device]]

on_any_workers = pytest.mark.parametrize(
    "workers", [cpu_workers, emulated_workers], ids=["cpu", "emulated"]
)


class LockingDevice(EmulatedDevice):
    """Knows which bytes it was asked to page-lock, and how often it has uploaded."""

    def __init__(self, index: int = 0) -> None:
        super().__init__(index)
        self.locked: dict[int, int] = {}
        self.num_uploads = 0

    def upload(self, tensor: Tensor, wait: Any = None) -> Tensor:
        self.num_uploads += 1
        return super().upload(tensor, wait)

    def pin(self, buffer: Tensor) -> None:
        if buffer.nbytes:
            assert buffer.data_ptr() not in self.locked
            self.locked[buffer.data_ptr()] = buffer.nbytes

    def unpin(self, buffer: Tensor) -> None:
        if buffer.nbytes:
            assert self.locked.pop(buffer.data_ptr()) == buffer.nbytes


def training_step(view: Any, batch: Any, index: int) -> Any:
    return view.training_step(batch, 0)


@dataclass(frozen=True, kw_only=True)
class Plain:
    """Result of a plain loop over the microbatches.

    Attributes:
        losses: One per microbatch, unscaled.
        gradients: By the parameter's name; None where there is none.
    """

    losses: list[Tensor]
    gradients: dict[str, Tensor | None]


def plain_step(
    module: nn.Module,
    batches: Sequence[Any],
    *,
    call: Step = training_step,
    context: Context = nullcontext,
) -> Plain:
    module.zero_grad()
    losses = []
    for index, batch in enumerate(batches):
        with context():
            loss = call(module, batch, index)
        (loss / len(batches)).backward()
        losses.append(loss.detach())
    gradients = {name: parameter.grad for name, parameter in module.named_parameters()}
    module.zero_grad()
    return Plain(losses=losses, gradients=gradients)


def engine_of(
    module: nn.Module,
    stack: BlockStack | Sequence[BlockStack] | None,
    plan: Plan,
    *,
    devices: Sequence[Device] | None = None,
    **options: Any,
) -> Engine:
    devices = cpu_workers(plan.num_workers) if devices is None else devices
    options = {"timeout_seconds": TIMEOUT_SECONDS, **options}
    return Engine(module, stack=stack, devices=devices, plan=plan, **options)


def engine_for(
    module: Any,
    stack: BlockStack | None = None,
    *,
    devices: Sequence[Device] | None = None,
    timeout_seconds: float = TIMEOUT_SECONDS,
    compiler: BlockCompiler | None = None,
    **plan: Any,
) -> Engine:
    """Return an engine for a stack, by default the module's `layers`, and a plan as of `plan_of`.

    Given devices have a worker each.
    """
    stack = layers_of(module) if stack is None else stack
    workers = {} if devices is None else {"num_workers": len(devices)}
    return engine_of(
        module,
        stack,
        plan_of(stack, **{**workers, **plan}),
        devices=devices,
        timeout_seconds=timeout_seconds,
        compiler=compiler,
    )


def units_of(engine: Engine, module: nn.Module) -> list[UpdateUnit]:
    """Return what an updater of the module updates at once."""
    stacks = [zip(stack.names, stack.blocks, strict=True) for stack in engine.stacks]
    blocks = dict(itertools.chain.from_iterable(stacks))
    return update_units(module, blocks, shared=engine.store.shared)


def mean_step(
    engine: Engine,
    batches: Sequence[Any],
    *,
    call: Step = training_step,
    context: Context = nullcontext,
    **options: Any,
) -> StepResult:
    options = {"loss_scales": [1 / len(batches)] * len(batches), **options}
    return engine.begin_step(batches, call, thread_context=context, **options).result()


def engine_step(
    module: nn.Module,
    stack: BlockStack | Sequence[BlockStack] | None,
    plan: Plan,
    batches: Sequence[Any],
    *,
    call: Step = training_step,
    devices: Sequence[Device] | None = None,
    context: Context = nullcontext,
) -> StepResult:
    with engine_of(module, stack, plan, devices=devices) as engine:
        return mean_step(engine, batches, call=call, context=context)


def check_parity(
    module: Any,
    batches: Sequence[Any] | None = None,
    *,
    stack: BlockStack | None = None,
    call: Step = training_step,
    devices: Sequence[Device] | None = None,
    tolerance: float = 0.0,
    context: Context = nullcontext,
    twin: nn.Module | None = None,
    **plan: Any,
) -> StepResult:
    """Run one step on an engine of its own, and assert that it equals a plain loop.

    Args:
        module: The module.
        batches: Its microbatches; three of `regression_batches` if not given.
        stack: Its blocks; by default its `layers`.
        call: The user's step.
        devices: One per worker; on the processor if not given.
        tolerance: 0 for equality to the bit.
        context: Around the user's step, autocast for example; the backward pass runs outside it.
        twin: A copy for the plain loop; the module itself where it writes into no buffers.
        **plan: As for `plan_of`.
    """
    stack = layers_of(module) if stack is None else stack
    batches = regression_batches(plan.get("num_microbatches", 3)) if batches is None else batches
    twin = module if twin is None else twin
    plain = plain_step(twin, batches, call=call, context=context)
    made = plan_of(stack, **{"num_microbatches": len(batches), **plan})
    result = engine_step(module, stack, made, batches, call=call, devices=devices, context=context)
    for (name, buffer), expected in zip(module.named_buffers(), twin.buffers(), strict=True):
        assert _same(buffer, expected, tolerance), name
    assert not differences(module, result, plain, tolerance=tolerance), made
    return result


def differences(
    module: nn.Module, result: StepResult, plain: Plain, *, tolerance: float = 0.0
) -> list[str]:
    """Say what differs between the engine and the plain loop; nothing if all is equal.

    Args:
        module: Names the parameters.
        result: The engine's.
        plain: The plain loop's.
        tolerance: 0 for equality to the bit, else relative to the largest entry of a tensor.
    """
    found = []
    for index, (got, want) in enumerate(zip(result.losses, plain.losses, strict=True)):
        if got is None or not _same(got, want, tolerance):
            found.append(f"loss {index}: {got} instead of {want}")
    for name, parameter in module.named_parameters():
        got, wanted = result.gradients.get(parameter), plain.gradients[name]
        if (got is None) != (wanted is None):
            found.append(f"{name}: {'no' if got is None else 'a'} gradient")
        elif got is not None and wanted is not None and not _same(got, wanted, tolerance):
            found.append(f"{name}: differs by {(got - wanted).abs().max().item():.3g}")
    return found


def _same(got: Tensor, want: Tensor, tolerance: float) -> bool:
    if ALL_ARE_EMULATED:
        tolerance = max(tolerance, 1e-6)  # devices add up the gradients of a round
    if not tolerance:
        return torch.equal(got, want)
    scale = max(1.0, float(want.abs().max()))
    return got.shape == want.shape and float((got - want).abs().max()) <= tolerance * scale
