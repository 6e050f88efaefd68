import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from roundpipe_lightning.emulation.tagged_tensor import tag_of
from roundpipe_lightning.engine.capture.side_outputs import SideOutputs
from roundpipe_lightning.engine.capture.torch_functions import ModeStack
from roundpipe_lightning.engine.device.base import CpuDevice
from roundpipe_lightning.engine.engine import UnusedStackWarning
from roundpipe_lightning.errors import CaptureError, ConfigurationError
from roundpipe_lightning.planning.schedule.stages import Partition
from tests.kit.engine import (
    WIDTH,
    Regressor,
    Workers,
    check_parity,
    differences,
    emulated_workers,
    engine_for,
    engine_step,
    layers_of,
    mean_step,
    on_any_workers,
    plain_step,
    plan_of,
    regression_batches,
    training_step,
)


class ListedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH)
        self.listed = [self.weight]

    def forward(self, x: Tensor) -> Tensor:
        return x + functional.linear(x, self.listed[0])


class SlyBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.scales = nn.ParameterList(torch.randn(WIDTH) for _ in range(2))
        self.listed = [self.norm.weight, self.norm.bias, *self.scales]

    def forward(self, x: Tensor) -> Tensor:
        weight, bias, *scales = self.listed
        x = x + functional.layer_norm(x, (WIDTH,), weight=weight, bias=bias)
        return x * torch.stack(scales).mean(0)


class BorrowingBlock(nn.Module):
    def __init__(self, owner: list[nn.Parameter]) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.owner = owner

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x) * self.owner[0]  # type: ignore[no-any-return]


class NormedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(x)  # type: ignore[no-any-return]


class Skipping(Regressor):
    """A step that uses the blocks' parameters, but never the stack."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        loss = functional.mse_loss(self.tail(self.head(x)).squeeze(-1), y)
        first: Any = self.layers[0]
        return loss + first.inner.weight.square().mean()


@on_any_workers
@pytest.mark.parametrize("make_block", [ListedBlock, SlyBlock])
def test_a_block_may_reach_its_parameters_past_the_view(
    workers: Workers, make_block: Callable[[], nn.Module]
) -> None:
    module = Regressor(make_block=make_block)
    check_parity(module, devices=workers(2))
    assert all(p.grad is None for p in module.parameters())


@on_any_workers
def test_a_parameter_of_somebody_else_is_refused_by_name(workers: Workers) -> None:
    owner: list[nn.Parameter] = []
    module = Regressor(make_block=lambda: BorrowingBlock(owner))
    owner.append(module.tail.bias)
    with pytest.raises(CaptureError, match=r"'tail\.bias'.*not registered in it"):
        check_parity(module, devices=workers(2))


@on_any_workers
def test_microbatches_that_write_into_buffers_are_refused(workers: Workers) -> None:
    module = Regressor(make_block=NormedBlock)
    with pytest.raises(ConfigurationError, match=r"into buffers.*Set microbatching='blocks'"):
        check_parity(module, devices=workers(2))


def test_a_stack_that_is_not_run_is_mentioned_once() -> None:
    module = Skipping()
    batches = regression_batches(3)
    plain = plain_step(module, batches)
    with engine_for(module) as engine:
        with pytest.warns(UnusedStackWarning, match=r"'layers' as one chain.*blocks="):
            result = mean_step(engine, batches)
        mean_step(engine, batches)  # a second warning would be an error
    assert not differences(module, result, plain)


class Counts(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        self.seen[getattr(func, "__name__", "")] += 1
        return func(*args, **(kwargs or {}))


def negative(x: Tensor) -> None:
    torch.neg(x)


def test_modes_are_away_and_come_back_in_their_order() -> None:
    stack, x = ModeStack(), torch.ones(1)
    with Counts() as lower, Counts() as upper:
        with stack.without():
            negative(x)
            assert lower.seen["neg"] == upper.seen["neg"] == 0
            with stack.again():
                negative(x)
                with stack.without():
                    negative(x)
                negative(x)
            negative(x)
        negative(x)
        assert lower.seen["neg"] == upper.seen["neg"] == 3
        assert torch.overrides._get_current_function_mode() is upper


def test_a_mode_sees_the_functions_of_the_blocks_and_few_of_the_engine() -> None:
    module, batches = Regressor(4), regression_batches(2)
    with Counts() as plain:
        plain_step(module, batches)
    modes: list[Counts] = []

    def context() -> Counts:
        modes.append(Counts())
        return modes[-1]

    with engine_for(module, num_microbatches=2, devices=emulated_workers(2)) as engine:
        engine.begin_step(
            batches, training_step, loss_scales=[0.5, 0.5], thread_context=context
        ).result()
    seen = sum((mode.seen for mode in modes), Counter[str]())
    assert seen["linear"] == plain.seen["linear"] + 4 * 2 * 2, "the blocks once more: recomputed"
    assert seen["mse_loss"] == 2
    others = seen.total() - sum(seen[name] for name in plain.seen)
    assert others < 40, f"{others} questions of the engine's own: {seen - plain.seen}"


class Linears:
    def __init__(self) -> None:
        self.shapes: list[tuple[int, ...]] = []
        self.places: list[set[str | None]] = []

    def __call__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func is not functional.linear:
            return NotImplemented
        self.shapes.append(tuple(args[1].shape))
        self.places.append({tag_of(x) for x in args[:2] if isinstance(x, nn.Parameter | Tensor)})
        if args[1].shape[0] > 1:
            return NotImplemented
        return functional.linear(args[0] * 0, args[1] * 0)


@on_any_workers
def test_asked_in_training_outside_the_blocks_only(workers: Workers) -> None:
    module = Regressor(num_blocks=3)
    outside = Linears()
    with engine_for(module, num_microbatches=2, devices=workers(2)) as engine:
        result = engine.begin_step(
            regression_batches(2), training_step, loss_scales=[0.5, 0.5], outside=outside
        ).result()
    assert sorted(outside.shapes) == [(1, 8), (1, 8), (8, 8), (8, 8)]
    assert all(len(places) == 1 for places in outside.places)
    batches = regression_batches(2)
    for loss, (_, target) in zip(result.losses, batches, strict=True):
        assert loss is not None
        torch.testing.assert_close(loss, target.square().mean())


def test_asked_in_evaluation() -> None:
    module = Regressor(num_blocks=3)
    outside = Linears()
    with torch.no_grad(), engine_for(module, num_microbatches=1) as engine:
        prediction = engine.evaluate(
            lambda view, batch: view(batch[0]), regression_batches(1)[0], outside=outside
        )
    assert outside.shapes == [(8, 8), (1, 8)]
    assert not prediction.any()


def test_operations_in_a_block_cost_few_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """All workers share one interpreter lock."""
    calls = Counter[str]()

    def note(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_globals["__name__"].startswith("roundpipe_lightning."):
            calls[frame.f_code.co_name] += 1

    class Counted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            before = sys.getprofile()
            sys.setprofile(note)
            for _ in range(10):
                x = self.linear(x).relu() * 0.5 + 1.0
            sys.setprofile(before)
            return x

    monkeypatch.setattr(SideOutputs, "_marks_exist", False)  # by other tests
    module = Regressor(1, make_block=Counted)
    stack = layers_of(module)
    partition = Partition(forward=(), backward=(1,))
    plan = plan_of(stack, num_workers=1, num_microbatches=1, partition=partition)
    engine_step(module, stack, plan, regression_batches(1), devices=[CpuDevice()])
    assert calls["__torch_function__"] == 40
    assert calls.total() <= 120, calls
